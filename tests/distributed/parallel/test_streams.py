"""Streams of tokens: each is split on its own, and what does not fit is said with the module and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.parallel import (
    Attention,
    Count,
    SequenceMesh,
    Split,
    SplitPlan,
    Whole,
    parallelize,
    verify_plan,
)
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Smooth(nn.Module):
    """A convolution over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(x.mT).mT


class Shift(nn.Module):
    """Adds a vector to the leading tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, leading: int) -> Tensor:
        return torch.cat([x[:, :leading] + self.shift, x[:, leading:]], 1)


class Network(nn.Module):
    """Video and text, each attending to itself only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.video, self.text, self.smooth, self.shift = SelfAttention(), SelfAttention(), Smooth(), Shift()
        self.head, self.text_head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, video: Tensor, text: Tensor, positions: Tensor, leading: int) -> tuple[Tensor, Tensor]:
        video = self.shift(self.smooth(self.video(video + positions)), leading)
        return self.head(video), self.text_head(self.text(text))


TEXT = ("text",)
PLAN = SplitPlan(
    inputs={"": {"video": Split(1), "positions": Split(1), "text": Split(1, TEXT)}, "shift": {"leading": Count()}},
    outputs={},
    gathers={"head": {0: Split(1)}, "text_head": {0: Split(1, TEXT)}},
    attention={"video": Attention(), "text": Attention(TEXT)},
    whole={"smooth": Whole({"x": Split(1)}, {0: Split(1)})},
)


def inputs(video: int = 9, text: int = 5, positions: int | None = None) -> tuple[Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    lengths = video, text, video if positions is None else positions
    drawn = [torch.randn(2, length, 8, generator=generator).double() for length in lengths]
    return drawn[0], drawn[1], drawn[2], video // 2 + 1


def errors_of(*lengths: int) -> float:
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    return verify_plan(Network().double(), mesh, PLAN, inputs(*lengths)).worst[1]


@pytest.mark.parametrize(
    "lengths",
    [
        (9, 5),
        (9, 9),
        (9, 5, 1),  # positions that broadcast
        (8, 4),  # the whole text is as long as this rank's share of the video
    ],
    ids=str,
)
def test_streams_of_any_lengths_are_exact(ranks: Ranks, lengths: tuple[int, ...]) -> None:
    assert max(ranks(2).run(errors_of, *lengths)) < 1e-6  # compared in float32


def message(plan: SplitPlan, *lengths: int) -> str:
    mesh = SequenceMesh.create("cpu", ulysses_size=2)
    network = Network().double()
    try:
        undo = parallelize(network, mesh, plan)
    except ValueError as error:
        return str(error)
    try:
        network(*inputs(*lengths))
    except (ValueError, TypeError) as error:
        return str(error)
    finally:
        undo()
    return ""


@pytest.mark.parametrize(
    ("change", "lengths", "expected"),
    [
        ({}, (9, 5, 4), ["argument 'positions' of the network", "4 tokens along dim 1", "9 of video"]),
        ({}, (9, 1), ["sequence of 1 tokens", "2 ranks"]),
        ({"attention": {"video": Attention()}}, (), ["['text']", "no module in attention="]),
        ({"attention": {"vide": Attention(), "text": Attention(TEXT)}}, (), ["'vide'", "Network"]),
        ({"whole": {}}, (), ["smooth.convolution (Conv1d) calls conv1d"]),
        ({"whole": {"smooth": Whole({"x": Split(1)}, {0: Split(1, ("other",))})}}, (), ["['other']", "attention="]),
        ({"gathers": {"head": {1: Split(1)}}}, (), ["output 1 of 'head', which returns 1"]),
        ({"inputs": {"": {"leading": Split(1)}}}, (), ["argument 'leading'", "int"]),
        ({"inputs": PLAN.inputs | {"shift": {"x": Count()}}}, (), ["argument 'x' of shift", "integer", "Tensor"]),
        ({"attention": {"video": Attention(), "text": Attention()}}, (), ["text"]),
    ],
    ids=[
        "length",
        "short",
        "forgotten",
        "no module",
        "convolution",
        "new",
        "no output",
        "no tensor",
        "no integer",
        "stream",
    ],
)
def test_what_does_not_fit_is_named(
    ranks: Ranks, change: dict[str, object], lengths: tuple[int, ...], expected: list[str]
) -> None:
    for said in ranks(2).run(message, replace(PLAN, **change), *lengths):
        assert all(part in said for part in expected), said


class Clip(NamedTuple):
    """What some code hands from module to module."""

    video: Tensor
    fps: int


class Heads(NamedTuple):
    sample: Tensor
    fps: int


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, clip: Clip) -> Heads:
        return Heads(self.linear(clip.video), clip.fps)


class OfNamedTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.video, self.heads = SelfAttention(), TwoHeads()

    def forward(self, clip: Clip) -> Heads:
        returned: Heads = self.heads(clip._replace(video=self.video(clip.video)))
        return returned


NAMED_PLAN = SplitPlan({"": {"clip": {0: Split(1)}}}, {}, {"heads": {0: Split(1)}}, {"video": Attention()})


def split_and_whole(network: nn.Module, plan: SplitPlan, *args: Any) -> tuple[Any, Any]:
    mesh, network = SequenceMesh.create("cpu", ulysses_size=2), network.double()
    with torch.no_grad():
        whole = network(*args)
        undo = parallelize(network, mesh, plan)
        split = network(*args)
    undo()
    return split, whole


def of_named_tuples() -> float:
    split, whole = split_and_whole(OfNamedTuples(), NAMED_PLAN, Clip(inputs()[0], 16))
    assert type(split) is Heads and split.fps == 16
    return float((split.sample - whole.sample).abs().max())


def test_tuples_with_names_stay_what_they_are(ranks: Ranks) -> None:
    assert max(ranks(2).run(of_named_tuples)) < 1e-12


class Scaled(nn.Module):
    """Takes any number of tensors by position, and positions by name alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.video, self.head = SelfAttention(), nn.Linear(8, 8)

    def forward(self, video: Tensor, *scales: Tensor, positions: Tensor | None = None) -> Tensor:
        for scale in scales:
            video = video * scale.sum(1, keepdim=True)
        returned: Tensor = self.head(self.video(video if positions is None else video + positions))
        return returned


def of_any_number() -> float:
    video, _, first, _ = inputs()
    plan = SplitPlan(
        {"": {"video": Split(1), "positions": Split(1)}}, {}, {"head": {0: Split(1)}}, {"video": Attention()}
    )
    split, whole = split_and_whole(Scaled(), plan, video, first, first.cos())
    return float((split - whole).abs().max() / whole.abs().max())


def test_what_is_given_by_name_alone_is_at_no_position(ranks: Ranks) -> None:
    assert max(ranks(2).run(of_any_number)) < 1e-12
