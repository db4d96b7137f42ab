"""Masks of keys: samples of which no key counts, and streams of which the plan says that no mask hides a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.parallel import Attention, SequenceMesh, Split, SplitPlan, parallelize
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class Joint(nn.Module):
    """Text and video attend together, under a mask of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, text: Tensor, video: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(torch.cat([text, video], 1)).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return text + out[:, : text.shape[1]], video + out[:, text.shape[1] :]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Joint(), Joint()])

    def forward(self, text: Tensor, video: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            text, video = block(text, video, mask)
        return video


JOINT = ("text", "video")
RULE = Attention(JOINT)
PLAN = SplitPlan(
    inputs={
        "blocks.0": {"text": Split(1, ("text",)), "video": Split(1)},
        "blocks.*": {"mask": Split(3, JOINT)},
    },
    outputs={},
    gathers={"": {0: Split(1)}},
    attention={"blocks.*": RULE},
)
TOKENS = (4, 9)


def pass_of(network: nn.Module, mask: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    text, video = (torch.randn(2, n, 8, generator=generator).double() for n in TOKENS)
    out = network(text, video, mask)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]


def error_of(mask: Tensor, unmasked: str | None, ring: int) -> float | str:
    """How far a split network is from a whole one; or what is said of the mask, and then no call is made."""
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size() // ring, ring_size=ring) as mesh:
        whole, split = Network().double(), Network().double()
        rule = replace(RULE, unmasked=unmasked)
        parallelize(split, mesh, replace(PLAN, exact=True, attention={"blocks.*": rule}), verify_plan=True)
        try:
            mine = pass_of(split, mask)
        except ValueError as error:
            return str(error)
    for gradient in mine[1:]:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()  # as strategies do
    return max(float((a - b).abs().max()) for a, b in zip(mine, pass_of(whole, mask), strict=True))


def hiding(*places: tuple[int, slice]) -> Tensor:
    mask = torch.ones(2, 1, 1, sum(TOKENS), dtype=torch.bool)
    for sample, tokens in places:
        mask[sample, ..., tokens] = False
    return mask


TEXT, ALL = slice(2, 4), slice(None)


def test_a_sample_of_which_no_key_counts_has_zeros_as_from_torch(ranks: Ranks) -> None:
    for ring in (1, 2):
        for error in ranks(2).run(error_of, hiding((0, TEXT), (1, ALL)), None, ring):
            assert error < 1e-12


def test_hidden_text_is_exact_where_no_mask_hides_video(ranks: Ranks) -> None:
    for ring in (1, 2):
        for error in ranks(2).run(error_of, hiding((0, TEXT)), "video", ring):
            assert error < 1e-12


def test_a_mask_that_hides_what_the_plan_says_none_does_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(error_of, hiding((0, slice(8, 9))), "video", 1):
        assert "blocks.0" in said and "hides tokens of video" in said and "unmasked='video'" in said
