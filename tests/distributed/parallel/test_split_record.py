"""Every layer uses the split of its own forward pass: when it first runs, and when backward recomputes it.

Sequences of 8, 9 and 10 tokens over two ranks are slices of (4, 4), (5, 4) and (5, 5): the first two are equally long
on the second rank and the last two on the first, so that a layer with another pass's record exchanges other sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.parallel import (
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    gather_sequence,
    parallelize,
    sequence_parallel_attention,
)
from lightning_videoscale.parallel.context import SplitRecord
from lightning_videoscale.strategies.blocks import checkpoint_activations
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]


def test_a_record_is_never_changed() -> None:
    empty = SplitRecord(rank=1)
    record = empty.with_stream("video", 9, (5, 4)).with_stream("video", 9, (5, 4)).with_stream("text", 1, (1, 1))
    assert (empty.tables, record.tables) == ({}, {"video": [5, 4], "text": [1, 1]})
    assert (record.lengths(["video"]), record.lengths(["text", "video"])) == ((5, 4), (6, 5))
    assert record.local_lengths == {1, 4, 5}
    assert (record.tokens("video"), record.tokens("text")) == (9, 1)
    assert record.missing(["video"]) is None
    assert record.missing(["text", "video"]) == (True, False, False, False, False)
    with pytest.raises(FrozenInstanceError):
        record.tables = {}  # type: ignore[misc]
    with pytest.raises(ValueError, match="video has 9 tokens in this forward pass, not 8"):
        record.with_stream("video", 8, (4, 4))
    with pytest.raises(ValueError, match=r"split as \['audio'\], only as \['video', 'text'\]"):
        record.lengths(["video", "audio"])


# -- models, by who recomputes what -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(8, 24), nn.Dropout(0.0)
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.tanh(x)).unflatten(-1, (3, 4, 2)).unbind(2)
        if self.context is None:
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        else:
            lengths = self.context.lengths()
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return x + self.dropout(out.flatten(2))


Run = Callable[[nn.Module, Tensor], Any]


class Network(nn.Module):
    """Three blocks; the second may fail."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)
        self.run, self.hidden = run, torch.empty(0)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.run(block, x)
            if number == 1:
                self.hidden = x
                if fails:
                    raise InterruptedError
        return self.head(x)


def exchange(model: nn.Module, context: SequenceContext) -> Callable[[], None]:
    def give(value: SequenceContext | None) -> None:
        for block in model.get_submodule("blocks").children():
            block.context = value  # type: ignore[assignment]

    give(context)
    return lambda: give(None)


BY_BLOCK = SplitPlan({"blocks.0": {"x": Split(1)}}, {}, {"head": {0: Split(1)}}, exchange)
"""Splits inside of what is checkpointed, as Wan's plan does."""


def all_in_one_graph() -> Network:
    """The checkpoint is inside of what is compiled."""
    network = Network(lambda block, x: block(x))
    recomputed = torch.compile(
        lambda x: checkpoint(network.blocks[2].forward, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    network.run = lambda block, x: recomputed(x) if block is network.blocks[2] else block(x)
    return network


def compiled_blocks() -> Network:
    """The checkpoint is around what is compiled."""
    network = Network(partial(checkpoint, use_reentrant=False))
    for block in network.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    return network


def twice(block: nn.Module, x: Tensor) -> Any:
    """A checkpoint in a checkpoint."""
    return checkpoint(partial(checkpoint, use_reentrant=False), block, x, use_reentrant=False)


NETWORKS: dict[str, Callable[[], Network]] = {
    "kept": lambda: Network(lambda block, x: block(x)),
    "recomputed": lambda: Network(partial(checkpoint, use_reentrant=False)),
    "recomputed, reentrant": lambda: Network(partial(checkpoint, use_reentrant=True)),
    "recomputed, nested": lambda: Network(twice),
    "compiled and recomputed": compiled_blocks,
    "recomputed and compiled": all_in_one_graph,
}


# -- the order of forward and backward passes --------------------------------------------------------------------------


def loss_of(network: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = network(x)
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()


def one_backward(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    sum(loss_of(network, x) for x in (short, middle, long)).backward()  # type: ignore[union-attr]


def first_pass_first(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    for loss in [loss_of(network, x) for x in (short, middle, long)]:
        loss.backward()


def last_pass_first(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    for loss in reversed([loss_of(network, x) for x in (short, middle, long)]):
        loss.backward()


def teacher_between(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    loss = loss_of(network, middle)
    with torch.no_grad():
        target = loss_of(network, long) + loss_of(network, short)
    (loss * target).backward()


def failure_between(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    first = loss_of(network, middle)
    with pytest.raises(InterruptedError):
        network(long, fails=True)
    second = loss_of(network, short)
    with pytest.raises(InterruptedError):
        network(long, fails=True)
    (first + second).backward()


def one_feeds_the_other(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    nine = torch.cat([network(short), middle[:, :1]], 1)
    loss_of(network, torch.cat([network(nine), long[:, :1]], 1)).backward()


def hidden_states(network: nn.Module, short: Tensor, middle: Tensor, long: Tensor) -> None:
    """Of the first pass only what was computed inside is used."""
    network(middle)
    loss = gather_sequence(network.hidden, 1, network).square().sum()  # type: ignore[arg-type]
    (loss + loss_of(network, long) + loss_of(network, short)).backward()


ORDERS: list[Callable[..., None]] = [
    one_backward,
    first_pass_first,
    last_pass_first,
    teacher_between,
    failure_between,
    one_feeds_the_other,
    hidden_states,
]


def averaged(network: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    sum_over_ranks(found.values(), mean=True)
    return found


def errors(kind: str, orders: list[Callable[..., None]]) -> dict[str, float]:
    """Of the gradients, relative to those of a whole network that recomputes nothing."""
    inputs = [torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)).double() for n in (8, 9, 10)]
    inputs = [x.requires_grad_() for x in inputs]  # a reentrant checkpoint needs one
    found = {}
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    for order in orders:
        whole, network = NETWORKS["kept"]().double(), NETWORKS[kind]().double()
        parallelize(network, mesh, BY_BLOCK, verify_plan=False)
        order(whole, *inputs)
        order(network, *inputs)
        found[order.__name__] = gradient_error(averaged(network), averaged(whole))
    return found


@pytest.mark.parametrize(
    ("kind", "orders"),
    [
        *((kind, ORDERS) for kind in NETWORKS if "compiled" not in kind),
        # Each order compiles anew: two of them, and all in `make test-full`.
        ("compiled and recomputed", ORDERS[1:6:4]),
        pytest.param("compiled and recomputed", ORDERS, marks=pytest.mark.full),
        pytest.param("recomputed and compiled", ORDERS, marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_use_the_split_of_their_own_pass(ranks: Ranks, kind: str, orders: list[Callable[..., None]]) -> None:
    for found in ranks(2).run(errors, kind, orders):
        assert len(found) == len(orders)
        assert max(found.values()) <= 1e-12, found


def wan_error(checkpointing: str) -> float:
    """Two passes of 9 and 10 tokens before one backward, recomputed by diffusers or by the strategies' checkpoints."""
    with lifted_float_casts():
        whole, network = tiny_wan().double(), tiny_wan().double()
        parallelize(network, SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()))
        if checkpointing == "diffusers":
            network.enable_gradient_checkpointing()
        else:
            checkpoint_activations(network)
        generator = torch.Generator().manual_seed(0)
        clips = [torch.randn(1, 4, *shape, generator=generator).double() for shape in ((3, 2, 6), (5, 2, 4))]
        text = torch.randn(1, 5, 16, generator=generator).double()
        for model in (whole, network):
            torch.stack([model(x, torch.ones(1), text).sample.square().sum() for x in clips]).sum().backward()
    return gradient_error(averaged(network), averaged(whole))


@pytest.mark.parametrize("checkpointing", ["diffusers", "strategy"])
def test_wan_uses_the_split_of_its_own_pass(ranks: Ranks, checkpointing: str) -> None:
    assert max(ranks(2).run(wan_error, checkpointing)) <= 1e-10


# -- random numbers ----------------------------------------------------------------------------------------------------


def dropped(run: Run, p: float = 0.5) -> tuple[dict[str, Tensor], list[float], list[Tensor]]:
    """Gradients of three passes with dropout, what the generator draws after each, and the masks of each first run."""
    network, drawn, masks = Network(run), [], []
    for block in network.blocks:
        block.dropout.p = p  # type: ignore[union-attr]
        block.dropout.register_forward_hook(lambda _, __, out: masks.append(out.detach() == 0))  # type: ignore[union-attr]
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    parallelize(network, mesh, BY_BLOCK, verify_plan=False)
    torch.manual_seed(7)
    firsts = []
    for _ in range(3):
        x = torch.randn(2, 9, 8, requires_grad=True)
        masks.clear()
        loss = loss_of(network, x)
        firsts += masks
        loss.backward()
        drawn.append(torch.rand(()).item())
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}, drawn, firsts


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_entrance_draws_what_it_drew(ranks: Ranks, reentrant: bool) -> None:
    kept = ranks(2).run(dropped, nn.Module.__call__)
    again = ranks(2).run(dropped, partial(checkpoint, use_reentrant=reentrant))
    for (gradients, drawn, masks), (expected, expected_drawn, expected_masks) in zip(again, kept, strict=True):
        assert drawn == expected_drawn == kept[0][1]
        assert all(map(torch.equal, masks, expected_masks))
        assert all(torch.equal(gradients[name], x) for name, x in expected.items())


def test_a_checkpoint_that_keeps_no_generators_leaves_them_alone(ranks: Ranks) -> None:
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    (_, first, _), (_, second, _) = ranks(2).run(dropped, run, 0.0)
    assert first == second == ranks(2).run(dropped, nn.Module.__call__, 0.0)[0][1]


# -- the end of the region ---------------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    """Two heads, and random numbers before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn = [torch.rand(()).item()]
        first = self.first(x)
        self.drawn.append(torch.rand(()).item())
        second = self.second(x)
        self.drawn.append(torch.rand(()).item())
        return torch.cat([first, second])


def draws(order: tuple[str, ...]) -> list[float]:
    network = TwoOutputs()
    gathers = {path: {0: Split(1)} for path in order}
    plan = SplitPlan({"": {"x": Split(1)}}, {}, gathers, lambda model, context: lambda: None)
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    parallelize(network, mesh, plan, verify_plan=False)
    torch.manual_seed(1)
    network(torch.ones(2, 9, 8))
    return network.drawn


def test_the_region_ends_with_its_last_gather_in_whatever_order_a_plan_lists_them(ranks: Ranks) -> None:
    for order in (("first", "second"), ("second", "first")):
        first, second = ranks(2).run(draws, order)
        assert [x == y for x, y in zip(first, second, strict=True)] == [False, False, True]
