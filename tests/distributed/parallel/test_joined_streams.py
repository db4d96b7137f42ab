"""Streams of unknown lengths in one tensor, arguments of which some members are split, and calls that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.parallel import Attention, Length, SequenceMesh, Split, SplitPlan, parallelize, verify_plan
from tests.distributed.parallel.test_streams import SelfAttention
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class Block(nn.Module):
    """Video first, then an image and text, of which the image is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(
        self, video: Tensor, given: Tensor, images: int, places: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        table, positions = places
        given = torch.cat([given[:, :images] * self.scale, given[:, images:]], 1)
        x = self.attention(torch.cat([video + table[positions], given], 1))
        return x[:, : video.shape[1]], x[:, video.shape[1] :]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Block(), nn.Linear(8, 8)

    def forward(self, video: Tensor, given: Tensor, images: int, places: tuple[Tensor, Tensor]) -> Tensor:
        video, given = self.block(video, given, images, places)
        return self.head(torch.cat([video, given], 1))


GIVEN = ("image", "text")
ALL = ("video", *GIVEN)
PLAN = SplitPlan(
    inputs={
        "block": {"images": Length("image"), "video": Split(1), "given": Split(1, GIVEN), "places": {1: Split(0)}},
    },
    outputs={},
    gathers={"head": {0: Split(1, ALL)}},
    attention={"block.attention": Attention(ALL)},
)


def inputs(video: int, image: int, text: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y, table = (torch.randn(2, n, 8, generator=generator).double() for n in (video, image + text, 4))
    return {"video": x, "given": y, "images": image, "places": (table[0], torch.arange(video) % 4)}


def errors_of(lengths: list[tuple[int, int, int]]) -> list[float]:
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        return [verify_plan(Network().double(), mesh, PLAN, kwargs=inputs(*each)).worst[1] for each in lengths]


def test_streams_in_one_tensor_are_exact(ranks: Ranks) -> None:
    """Also where there are fewer tokens than ranks, and no image, and nothing but one token of text."""
    lengths = [(9, 5, 4), (9, 1, 3), (9, 0, 5), (9, 0, 1), (9, 2, 1)]
    for of_rank in ranks(3).run(errors_of, lengths):
        assert max(of_rank) < 1e-6  # compared in float32


def no_image(_: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    return f"images={arguments['images']}, and only 0 is known here." if arguments["images"] else None


def messages(change: dict[str, Any], calls: list[dict[str, Any]]) -> list[str]:
    """What is said at calls in their order."""
    network, found = Network().double(), []
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        parallelize(network, mesh, replace(PLAN, exact=True, **change))
        for call in calls:
            try:
                network(**call)
            except (TypeError, ValueError) as error:
                found.append(str(error))
            else:
                found.append("")
    return found


def test_a_plan_may_refuse_calls(ranks: Ranks) -> None:
    calls = [inputs(6, 0, 4), inputs(6, 2, 4), inputs(6, 0, 4)]
    for first, second, third in ranks(3).run(messages, {"objection": no_image}, calls):
        assert first == third == ""
        assert "Network cannot be split in this call" in second and "images=2" in second


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"images": 2.0}, ["argument 'images' of block", "Length", "float"]),
        ({"images": 7}, ["argument 'given' of block", "6 tokens along dim 1", "7 of image + -1 of text"]),
    ],
    ids=["no integer", "too many"],
)
def test_what_does_not_fit_is_named(ranks: Ranks, change: dict[str, Any], parts: list[str]) -> None:
    for (said,) in ranks(3).run(messages, {}, [inputs(6, 2, 4) | change]):
        assert all(part in said for part in parts), said
