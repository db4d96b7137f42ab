"""The split plan of Wan, and the attention that exchanges.

Cross-attention reads text (and image) tokens that every rank holds whole, so nothing is exchanged there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import HearsOfBackends, own_attention_backend
from lightning_videoscale.injection.fused_block import fused_block_of
from lightning_videoscale.models.hidden_exchange.arguments import learned_tables
from lightning_videoscale.models.wan.attention import ExchangingAttention, WanRotary, attend
from lightning_videoscale.models.wan.fused_attention import FUSED_ATTENTION, changed_attention, foreign
from lightning_videoscale.models.wan.hidden_exchange import OF_SELF, attend_hiding_exchange
from lightning_videoscale.parallel import (
    Projection,
    SequenceContext,
    Split,
    SplitPlan,
    check_heads,
    sequence_parallel_attention,
)
from lightning_videoscale.parallel.chosen_attention import choices_of_diffusers
from lightning_videoscale.parallel.plan import submodules
from lightning_videoscale.parallel.schedules import HIDING, ScheduleName
from lightning_videoscale.parallel.schedules.table import LayerShape
from lightning_videoscale.undo import Undo

_MASKED = "Sequence-parallel Wan self-attention takes no attention mask."


class SequenceParallelWanAttention(HearsOfBackends):
    """Attention processor for the self-attention of a Wan block whose hidden states are split.

    Args:
        context: The group and the split tables.
        path: The module's, for messages.
        own: The processor whose place it takes.
    """

    detaches_bias = True  # where it is asked to, as the fused attention is

    def __init__(self, context: SequenceContext, path: str, own: Any) -> None:
        self.context, self._path, self._own = context, path, own
        self._choices = context.choices

    def on_backend(self, name: str | None) -> None:
        """Attends by the backend that was set by diffusers' ``set_attention_backend``, for it is the user's word."""
        self._choices = self.context.choices if name is None else choices_of_diffusers(name)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: WanRotary = None,
        detach_bias: bool = False,
    ) -> Tensor:
        """Attends from and to all tokens of the group; (B, s, dim) in and out."""
        if encoder_hidden_states is not None:
            raise ValueError("Sequence-parallel Wan self-attention takes no other tokens.")
        if self.context.suspended:  # called by what a user has put around it since
            whole: Tensor = self._own(attn, hidden_states, None, attention_mask, rotary_emb)
            return whole
        if (other := foreign(self._own)) is not None:
            raise ValueError(
                f"{self._path}: sequence parallelism stands for its processor, which is now {other}. Patch it before "
                "the split, which then says what it cannot replace, or put a processor of your own around this one."
            )
        change = changed_attention(attn)
        fused = fused_block_of(attn) is FUSED_ATTENTION and change is None
        learned = None if self.context.schedule == "serial" else learned_tables(rotary_emb)
        if (schedule := self._schedule(attn, hidden_states, learned)) != "serial":
            if attention_mask is not None:
                raise ValueError(_MASKED)
            if learned is not None:
                raise ValueError(f"{self._path}: {learned}. Use schedule='serial'.")
            if change is not None:
                raise ValueError(
                    f"{self._path}: {change}, and the schedule {schedule!r} normalises without calling it. Use "
                    "schedule='serial'. Under 'auto', change norms before fit begins, which it then sees."
                )
            self._watched()
            way = {"by_slices": schedule == "sliced", "detach_bias": detach_bias}
            out: Tensor = attend_hiding_exchange(attn, hidden_states, rotary_emb, self.context, self._choices, **way)
            return out
        inputs = hidden_states, None, attention_mask, rotary_emb
        return attend(attn, *inputs, self._exchange, fused=fused, detach_bias=detach_bias)

    def exchange_of(self, attn: Any, hidden_states: Tensor) -> ExchangingAttention | None:
        """What attends to all tokens of the group, if all else is as without it: by the schedule "serial"."""
        if foreign(self._own) is not None:  # which its own call refuses
            return None
        return self._exchange if self._schedule(attn, hidden_states) == "serial" else None

    def _schedule(self, attn: Any, hidden_states: Tensor, only_serial: str | None = None) -> ScheduleName:
        if self.context.schedule != "auto":
            return self.context.schedule
        if only_serial is not None:
            return "serial"
        tokens, head_dim = sum(self.context.lengths()), attn.inner_dim // attn.heads
        has_biases = getattr(attn.to_v, "bias", None) is not None
        layer = LayerShape.of(hidden_states, tokens, attn.heads, head_dim, across_heads=True, has_biases=has_biases)
        return self.context.schedule_of(layer)

    def _watched(self) -> None:
        if self.context.on_exchange is not None:  # compiled code never reads the path, so that blocks may share it
            others = [stream for stream in self.context.record.tables if stream != "video"]
            objection = f"the split plan splits {others}, and this attends over video alone." if others else None
            self.context.on_exchange(self._path, objection)

    def _exchange(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self._watched()
        if mask is not None:
            raise ValueError(_MASKED)
        context = self.context
        return sequence_parallel_attention(
            query,
            key,
            value,
            context.mesh,
            lengths=context.lengths(),
            transport=context.transport,
            attention_backend=self._choices,
            number=context.number,
        )


TIMESTEP = Split(1, ndim=2, broadcasts=True)
"""Of timesteps (B, S), of tokens; those of samples, (B,) or (B, 1), stay whole."""


def split_plan(model: nn.Module) -> SplitPlan:
    """The plan of a `WanTransformer3DModel`."""
    return SplitPlan(
        inputs={"": {"timestep": TIMESTEP}, "blocks.0": {"hidden_states": Split(1)}},
        outputs={"rope": {0: Split(1, keeps_whole=True), 1: Split(1, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention=partial(split_attention, paths=("blocks.*.attn1",)),
        schedules=("serial", *HIDING),
    )


def projections(_: nn.Module) -> Mapping[str, Mapping[str, Projection]]:
    """Those of a Wan's self-attention, which its kin have, too."""
    return {"blocks.*.attn1": {"video": OF_SELF}}


def split_attention(model: nn.Module, context: SequenceContext, paths: Sequence[str]) -> Undo:
    """Gives Wan's self-attention modules of these paths, as a `SplitPlan` has them, the processor that exchanges.

    Raises:
        ValueError: If a path names none, a processor is not diffusers' own, or the heads are too few.
    """
    layers: dict[str, Any] = {path: layer for each in paths for path, layer in submodules(model, each).items()}
    for layer in layers.values():
        check_heads(layer.heads, context.mesh.ulysses.size)
        if (other := foreign(layer.processor)) is not None:
            raise ValueError(
                f"The model's self-attention has the processor {type(layer.processor).__name__}, {other}, whose "
                "computation is unknown here; sequence parallelism replaces only diffusers' own WanAttnProcessor."
            )
    undo = Undo()
    for path, layer in layers.items():
        context.attention[path] = layer
        undo.add(partial(layer.set_processor, layer.processor))
        processor = SequenceParallelWanAttention(context, path, layer.processor)
        processor.on_backend(own_attention_backend(layer.processor))
        layer.set_processor(processor)
        undo.add(context.watch_schedules(partial(_objection, layer, path)))
    return undo


def _objection(layer: Any, path: str) -> str | None:
    """What only the serial schedule calls in an attention module, or None."""
    change = changed_attention(layer)
    return None if change is None else f"{path}: {change}, which only they call"
