"""A small network, its split plan, and what its first call says of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.parallel import (
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    parallelize,
    sequence_parallel_attention,
)


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
            lengths = self.context.lengths()
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return x + out.flatten(2)


class Applied(nn.Module):
    """A function of (B, S, 8), and the module that it uses."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.module) if self.module is not None else self.function(x)


class Counter(nn.Module):
    """Counts its calls, or the tokens that it has seen."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.shape[1] if self.what == "tokens" else 1
        return x


class SharedMean(nn.Module):
    """A mean over all tokens of the group, of which nobody has told autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.context is None:
            return x - x.mean(1, keepdim=True)
        total = x.sum(1, keepdim=True)
        dist.all_reduce(total.detach(), group=self.context.mesh.sp.group)
        return x - total.detach() / sum(self.context.lengths())


class Network(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def exchange(model: nn.Module, context: SequenceContext) -> Callable[[], None]:
    layers = [layer for layer in model.modules() if isinstance(layer, Attention | SharedMean)]

    def give(value: SequenceContext | None) -> None:
        for layer in layers:
            layer.context = value

    give(context)
    return lambda: give(None)


def plan(attention: Callable[[nn.Module, SequenceContext], Callable[[], None]] = exchange) -> SplitPlan:
    return SplitPlan({"": {"x": Split(1)}}, {}, {"head": {0: Split(1)}}, attention)


def network(layer: Callable[[], nn.Module]) -> Network:
    torch.manual_seed(0)
    return Network(layer(), Attention())


def first_call(model: nn.Module, split: SplitPlan | None, *args: Any, **kwargs: Any) -> str:
    """The error, or what is logged."""
    lines: list[str] = []
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    undo = parallelize(model, mesh, split, log=lines.append)
    try:
        model(*args, **kwargs)
    except ValueError as error:
        with pytest.raises(ValueError, match="where its sequence is split"):  # again, for who goes on
            model(*args, **kwargs)
        return str(error)
    finally:
        undo()
    return lines[0] if lines else "passed"
