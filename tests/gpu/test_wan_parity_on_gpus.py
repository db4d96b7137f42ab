"""One GPU and several, over NCCL, compute the same loss and gradients: equal in float32, no less exact in bfloat16.

Every run sees four clips a step and changes no weight, so that its steps are samples of the gradient at one point.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.fsdp2 import SequenceParallelFSDP2Strategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, Record, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]
Precision = Literal["64-true", "32-true", "bf16-mixed"]
Mesh = tuple[int, int, int]
"""(dp, ring, ulysses)"""

CLIPS, STEPS = 4, 4

# Width 256 and 280; 256 and 135 tokens. The fused kernels want head dims that are multiples of 8.
CASES: dict[str, dict[str, Any]] = {
    "even": {"shape": (4, 16, 16), "module": {"num_attention_heads": 4, "attention_head_dim": 64}},
    "odd": {
        "shape": (3, 10, 18),
        "module": {"num_attention_heads": 5, "attention_head_dim": 56, "per_token_timesteps": True},
    },
}
MESHES: list[Mesh] = [
    *[(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    *[(4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 2, 2), (1, 4, 1)],
]
WAYS = [("ddp", "collective"), ("ddp", "symmetric"), ("fsdp2", "collective")]


class StandingStill(RectifiedFlow):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Result(NamedTuple):
    """Losses, and of every step the gradients by name, on the host."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def fit(precision: Precision, mesh: Mesh, way: str, transport: str, case: str) -> bytes:
    """The result of a training; in float64 without the model's float32 casts.

    Bytes, as every tensor that is sent as such takes a file descriptor.
    """
    dp, ring, ulysses = mesh
    settings = CASES[case]
    strategies: dict[str, Callable[..., Strategy]] = {
        "ddp": SequenceParallelDDPStrategy,
        "fsdp2": SequenceParallelFSDP2Strategy,
    }
    arguments = {"transport": transport} if transport != "collective" else {}
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    record = Record()
    with lifted_float_casts() if precision == "64-true" else nullcontext():
        trainer = pl.Trainer(
            strategy=strategies[way](ulysses_size=ulysses, ring_size=ring, **arguments),
            accelerator="auto",
            devices=dist.get_world_size(),
            precision=precision,
            max_steps=STEPS,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = StandingStill(num_layers=3, ffn_dim=512, **settings["module"])
        clips = Clips(settings["shape"], torch.float32, length=CLIPS * STEPS)  # the same numbers in all precisions
        trainer.fit(model, DataLoader(clips, batch_size=CLIPS // dp))
    end_groups()
    file = io.BytesIO()
    torch.save((record.losses, [{name: g.cpu() for name, g in step.items()} for step in record.gradients]), file)
    return file.getvalue()


def end_groups() -> None:
    """Ends all process groups but the pool's own: hundreds of communicators would fill memory and file descriptors."""
    gc.collect()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def unpack(result: bytes) -> Result:
    return Result(*torch.load(io.BytesIO(result)))


def error(result: Result, exact: Result) -> float:
    """Root mean square over the steps of the relative error of all gradients, taken as one vector.

    One vector and several steps, as the rounding errors of a single small tensor differ by chance by far more than the
    few hundredths that are asked about.
    """
    squares = []
    for got, expected in zip(result.gradients, exact.gradients, strict=True):
        difference = sum(float((got[name] - g).square().sum()) for name, g in expected.items())
        squares.append(difference / sum(float(g.square().sum()) for g in expected.values()))
    return (sum(squares) / len(squares)) ** 0.5


@pytest.fixture(scope="module")
def one_gpu(gpu_ranks: Ranks) -> Callable[[Precision, str], Result]:
    """`one_gpu(precision, case)`, computed once."""

    @cache
    def reference(precision: Precision, case: str) -> Result:
        return unpack(gpu_ranks(1).run(fit, precision, (1, 1, 1), "ddp", "collective", case)[0])

    return reference


def run_on_all(gpu_ranks: Ranks, precision: Precision, mesh: Mesh, *case: str) -> Result:
    """The result of all ranks: they must have the same gradients, and losses whose mean is that of one device."""
    dp, ring, ulysses = mesh
    results = [unpack(result) for result in gpu_ranks(dp * ring * ulysses).run(fit, precision, mesh, *case)]
    for result in results[1:]:
        for step, first in zip(result.gradients, results[0].gradients, strict=True):
            assert all(torch.equal(step[name], g) for name, g in first.items())
    losses = torch.tensor([result.losses for result in results], dtype=torch.float64).mean(0)
    return Result(losses.tolist(), results[0].gradients)


def skip_what_is_not(mesh: Mesh, transport: str) -> None:
    if transport == "symmetric" and mesh[2] == 1:
        pytest.skip("the symmetric transport is for Ulysses groups")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("way", "transport"), WAYS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_float32_equals_one_gpu(
    gpu_ranks: Ranks, one_gpu: Callable[[Precision, str], Result], mesh: Mesh, way: str, transport: str, case: str
) -> None:
    skip_what_is_not(mesh, transport)
    got, expected = run_on_all(gpu_ranks, "32-true", mesh, way, transport, case), one_gpu("32-true", case)
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert len(got.gradients) == STEPS
    for step, reference in zip(got.gradients, expected.gradients, strict=True):
        assert gradient_error(step, reference) <= 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("way", "transport"), WAYS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bf16_is_as_near_to_float64_as_on_one_gpu(
    gpu_ranks: Ranks,
    one_gpu: Callable[[Precision, str], Result],
    record_property: Callable[[str, object], None],
    mesh: Mesh,
    way: str,
    transport: str,
    case: str,
) -> None:
    skip_what_is_not(mesh, transport)
    exact = one_gpu("64-true", case)
    alone = error(one_gpu("bf16-mixed", case), exact)
    ratio = error(run_on_all(gpu_ranks, "bf16-mixed", mesh, way, transport, case), exact) / alone
    record_property("error over that of one GPU", ratio)
    assert 1e-4 < alone < 1e-1
    assert ratio <= 1.05
