"""Attention that a user changed is an error on all ranks at the first call, and nothing waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from tests.distributed.families.harness import Case
from tests.distributed.families.models.hunyuan_video import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

sdpa: Any = F.scaled_dot_product_attention


class Processor:
    """For the double blocks of HunyuanVideo, with attention of a user's own: (B, H, S, D), and a mask of the keys."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        video = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        text = [project(encoder_hidden_states) for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)]
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in video)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (attn.norm_q(q), attn.norm_k(k)))
        tq, tk, tv = (x.unflatten(2, (attn.heads, -1)) for x in text)
        pairs = (q, attn.norm_added_q(tq)), (k, attn.norm_added_k(tk)), (v, tv)
        out = self.attend(*(torch.cat(pair, 1).transpose(1, 2) for pair in pairs), attention_mask)
        out_video, out_text = out.transpose(1, 2).flatten(2).split([x.shape[1] for x in (hidden_states, tq)], 1)
        return attn.to_out[0](out_video), attn.to_add_out(out_text)


def by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def by_aten(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention(query, key, value, mask)  # type: ignore[no-any-return]


def masked_by_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    rows = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril_()
    return sdpa(query, key, value, mask & rows)  # type: ignore[no-any-return]


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return sdpa(query, key, value, is_causal=True)  # type: ignore[no-any-return]


def with_dropout(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return sdpa(query, key, value, mask, dropout_p=0.1)  # type: ignore[no-any-return]


def biased(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return sdpa(query, key, value, torch.where(mask, 0.5, -torch.inf))  # type: ignore[no-any-return]


def twice(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return sdpa(query, key, sdpa(query, key, value, mask), mask)  # type: ignore[no-any-return]


def without_padding(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As Mochi's processor, sample by sample; of the padding, which comes last, the last rank has most."""
    outputs = []
    for sample, counts in enumerate(mask.expand(query.shape[0], -1, -1, -1)[:, 0, 0]):
        out = sdpa(*(x[sample : sample + 1, :, counts] for x in (query, key, value)))
        outputs.append(F.pad(out, (0, 0, 0, query.shape[2] - out.shape[2])))
    return torch.cat(outputs)


def without_masked_keys(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Decides by what differs between ranks."""
    return sdpa(query, key, value, mask) if mask.all() else by_hand(query, key, value, mask)  # type: ignore[no-any-return]


def failing_on_a_rank(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise RuntimeError("no kernel for this shape")
    return sdpa(query, key, value, mask)  # type: ignore[no-any-return]


def by_hand_on_a_rank(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return (by_hand if dist.get_rank() == 1 else sdpa)(query, key, value, mask)


HABITS: dict[Attend, str] = {
    by_hand: "called it 0 times",
    by_aten: "called it 0 times",
    masked_by_rows: "dim of queries",
    causal: "causal",
    with_dropout: "dropout_p=0.1",
    biased: "bias other than 0",
    twice: "called it 2 times",
    without_padding: "tokens of video, text",
    without_masked_keys: "called it 0 times",
    failing_on_a_rank: "no kernel for this shape",
    by_hand_on_a_rank: "called it 0 times",
}


def first_call(model: nn.Module, inputs: Any) -> str:
    try:
        model(**inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def said(habits: list[Attend], subclass: bool, name: str = "hunyuan_video") -> list[tuple[str, float]]:
    """Of each, the error, and how far a call is from one on a rank after the processor was put back."""
    family, case, found = FAMILIES[name], Case(name, float32=True), []
    inputs = family.inputs(case, 0)
    expected = family.model(case)(**inputs).sample.detach()
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        for habit in habits:
            model: Any = family.model(case)
            if subclass:  # which is verified on its first call
                model.__class__ = type("Mine", (type(model),), {})
            parallelize(model, mesh)
            attention = model.transformer_blocks[0].attn
            before = attention.processor
            attention.set_processor(Processor(habit))
            message = first_call(model, inputs)
            attention.set_processor(before)
            found.append((message, float((model(**inputs).sample.detach() - expected).norm() / expected.norm())))
    return found


@pytest.mark.parametrize("subclass", [False, True])
def test_changed_attention_is_refused_on_all_ranks(ranks: Ranks, subclass: bool) -> None:
    habits = [*HABITS][::2] if subclass else [*HABITS]  # verification takes four times as long
    for of_rank in ranks(2).run(said, habits, subclass):
        for (message, error), habit in zip(of_rank, habits, strict=True):
            assert HABITS[habit] in message and "gloo" not in message, habit
            assert error < 1e-5, habit


def masked_by_rows_and_padding(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As that of HunyuanVideo-1.5, which gets a mask (B, T) of its text, but for the rows."""
    keys = F.pad(mask.bool(), (key.shape[2] - mask.shape[1], 0), value=True)
    return masked_by_rows(query, key, value, keys[:, None, :, None] & keys[:, None, None])


def test_rows_that_are_no_padding_are_refused(ranks: Ranks) -> None:
    for ((message, error),) in ranks(2).run(said, [masked_by_rows_and_padding], False, "hunyuan_video_15"):
        assert "differs between queries that are no padding" in message
        assert error < 1e-5


def forward_of_its_own(model: Any) -> None:
    """Another library's forward, set after the split: the projections are the module's, the exchange is lost."""
    attention = model.transformer_blocks[0].attn
    attention.forward = partial(Processor(by_hand), attention)


def around_the_module(model: Any) -> None:
    """The block computes with the module's projections and never calls it."""
    block = model.transformer_blocks[0]

    def forward(hidden_states: Tensor, encoder_hidden_states: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (project(hidden_states) for project in (block.attn.to_q, block.attn.to_k, block.attn.to_v))
        return by_hand(q, k, v, torch.ones(k.shape[1], dtype=torch.bool)), encoder_hidden_states

    block.forward = forward


def around_the_module_on_a_rank(model: Any) -> None:
    if dist.get_rank() == 1:
        around_the_module(model)


def dropped_blocks(model: Any) -> None:
    """As stochastic depth does: what is not computed exchanges nothing."""
    for block in model.transformer_blocks:
        block.forward = lambda hidden_states, encoder_hidden_states, *_: (hidden_states, encoder_hidden_states)


AROUND: dict[Callable[[Any], None], str] = {
    forward_of_its_own: "transformer_blocks.0.attn ran without exchanging",
    around_the_module: "transformer_blocks.0.attn ran without exchanging",
    around_the_module_on_a_rank: "went different ways",
    dropped_blocks: "",
}


def said_of_changes(changes: list[Callable[[Any], None]], subclass: bool) -> list[str]:
    family, case, found = FAMILIES["hunyuan_video"], Case("hunyuan_video", float32=True), []
    inputs = family.inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        for change in changes:
            model: Any = family.model(case)
            if subclass:
                model.__class__ = type("Mine", (type(model),), {})
            parallelize(model, mesh)
            change(model)
            found.append(first_call(model, inputs))
    return found


@pytest.mark.parametrize("subclass", [False, True])
def test_attention_that_runs_without_its_exchange(ranks: Ranks, subclass: bool) -> None:
    for messages in ranks(2).run(said_of_changes, [*AROUND], subclass):
        for message, (change, expected) in zip(messages, AROUND.items(), strict=True):
            assert expected in message if expected else not message, (change, message)


def said_of_a_dropped_token() -> str:
    family, case = FAMILIES["hunyuan_video"], Case("hunyuan_video", float32=True)
    model: Any = family.model(case)
    model.proj_out.register_forward_hook(lambda _, __, x: x[:, dist.get_rank() :])
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        parallelize(model, mesh)
        return first_call(model, family.inputs(case, 0))


def test_a_rank_that_has_too_few_tokens_to_gather(ranks: Ranks) -> None:
    for message in ranks(2).run(said_of_a_dropped_token):
        assert "To be gathered are 12 tokens" in message and "13 of video" in message


def said_of_backends(backends: list[str], fused: bool) -> list[str]:
    family, case, found = FAMILIES["hunyuan_video"], Case("hunyuan_video", float32=True), []
    inputs = family.inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        for backend in backends:
            model: Any = family.model(case)
            if fused:
                inject_fused_kernels(model)
            parallelize(model, mesh)
            model.set_attention_backend(backend)
            found.append(first_call(model, inputs))
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_backends_of_diffusers(ranks: Ranks, fused: bool) -> None:
    for math, flex, native in ranks(2).run(said_of_backends, ["_native_math", "flex", "native"], fused):
        assert math == native == ""
        assert "transformer_blocks.0.attn" in flex and "'native'" in flex


def output(own: bool) -> Tensor:
    """Of a fused network, whose user may have put another attention in the place of diffusers'."""
    family, case = FAMILIES["hunyuan_video"], Case("hunyuan_video", float32=True)
    model: Any = family.model(case)
    home: Any = sys.modules[type(model).__module__]
    dispatch = home.dispatch_attention_fn

    def of_doubled_values(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        return dispatch(query, key, 2 * value, **kwargs)

    inject_fused_kernels(model)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh, torch.no_grad():
        parallelize(model, mesh)
        try:
            home.dispatch_attention_fn = of_doubled_values if own else dispatch
            out: Tensor = model(**family.inputs(case, 0)).sample
            return out
        finally:
            home.dispatch_attention_fn = dispatch


def test_what_a_user_puts_in_the_place_of_diffusers_attention_is_called_in_a_split_network(ranks: Ranks) -> None:
    for theirs, ours in zip(ranks(2).run(output, True), ranks(2).run(output, False), strict=True):
        assert (theirs - ours).norm() > 0.05 * ours.norm()
