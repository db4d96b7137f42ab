"""What a Wan block keeps for backward: fused, a fifth less than compiled; with the norms recomputed, half."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.injection import inject_fused_kernels
from tests.models.kept import ACTIVATION, CHANNELS, FEED_FORWARD, MODES, kept_bytes, kept_storages, wan_block
from tests.models.test_wan import CASES, Case, per_token, prepared, run

COMPILED = [per_token]
"""The cases that `make test` compiles; the layers of most others are among its."""

NO_NORM_OUTPUT = 9 + FEED_FORWARD / CHANNELS
"""q, k, v and result of self-attention, q and result of cross-attention, three branches, what the GELU is given."""
SMALL = 0.35  # statistics, logsumexp, a token of text


@functools.cache
def activations(mode: str) -> float:
    """In units of (1, S, D)."""
    return kept_bytes(wan_block(**MODES[mode])) / ACTIVATION


def test_fused_blocks_keep_a_fifth_less_than_compiled_ones() -> None:
    assert activations("fused") < 0.8 * activations("compiled") < 0.8 * 0.8 * activations("eager")
    assert activations("fused, compiled") < 0.8 * activations("compiled")  # the GELU's output is not kept


def test_recomputed_norm_outputs_are_not_kept() -> None:
    assert activations("fused, norms recomputed") < NO_NORM_OUTPUT + 2 + SMALL  # two states of the residual stream
    assert activations("fused, compiled, norms recomputed") < NO_NORM_OUTPUT + SMALL
    for mode in ("fused, norms recomputed", "fused, compiled, norms recomputed"):
        assert activations(mode) < 0.6 * activations("compiled")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_branches_of_frozen_gates_are_not_kept(compiled: bool) -> None:
    trained, frozen = (kept_bytes(wan_block(compiled=compiled, frozen=f)) / ACTIVATION for f in (False, True))
    assert 2 <= trained - frozen < 2.1


@pytest.mark.parametrize("recompute_norms", [False, True])
def test_activation_checkpointing_keeps_nothing_of_a_block(recompute_norms: bool) -> None:
    forward, arguments = wan_block(recompute_norms=recompute_norms)
    checkpointed = functools.partial(checkpoint, forward, use_reentrant=False)
    assert kept_bytes((checkpointed, arguments)) < 0.5 * ACTIVATION  # the state of the random numbers


def test_what_is_kept_can_be_listed() -> None:
    listed = sum(kept.nbytes for kept in kept_storages(wan_block())) / ACTIVATION
    assert listed == pytest.approx(activations("fused"), rel=0.01)


@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        *((case, False) for case in CASES),
        *(pytest.param(case, True, marks=[] if case in COMPILED else pytest.mark.full) for case in CASES),
    ],
)
def test_recomputed_norms_give_the_same_gradients_to_the_bit(case: Case, compiled: bool) -> None:
    results = []
    for recompute_norms in (False, True):
        with prepared(case, torch.bfloat16) as (model, inputs):
            inject_fused_kernels(model, recompute_norms=recompute_norms)
            if compiled:
                torch._dynamo.reset()
                model.compile_repeated_blocks(fullgraph=True, backend="aot_eager_decomp_partition")
            results.append(run(model, inputs))
    (output, gradients), (output_again, gradients_again) = results
    assert torch.equal(output, output_again)
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


@pytest.mark.full
def test_a_whole_compiled_model_with_activation_checkpointing_and_recomputed_norms() -> None:
    with prepared(CASES[0], torch.float32) as (model, inputs):
        model.enable_gradient_checkpointing()
        inject_fused_kernels(model, recompute_norms=True)
        output, _ = run(model, inputs)
        torch._dynamo.reset()
        compiled_output, _ = run(torch.compile(model, backend="aot_eager_decomp_partition"), inputs)
    torch.testing.assert_close(compiled_output, output, rtol=1e-4, atol=1e-4)
