"""Z-Image as diffusers has it (`ZImageTransformer2DModel`): its sizes, split plan and fused forwards.

Samples are lists of images and captions of any sizes. The model joins each sample's tokens to one sequence and pads
these to the longest, with a mask. That sequence is split as the stream of all tokens. Blocks in front of it refine the
image's tokens, split as a stream of their own and made whole in between. Those that refine the caption, and the
features of reference images, run whole on every rank: they are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import (
    Processor,
    attend_jointly,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, one_of_two
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_HOME = "diffusers.models.transformers.transformer_z_image"
_MODEL = f"{_HOME}.ZImageTransformer2DModel"

# Images alone. Of a caption its pipeline takes 512 tokens at most, and pads to a multiple of 32, as the model does
# with the image's.
GEOMETRIES = {"z-image": ModelGeometry(temporal_stride=1, text_tokens=512)}


def _sizes(layers: int, width: int) -> TransformerFlops:
    """The MLP has three matrices of a middle of 8/3 of the width, the work of two of 4 times the width."""
    return TransformerFlops(layers, width, 4 * width, cross_attention=False)


TRANSFORMERS = {"z-image": _sizes(30 + 2, 3840)}  # the class's defaults


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    """Blocks that refine image and caption count as so many more, as if these attended to each other there."""
    return _sizes(config["n_layers"] + config["n_refiner_layers"], config["dim"])


FLOPS = {_MODEL: _flops}

_REFINER = "noise_refiner"
BLOCKS = {_MODEL: (f"{_REFINER}.*", "context_refiner.*", "siglip_refiner.*", "layers.*")}

_IMAGE = ("image",)


def _of_blocks(name: str, tokens: Split) -> dict[str, Mapping[str, Rule]]:
    """Of a list of blocks, which are given tables and masks (B, S, ...)."""
    return {f"{name}.0": {"x": tokens}, f"{name}.*": dict.fromkeys(("attn_mask", "freqs_cis", "noise_mask"), tokens)}


def _split_plan(model: nn.Module) -> SplitPlan:
    tokens, image = Split(1), Split(1, _IMAGE)
    refines = [*model.get_submodule(_REFINER).children()] != []
    return SplitPlan(
        inputs={
            "": {"controlnet_block_samples": tokens},
            **(_of_blocks(_REFINER, image) if refines else {}),
            **_of_blocks("layers", tokens),
            "all_final_layer.*": {"noise_mask": tokens},
        },
        outputs={},
        gathers={"all_final_layer.*": {0: tokens}},
        gathers_inside={f"{_REFINER}.-1": {0: image}} if refines else {},
        attention={
            **({f"{_REFINER}.*.attention": Attention(_IMAGE, arguments={"attention_mask": image})} if refines else {}),
            "layers.*.attention": Attention(arguments={"attention_mask": tokens}),
        },
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

_ROTATED = Projection(rotary="freqs_cis", layout="complex")
_PROJECTIONS = {f"{_REFINER}.*.attention": {"image": _ROTATED}, "layers.*.attention": {"video": _ROTATED}}

PROJECTIONS = {_MODEL: lambda _: _PROJECTIONS}

_PROCESSOR = Processor(
    class_path=f"{_HOME}.ZSingleStreamAttnProcessor",
    known_calls={
        "5efcccaa824c26db-29aa03d78f5302fd8c2c4a26e944a805f16bed99ac6b445e97d2d5b5b373": TRIED,
    },
    norms=(DIFFUSERS_RMS_NORM,),
    helpers={},
    pairs=(("norm_q", "norm_k"),),
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    table = cross_attention_kwargs.get("freqs_cis")
    others = bool(cross_attention_kwargs.keys() - {"freqs_cis"}) or not _rotates(table)
    if (original := original_if_changed(self, _PROCESSOR, as_before=others)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    if attention_mask is not None and attention_mask.ndim == 2:
        attention_mask = attention_mask[:, None, None, :]
    stream = projected(self, hidden_states, rope=_rope(table, hidden_states), rounding="eager")
    attended = attend_jointly(self, [stream], Dispatched(self.processor, attention_mask))
    return project_out(self, attended, detach_bias=False)


def _rotates(table: Tensor | None) -> bool:
    """Whether the kernel has the precision of this table; complex numbers of other widths are diffusers' matter."""
    return table is None or table.dtype is torch.complex64


def _rope(table: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """A table (B or 1, S, D/2H) of complex numbers as `qk_norm_rope` takes it."""
    if table is None:
        return None
    if table.ndim != 3 or table.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"A rotary table must be (B, S, D/2H) for tokens of shape {tuple(tokens.shape)}; got {tuple(table.shape)}."
        )
    return table.real.unsqueeze(2), table.imag.unsqueeze(2)


def _forward(
    self: Any,
    x: Tensor,
    attn_mask: Tensor,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
) -> Tensor:
    of_attention = of_feed_forward = None
    if self.modulation and noise_mask is None:
        entries = self.adaLN_modulation(adaln_input).expand(x.shape[0], -1)
        of_attention, of_feed_forward = _modulations(entries.unsqueeze(1))
    elif self.modulation:
        entries = torch.cat([self.adaLN_modulation(each).expand(x.shape[0], -1) for each in (adaln_noisy, adaln_clean)])
        which = one_of_two(noise_mask != 1, x.shape[0])  # type: ignore[arg-type]
        of_attention, of_feed_forward = _modulations(entries, which)
    stream = ResidualStream(self, x, rounding="eager")
    y = stream.norm(self.attention_norm1, of_attention)
    with stream.recomputed(y):
        attended = self.attention(y, attention_mask=attn_mask, freqs_cis=freqs_cis)
    stream.add(stream.behind(attended, self.attention_norm2), of_attention)
    y = stream.norm(self.ffn_norm1, of_feed_forward)
    with stream.recomputed(y):
        fed = self.feed_forward(y)
    stream.add(stream.behind(fed, self.ffn_norm2), of_feed_forward)
    return stream.end()


def _modulations(embedded: Tensor, which: Tensor | None = None) -> tuple[Modulation, Modulation]:
    """Of attention and feed-forward; gates are of tanh."""
    scale, gate, of_feed_forward, gate_of_feed_forward = embedded.chunk(4, dim=-1)
    return (
        Modulation(None, scale, gate.tanh(), which=which),
        Modulation(None, of_feed_forward, gate_of_feed_forward.tanh(), which=which),
    )


_BLOCK = FusedBlock(
    class_path=f"{_HOME}.ZImageTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual; norms behind branches: norm_modulate",
    known_forwards={"b1a43f8092f82c14-5cbc450cf": TRIED},
    helpers={"select_per_token": "a74e6c2704a231e9-0f50d7504"},
    parts=tuple(
        Part(name, DIFFUSERS_RMS_NORM) for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    ),
)
FUSED_BLOCKS = {_BLOCK.class_path: _BLOCK}
FUSED_ATTENTIONS = {_PROCESSOR.class_path: fused_attention(_PROCESSOR, _attend)}
