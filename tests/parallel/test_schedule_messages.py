"""The pieces of the sliced schedule by the symmetric transport, on threads, and in which order they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention import as_choices
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.attention_output import attend_and_project, project_output
from lightning_videoscale.parallel.schedules.input_projections import QueryKeyNorm, project_heads
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads, gather_heads, scatter_heads
from tests.parallel.ranks_on_threads import axis_of, on_threads

HEADS, DIM, BATCH, WIDTH = 7, 6, 2, 42


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / shape[-1] ** 0.5

    names = ("q", "k", "v", "out")
    matrices = {name: random(WIDTH, WIDTH) for name in names} | {f"{name}_bias": random(WIDTH) for name in names}
    return matrices | {"q_norm": random(WIDTH), "k_norm": random(WIDTH)}


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring channels of (B, S, H, D) by angles (S, D / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None])
    return turned.flatten(-2)


def whole_layer(x: Tensor, angles: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The layer on one rank, operation by operation."""
    q, k, v = (F.linear(x, w[name], w[f"{name}_bias"]) for name in ("q", "k", "v"))
    q, k = (F.rms_norm(each, (WIDTH,), w[f"{name}_norm"], 1e-6) for each, name in ((q, "q"), (k, "k")))
    q, k, v = (each.unflatten(-1, (HEADS, DIM)) for each in (q, k, v))
    q, k = rotated(q, angles), rotated(k, angles)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.linear(out.transpose(1, 2).flatten(2), w["out"], w["out_bias"])


def split_layer(
    x: Tensor, angles: Tensor, w: dict[str, Tensor], ulysses: Ulysses, *, by_slices: bool, computed: Sequence[str] = ()
) -> Tensor:
    """The layer of one of several ranks; the projections ``computed`` come as results, as where a Linear is wrapped."""
    mine = ulysses.heads.out.heads[0][ulysses.axis.rank]
    channels = slice(mine.start * DIM, mine.stop * DIM)
    rows = angles.repeat_interleave(BATCH, 0)[None, :, None]
    tensors = NormTensors((w["q_norm"][channels], w["k_norm"][channels]), (rows.cos(), rows.sin()))
    linears = {name: (w[name], w[f"{name}_bias"]) for name in ("q", "k", "v")}
    projections = [F.linear(x, *linear) if name in computed else linear for name, linear in linears.items()]
    norm = NormAcrossHeads(WIDTH, 1e-6, "fp32_once", "reference")
    parts = project_heads(x, projections, QueryKeyNorm(norm, tensors), ulysses, HEADS, by_slices=by_slices)
    out = (w["out"], w["out_bias"])
    if not by_slices:
        attended = F.scaled_dot_product_attention(parts.query, parts.key, parts.value)
        return project_output(attended, out, ulysses, by_slices=False)
    return attend_and_project(parts.query, parts.key, parts.value, out, ulysses, as_choices("sdpa"), DIM**-0.5)


def gradients(y: Tensor, x: Tensor, w: dict[str, Tensor], cotangent: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, [x, *w.values()], cotangent))


@pytest.mark.parametrize("computed", [(), ("q", "v")])
@pytest.mark.parametrize("by_slices", [True, False])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 1, 6)])
def test_a_layer_by_pushes_equals_a_whole_one(lengths: Sequence[int], by_slices: bool, computed: Sequence[str]) -> None:
    size, total = len(lengths), sum(lengths)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(BATCH, total, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    cotangent = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    angles = torch.rand(total, DIM // 2, dtype=torch.float64, generator=generator)
    expected_weights = {name: t.requires_grad_() for name, t in weights().items()}
    y = whole_layer(x, angles, expected_weights)
    expected = [y.detach(), *gradients(y, x, expected_weights, cotangent)]

    def work(transport: SymmetricTransport, rank: int) -> list[list[Tensor]]:
        assigned = assign_heads(rank, tuple(lengths), tuple(lengths), HEADS, HEADS)
        ulysses = Ulysses(axis_of(rank, size), assigned, transport)
        found = []
        for _ in range(3):  # slots are used again
            mine = {name: t.requires_grad_() for name, t in weights().items()}
            own = x.detach().split(list(lengths), 1)[rank].clone().requires_grad_()
            out = split_layer(own, angles, mine, ulysses, by_slices=by_slices, computed=computed)
            found.append([out.detach(), *gradients(out, own, mine, cotangent.split(list(lengths), 1)[rank])])
        return found

    by_rank = on_threads(size, work)
    for turn in range(3):
        for i, (whole, *parts) in enumerate(zip(expected, *(found[turn] for found in by_rank), strict=True)):
            together = torch.cat(parts, 1) if i < 2 else sum(parts)
            torch.testing.assert_close(together, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_slots_take_no_more_than_what_two_layers_send(size: int) -> None:
    """However many layers there are, and by whichever schedules one after the other, as "auto" tries them."""
    tokens, heads = 128, 6
    lengths, dim = (tokens,) * size, 64

    def work(transport: SymmetricTransport, rank: int) -> int:
        assigned = assign_heads(rank, lengths, lengths, heads, heads)
        ulysses = Ulysses(axis_of(rank, size), assigned, transport)
        matrix = (torch.eye(heads * dim).requires_grad_(), None)
        x = torch.ones(1, tokens, heads * dim, requires_grad=True)
        q, k, v = scatter_heads(*[x.unflatten(2, (heads, dim))] * 3, ulysses)
        y = gather_heads(F.scaled_dot_product_attention(q, k, v), ulysses).flatten(2)
        for by_slices in [False, *[True] * 4]:
            parts = project_heads(y, [matrix] * 3, None, ulysses, heads, by_slices=by_slices)
            y = attend_and_project(parts.query, parts.key, parts.value, matrix, ulysses, as_choices("sdpa"), 1.0)
        torch.autograd.grad(y.sum(), x)
        return transport.memory_bytes

    message = tokens * heads * dim * 4 * (size - 1) // size  # bytes, of all other ranks
    taken = on_threads(size, work)
    assert max(taken) <= 2 * 8 * message
    if size == 2:
        assert taken == [12 * message] * 2  # three pushed together, three pulled, and three that are joined


class Noted:
    """An exchange with a peer that sends what it is sent, and notes when it does."""

    def __init__(self, message: Tensor, pieces: Sequence[Tensor], events: list[str]) -> None:
        self.message, self.pieces, self.events = message, pieces, events

    def send(self, *peers: int) -> None:
        self.events += [f"send {peer}" for peer in peers]


class Recorder:
    """A transport that sends nothing."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def open(self, message: Tensor, send: Any, receive: Any, axis: Any) -> Noted:
        return Noted(message, message.split(send), self.events)

    def begin(self, like: Tensor, send: Any, receive: Any, axis: Any) -> Noted:
        return self.open(like.new_empty(sum(send)), send, receive, axis)

    def wait(self, pending: Noted) -> Tensor:
        self.events.append("wait")
        return pending.message.clone()


@pytest.mark.parametrize("by_slices", [True, False])
def test_every_product_is_sent_before_the_next_one_and_waited_for_last(by_slices: bool) -> None:
    recorder, heads, tokens = Recorder(), 4, 3
    assigned = assign_heads(0, (tokens, tokens), (tokens, tokens), heads, heads)
    ulysses = Ulysses(axis_of(0, 2), assigned, recorder)  # type: ignore[arg-type]

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op in (torch.ops.aten.mm.out, torch.ops.aten.mm.default):
                recorder.events.append("product")
            return op(*args, **(kwargs or {}))

    x, weight = torch.randn(1, tokens, 24), torch.randn(24, 24)
    tensors = NormTensors((torch.ones(12), torch.ones(12)), (None, None))
    norm = QueryKeyNorm(NormAcrossHeads(24, 1e-6, "fp32_once", "reference"), tensors)
    with Products(), torch.no_grad():
        project_heads(x, [(weight, None)] * 3, norm, ulysses, heads, by_slices=by_slices)
    of_one = ["product", "send 1", *["product"] * by_slices, "send 0"]
    statistics = ["send 1", "send 0"]
    assert recorder.events == [*of_one, *of_one, *statistics, *of_one, *["wait"] * 4]
