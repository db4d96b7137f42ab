"""Attention that no longer exchanges after the first call is an error on all ranks; what still does is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from diffusers import LayerSkipConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_layer_skip
from diffusers.models.transformers.transformer_ltx import LTXAttention, LTXVideoAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
Change = Callable[[Any], object]


def another_processor(wan: Any) -> None:
    wan.blocks[1].attn1.set_processor(WanAttnProcessor())


def another_forward(ltx: Any) -> None:
    attention = ltx.transformer_blocks[1].attn1
    attention.forward = partial(type(attention).forward, attention)


def another_module(ltx: Any) -> None:
    ltx.transformer_blocks[1].attn1 = unsplit().transformer_blocks[1].attn1


def another_block(ltx: Any) -> None:
    ltx.transformer_blocks[1] = unsplit().transformer_blocks[1]


def unsplit() -> Any:
    return FAMILIES["ltx"].model(Case("ltx", float32=True))


def hook_from_before_the_split(ltx: Any) -> None:
    """diffusers puts the forward back that was there before its hook, and so before the split."""
    ltx.disable_cache()


CHANGES: dict[Change, tuple[str, str]] = {
    another_processor: ("wan", "blocks.1.attn1 of Wan"),
    another_forward: ("ltx", "transformer_blocks.1.attn1 of LTX"),
    another_module: ("ltx", "transformer_blocks.1.attn1 of LTX"),
    another_block: ("ltx", "transformer_blocks.1 of LTX"),
    hook_from_before_the_split: ("ltx", "transformer_blocks.0.attn1, transformer_blocks.1.attn1 of LTX"),
}


def said(changes: list[Change]) -> list[list[str]]:
    """Before each change, and twice after it."""
    found = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for change in changes:
            name, _ = CHANGES[change]
            family, case = FAMILIES[name], Case(name, float32=True)
            model, inputs = family.model(case), family.inputs(case, 0)
            if change is hook_from_before_the_split:
                model.enable_cache(  # type: ignore[operator]
                    PyramidAttentionBroadcastConfig(
                        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 900
                    )
                )
            parallelize(model, mesh)
            messages = [message(model, inputs)]
            change(model)
            found.append([*messages, message(model, inputs), message(model, inputs)])
    return found


def message(model: nn.Module, inputs: Any) -> str:
    try:
        model(**inputs)
    except ValueError as error:
        return str(error)
    return ""


def test_attention_that_lost_its_exchange_after_the_first_call(ranks: Ranks) -> None:
    for of_rank in ranks(2).run(said, [*CHANGES]):
        for (first, second, third), (change, (_, expected)) in zip(of_rank, CHANGES.items(), strict=True):
            assert first == "", change
            assert second == third, change
            assert second.startswith(expected), (change, second)
            assert "another forward, processor or module" in second and "undo" in second


def wrapped(model: Any) -> Iterator[int]:
    """A user's own forward around ours; counts its calls, by what is not put back after a check."""
    attention, calls = model.transformer_blocks[1].attn1, count()
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        next(calls)
        return 2 * inner(*args, **kwargs)

    attention.forward = forward
    return calls


def wrapped_processor(model: Any) -> Iterator[int]:
    """A user's own processor around ours."""
    attention, calls = model.blocks[1].attn1, count()
    inner = attention.processor

    def process(*args: Any, **kwargs: Any) -> Any:
        next(calls)
        return 2 * inner(*args, **kwargs)

    attention.set_processor(process)
    return calls


def skipped(model: Any) -> Iterator[int]:
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks", skip_ff=False))
    return count()


def calls_and_error(name: str, change: Callable[[Any], Iterator[int]]) -> tuple[int, int, float]:
    """Of what wraps attention after the first call: its calls in two calls of the network, and the error of these."""
    family, case = FAMILIES[name], Case(name, float32=True)
    whole, model, inputs = family.model(case), family.model(case), family.inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, torch.no_grad():
        parallelize(model, mesh)
        model(**inputs)
        calls = change(model)
        change(whole)
        outputs: list[Tensor] = []
        counts = []
        for _ in range(2):
            outputs.append(model(**inputs).sample)
            counts.append(next(copy(calls)))
        expected = whole(**inputs).sample
        errors = [float((x - expected).norm() / expected.norm()) for x in outputs]
        return counts[0], counts[1], max(errors)


@pytest.mark.parametrize(("family", "change"), [("ltx", wrapped), ("wan", wrapped_processor)])
def test_what_wraps_attention_after_the_first_call_is_compared_once_and_accepted(
    ranks: Ranks, family: str, change: Callable[[Any], Iterator[int]]
) -> None:
    for first, second, error in ranks(2).run(calls_and_error, family, change):
        assert (first, second) == (4, 5)  # a look at its exchange, and the comparison, on slices and whole
        assert error < 1e-5


def test_a_hook_that_skips_attention_after_the_first_call_is_accepted(ranks: Ranks) -> None:
    for *_, error in ranks(2).run(calls_and_error, "cogview4", skipped):
        assert error < 1e-5


def after_a_patch(name: str, cls: type, method: str, **options: Any) -> str | float:
    """What is said of a class that was patched after the first call, or how far the network is from one device."""
    family, case, original = FAMILIES[name], Case(name, float32=True), getattr(cls, method)
    whole, model, inputs = family.model(case), family.model(case), family.inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        if options.pop("fused", False):
            inject_fused_kernels(model)
        parallelize(model, mesh, **options)
        model(**inputs)
        patch.setattr(cls, method, lambda *args, **kwargs: 2 * original(*args, **kwargs))
        try:
            output = model(**inputs).sample
        except ValueError as error:
            return str(error)
        expected = whole(**inputs).sample
        return float((output - expected).norm() / expected.norm())


@pytest.mark.parametrize("method", [(LTXAttention, "forward"), (LTXVideoAttnProcessor, "__call__")])
def test_a_patch_of_a_whole_class_after_the_first_call_runs(ranks: Ranks, method: tuple[type, str]) -> None:
    for error in ranks(2).run(after_a_patch, "ltx", *method):
        assert isinstance(error, float), error
        assert error < 1e-5


def test_a_patch_of_a_whole_class_that_a_split_stands_for_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(after_a_patch, "ltx", LTXAttention, "forward", schedule="overlap"):
        assert "its class has another forward than when it was split. Use schedule=" in said
    for fused in (False, True):
        for said in ranks(2).run(after_a_patch, "wan", WanAttnProcessor, "__call__", fused=fused):
            assert "blocks.0.attn1: " in said and "replaced by after_a_patch" in said
