"""What a plan forgot is an error on the first call, on all ranks, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.parallel import (
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    parallelize,
    read_diffusers_plan,
    sequence_parallel_attention,
    verify_plan,
)
from lightning_videoscale.parallel.plan import Undo
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


# -- layers that a user may have in the region ------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention that its plan exchanges, with rotated positions if it is given angles."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(8, 24), causal
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(2)
        if self.context is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        else:
            lengths = self.context.lengths_of(x.shape[1])
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return x + out.flatten(2)


class Applied(nn.Module):
    """A function of (B, S, 8), and the module that it uses."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.module) if self.module is not None else self.function(x)


class CrossAttention(nn.Module):
    """Attends to as many tokens of a text as a rank of two has of nine."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.attention = nn.Parameter(torch.randn(1, 5, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        text = self.text.expand(x.shape[0], -1, -1)
        return x + self.attention(x, text, text)[0]


class Counter(nn.Module):
    """Counts its calls, or the tokens that it has seen, and centres by a running mean."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.shape[1] if self.what == "tokens" else 1
        return x


def over_channels_first(x: Tensor, module: nn.Module) -> Tensor:
    return x + module(x.transpose(1, 2)).transpose(1, 2)


def recurrent(x: Tensor, module: nn.Module) -> Tensor:
    return x + module(x)[0]


def padded_convolution(x: Tensor, module: nn.Module) -> Tensor:
    return x + module(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


SEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (
        lambda: Applied(lambda x, m: x + m(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        r"layers.0.module (MultiheadAttention) calls multi_head_attention_forward",
    ),
    "bare attention": (
        lambda: Applied(lambda x: x + F.scaled_dot_product_attention(x, x, x)),
        "layers.0 (Applied) calls scaled_dot_product_attention",
    ),
    "convolution": (lambda: Applied(over_channels_first, nn.Conv1d(8, 8, 3, padding=1)), "(Conv1d) calls conv1d"),
    "group norm": (lambda: Applied(over_channels_first, nn.GroupNorm(2, 8)), "(GroupNorm) calls group_norm"),
    "instance norm": (lambda: Applied(over_channels_first, nn.InstanceNorm1d(8)), "calls instance_norm"),
    "batch norm": (lambda: Applied(over_channels_first, nn.BatchNorm1d(8)), "(BatchNorm1d) calls batch_norm"),
    "norm over tokens": (lambda: Applied(lambda x: F.layer_norm(x, x.shape[1:])), "(Applied) calls layer_norm"),
    "recurrence": (lambda: Applied(recurrent, nn.LSTM(8, 8, batch_first=True)), "(LSTM) calls lstm"),
}
COMPARED: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Applied(lambda x: x - x.mean(1, keepdim=True)),
    "cumsum": lambda: Applied(lambda x: x + x.cumsum(1)),
    "roll": lambda: Applied(lambda x: x + x.roll(1, 1)),
    "softmax": lambda: Applied(lambda x: x * x.softmax(1)),
    "positions": lambda: Applied(lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None]),
    "positions by index": lambda: Applied(lambda x: x + 0.1 * torch.arange(x.shape[1])[:, None]),
    "causal": lambda: Attention(causal=True),
    "padded convolution": lambda: Applied(padded_convolution, nn.Conv1d(8, 8, 3)),
    "tokens counted": lambda: Counter("tokens"),
}
ALLOWED: dict[str, Callable[[], nn.Module]] = {
    "nothing else": nn.Identity,
    "pointwise convolution": lambda: Applied(over_channels_first, nn.Conv1d(8, 8, 1)),
    "layer norm": lambda: nn.LayerNorm(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "dropout": lambda: nn.Dropout(0.5),
    "cross-attention": CrossAttention,
    "calls counted": lambda: Counter("calls"),
    "convolution over channels": lambda: Applied(lambda x, m: m(x.flatten(0, 1)[:, None])[:, 0].view_as(x), nn.Conv1d(1, 1, 3, padding=1)),
}


class Network(nn.Module):
    def __init__(self, *layers: nn.Module, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers, self.head, self.checkpointing = nn.ModuleList(layers), nn.Linear(8, 8), checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(x)


def exchange(model: nn.Module, context: SequenceContext) -> Undo:
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]

    def give(value: SequenceContext | None) -> None:
        for layer in layers:
            layer.context = value

    give(context)
    return lambda: give(None)


def plan(attention: Callable[[nn.Module, SequenceContext], Undo] = exchange) -> SplitPlan:
    return SplitPlan({"": {"x": Split(1)}}, {}, {"head": 1}, attention)


def network(layer: Callable[[], nn.Module]) -> Network:
    torch.manual_seed(0)
    return Network(layer(), Attention())


def first_call(model: nn.Module, split: SplitPlan, *args: Any, **kwargs: Any) -> str:
    """The error, or what is logged."""
    lines: list[str] = []
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    undo = parallelize(model, mesh, split, log=lines.append)
    try:
        model(*args, **kwargs)
    except ValueError as error:
        return str(error)
    finally:
        undo()
    return lines[0] if lines else "passed"


def first_calls(kind: str) -> dict[str, str]:
    layers: dict[str, Any] = {"seen": {k: v[0] for k, v in SEEN.items()}, "compared": COMPARED, "allowed": ALLOWED}[kind]
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    return {name: first_call(network(layer), plan(), x) for name, layer in layers.items()}


def test_what_mixes_tokens_by_what_it_is_is_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks(2).run(first_calls, "seen"):
        for name, (_, call) in SEEN.items():
            assert "Network mixes tokens where its sequence is split" in messages[name], name
            assert call in messages[name]


def test_what_mixes_tokens_by_how_it_is_used_is_found_by_comparison(ranks: Ranks) -> None:
    for messages in ranks(2).run(first_calls, "compared"):
        for name in COMPARED:
            assert "Network computes something else where its sequence is split" in messages[name], name


def test_what_keeps_to_its_token_is_allowed(ranks: Ranks) -> None:
    first, second = ranks(2).run(first_calls, "allowed")
    for name in ALLOWED:
        assert "verified on its first call: split and whole differ by at most" in first[name], name
        assert second[name] == "passed"


# -- diffusers' LTX -----------------------------------------------------------------------------------------------------


class ExchangedAttention:
    """What a user writes who knows of self-attention only, or forgets to exchange at all."""

    def __init__(self, context: SequenceContext | None) -> None:
        self.context = context

    def __call__(self, attn: Any, hidden_states: Tensor, _: None, __: None, image_rotary_emb: Any) -> Tensor:
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        q, k = (apply_rotary_emb(x, image_rotary_emb) for x in (q, k))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        if self.context is None:
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        else:
            lengths = self.context.lengths_of(hidden_states.shape[1])
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


def ltx_attention(exchanged: bool) -> Callable[[Any, SequenceContext], Undo]:
    def install(model: Any, context: SequenceContext) -> Undo:
        layers = [block.attn1 for block in model.transformer_blocks]
        originals = [layer.processor for layer in layers]
        for layer in layers:
            layer.set_processor(ExchangedAttention(context if exchanged else None))

        def undo() -> None:
            for layer, original in zip(layers, originals, strict=True):
                layer.set_processor(original)

        return undo

    return install


def ltx(exchanged: bool, text_is_split: bool) -> str:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8}
    model = LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_layers=2, **sizes)
    declared = read_diffusers_plan(model, ltx_attention(exchanged))
    if not text_is_split:
        declared = SplitPlan({"": {"hidden_states": Split(1, 3)}}, declared.outputs, declared.gathers, declared.attention)
    return first_call(
        model,
        declared,
        torch.randn(1, 12, 4),
        torch.randn(1, 6, 8),
        torch.tensor([500]),
        torch.ones(1, 6, dtype=torch.int64),
        num_frames=3,
        height=2,
        width=2,
    )


def test_plans_of_ltx(ranks: Ranks) -> None:
    """diffusers also splits the text, whose keys then must travel, too."""
    pool = ranks(2)
    for message in pool.run(ltx, exchanged=True, text_is_split=True):
        assert "transformer_blocks.0.attn2 (LTXAttention) calls scaled_dot_product_attention" in message
        assert "attn1" not in message
    for message in pool.run(ltx, exchanged=False, text_is_split=False):
        assert "transformer_blocks.0.attn1 (LTXAttention) calls scaled_dot_product_attention" in message
        assert "attn2" not in message
    assert "verified on its first call" in pool.run(ltx, exchanged=True, text_is_split=False)[0]
