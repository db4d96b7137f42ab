"""Plans of diffusers' models: a user's own are verified, those of families that are tested here are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import LTXVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn

from lightning_videoscale.parallel import (
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    parallelize,
    sequence_parallel_attention,
)
from tests.distributed.pool import ProcessPool
from tests.distributed.verification.networks import first_call
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]

CHANNELS = 48  # of a tiny Wan


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
            lengths = self.context.lengths()
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


def ltx_attention(exchanged: bool) -> Callable[[Any, SequenceContext], Callable[[], None]]:
    def install(model: Any, context: SequenceContext) -> Callable[[], None]:
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
    text = Split(1, ("text",))
    split_text = {"encoder_hidden_states": text, "encoder_attention_mask": text} if text_is_split else {}
    plan = SplitPlan(
        inputs={"": {"hidden_states": Split(1)} | split_text},
        outputs={"rope": {0: Split(1), 1: Split(1)}},
        gathers={"proj_out": {0: Split(1)}},
        attention=ltx_attention(exchanged),
    )
    return first_call(
        model,
        plan,
        torch.randn(1, 12, 4),
        torch.randn(1, 6, 8),
        torch.tensor([500]),
        torch.ones(1, 6, dtype=torch.int64),
        num_frames=3,
        height=2,
        width=2,
    )


class MyWan(WanTransformer3DModel):
    """What Wan's tests say nothing of."""


def wans() -> list[str]:
    torch.manual_seed(0)  # earlier tests may have left ranks with different ones
    inputs = torch.randn(1, 4, 1, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16)
    mine = tiny_wan()
    mine.__class__ = MyWan
    return [first_call(model, None, *inputs) for model in (tiny_wan(), mine)]


def test_a_tested_family_costs_nothing(ranks: Ranks) -> None:
    tested, mine = ranks(2).run(wans)[0]
    assert tested == "passed"
    assert "MyWan verified" in mine


def test_plans_of_ltx(ranks: Ranks) -> None:
    """diffusers' own plan also splits the text, which then must be exchanged, too."""
    pool = ranks(2)
    for message in pool.run(ltx, exchanged=True, text_is_split=True):
        assert "transformer_blocks.0.attn2 (LTXAttention) calls scaled_dot_product_attention" in message
        assert "attn1" not in message
    for message in pool.run(ltx, exchanged=False, text_is_split=False):
        assert "transformer_blocks.0.attn1 (LTXAttention) calls scaled_dot_product_attention" in message
        assert "attn2" not in message
    assert "LTXVideoTransformer3DModel verified" in pool.run(ltx, exchanged=True, text_is_split=False)[0]


class BesideFeedForward(nn.Module):
    """An adapter that a user puts around a feed-forward; its convolution looks at neighbouring tokens, or at none."""

    def __init__(self, inner: nn.Module, dim: int, kernel: int) -> None:
        super().__init__()
        self.inner, self.conv = inner, nn.Conv1d(dim, dim, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.conv(x.transpose(1, 2)).transpose(1, 2)


class OverFeatures(nn.Module):
    """An adapter with a convolution over features, of which there are as many as a rank has tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.conv = inner, nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.conv(x.reshape(-1, 1, x.shape[2])).view_as(x)


def said_of_adapter(adapter: Callable[[nn.Module], nn.Module], verify_plan: bool, gradients: bool) -> list[str]:
    """The error, and what was logged; of tokens each rank has as many as the model has channels."""
    torch.manual_seed(0)
    model, lines = tiny_wan(), []
    model.blocks[0].ffn = adapter(model.blocks[0].ffn)
    inputs = torch.randn(1, 4, CHANNELS // 2, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, torch.set_grad_enabled(gradients):
        parallelize(model, mesh, verify_plan=verify_plan, log=lines.append)
        try:
            model(*inputs)
        except ValueError as error:
            return [str(error), *lines]
    return ["", *lines]


def over_tokens(inner: nn.Module) -> nn.Module:
    return BesideFeedForward(inner, CHANNELS, kernel=3)


def of_each_token(inner: nn.Module) -> nn.Module:
    return BesideFeedForward(inner, CHANNELS, kernel=1)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_convolution_that_was_added_to_a_tested_family(ranks: Ranks, gradients: bool) -> None:
    for message, *_ in ranks(2).run(said_of_adapter, over_tokens, verify_plan=True, gradients=gradients):
        assert "WanTransformer3DModel mixes tokens" in message
        assert "blocks.0.ffn.conv (Conv1d) calls conv1d" in message
    for of_rank in ranks(2).run(said_of_adapter, over_tokens, verify_plan=False, gradients=gradients):
        assert of_rank == [""]


def test_what_only_seems_to_mix_tokens_is_compared(ranks: Ranks) -> None:
    (message, *lines), _ = ranks(2).run(said_of_adapter, OverFeatures, verify_plan=True, gradients=True)
    assert message == ""
    assert "seems to mix tokens" in lines[0] and "differ by at most" in lines[0]
    assert ranks(2).run(said_of_adapter, of_each_token, verify_plan=True, gradients=True) == [[""], [""]]
