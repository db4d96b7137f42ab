"""One GPU and several, over NCCL, compute the same loss and gradients: equal in float32, no less exact in bfloat16.

Every run sees four clips a step and changes no weight, so that its steps are samples of the gradient at one point. The
workers compare: a run's gradients are large, and its errors a few numbers.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.distributed.parity import STEPS_BY_GRAPHS, Case, Outcome, Record, ZeroRecord, train_alone
from tests.distributed.parity import compare as compare_with_one
from tests.distributed.pool import ProcessPool
from tests.distributed.strategies.test_wan_parity import TABLE, check_one
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts
from tests.pairwise import pairwise_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]
Precision = Literal["64-true", "32-true", "bf16-mixed", "bf16-true"]
Mesh = tuple[int, int, int]
"""(dp, ring, ulysses)"""

CLIPS = 4
STEPS = {"64-true": 4, "32-true": 4, "bf16-mixed": 4, "bf16-true": 4}

# Width 256 and 280; 256 and 135 tokens. The fused kernels want head dims that are multiples of 8.
MODELS: dict[str, dict[str, Any]] = {
    "even": {"shape": (4, 16, 16), "module": {"num_attention_heads": 4, "attention_head_dim": 64}},
    "odd": {
        "shape": (3, 10, 18),
        "module": {"num_attention_heads": 5, "attention_head_dim": 56, "per_token_timesteps": True},
    },
    "eight": {"shape": (4, 16, 16), "module": {"num_attention_heads": 8, "attention_head_dim": 32}},
}
MESHES: list[Mesh] = [
    *[(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    *[(4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 2, 2), (1, 4, 1)],
]
NODE: list[Mesh] = [(2, 1, 4), (1, 1, 8), (1, 2, 4), (1, 4, 2)]
BACKENDS = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]


class Run(NamedTuple):
    """One training."""

    model: str
    precision: Precision
    backend: str
    mesh: Mesh = (1, 1, 1)
    transport: Literal["collective", "symmetric"] = "collective"
    graphs: bool = False

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh)

    @property
    def averages_in_bfloat16(self) -> bool:
        """Whether gradients lose accuracy when they are averaged, over however many GPUs and whatever they share.

        Under bf16-true each rank's own gradient is rounded before it is averaged, in whatever precision. Under ZeRO,
        Lightning's bf16-mixed is DeepSpeed's bf16, whose gradients are bfloat16.
        """
        return self.precision == "bf16-true" or self.backend.startswith("zero")

    @property
    def unsplit(self) -> Run:
        """With whole sequences: on one GPU, or on as many as this if an average over them costs accuracy."""
        mesh = (self.gpus, 1, 1) if self.averages_in_bfloat16 else (1, 1, 1)
        return self._replace(mesh=mesh, transport="collective", graphs=False)

    def file(self, folder: Path) -> Path:
        return folder / f"{self.model}_{self.precision}_{self.backend}_{self.mesh[0]}.pt"


class Result(NamedTuple):
    """Losses, and of every step the gradients by name."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


class Errors(NamedTuple):
    """The losses, the largest error of one parameter's gradient, and that of all gradients taken as one vector.

    The latter is the root mean square over the steps. One vector and several steps, as the rounding errors of a single
    small tensor differ by chance by far more than the few hundredths that are asked about.
    """

    losses: list[float]
    of_one: float
    of_all: float


class StandingStill(RectifiedFlow):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def create_strategy(run: Run) -> Any:
    _, ring, ulysses = run.mesh
    arguments: dict[str, Any] = {"ulysses_size": ulysses, "ring_size": ring, "transport": run.transport}
    if run.graphs:
        arguments |= {"graphs": True, "graphs_max_memory": 0.5}
    if run.backend.startswith("zero"):
        return SequenceParallelDeepSpeedStrategy(int(run.backend[4]), **arguments)
    return {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}[run.backend](**arguments)


def train(run: Run) -> Result:
    """The result of a training, in float64 without the model's float32 casts; on all ranks the same gradients."""
    is_zero = run.backend.startswith("zero")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    record = (ZeroRecord if is_zero else Record)()
    with ExitStack() as contexts:
        contexts.enter_context(patch.object(F, "linear", F.linear))  # which ZeRO-3 replaces for good
        if run.precision == "64-true":
            contexts.enter_context(lifted_float_casts())
        trainer = pl.Trainer(
            strategy=create_strategy(run),
            accelerator="auto",
            devices=dist.get_world_size(),
            precision=run.precision,
            max_steps=STEPS[run.precision],
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # The same numbers in all precisions; times in whole thousandths, as bfloat16 would shift them by whole steps.
        clips = Clips(MODELS[run.model]["shape"], torch.float32, length=CLIPS * STEPS[run.precision])
        clips.tensors["time"] = (1000 * clips.tensors["time"]).long()
        module = StandingStill(ffn_dim=512, **MODELS[run.model]["module"])
        trainer.fit(module, DataLoader(clips, batch_size=CLIPS // run.mesh[0]))
    if run.graphs:
        assert record.graphs["replayed"] >= 2, f"{run}: {record.graphs}"
    gradients = [{name: g.double() for name, g in step.items()} for step in record.gradients]
    for step in gradients:
        mine = torch.cat([g.flatten() for g in step.values()])
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first), f"{run}: the ranks have different gradients"
    return Result(record.losses, gradients)


def write(runs: list[Run], folder: Path) -> None:
    """Writes results for others to be compared with."""
    for run in runs:
        result = train(run)
        if dist.get_rank() == 0:
            torch.save(tuple(result), run.file(folder))


@functools.cache
def load(file: Path) -> Result:
    return Result(*torch.load(file, map_location="cuda" if torch.cuda.is_available() else "cpu"))


def compare(run: Run, expected: Run, folder: Path) -> Errors:
    """How far the result of a training is from that of another, which was written."""
    return _errors(train(run), load(expected.file(folder)))


def compare_written(run: Run, expected: Run, folder: Path) -> Errors:
    """The same of two results that were written."""
    return _errors(load(run.file(folder)), load(expected.file(folder)))


def _errors(got: Result, expected: Result) -> Errors:
    of_one, squares = 0.0, []
    for step, reference in zip(got.gradients, expected.gradients, strict=True):
        of_one = max(of_one, gradient_error(step, reference))
        difference = sum(float((step[name] - g).square().sum()) for name, g in reference.items())
        squares.append(difference / sum(float(g.square().sum()) for g in reference.values()))
    return Errors(got.losses, of_one, (sum(squares) / len(squares)) ** 0.5)


@pytest.fixture(scope="module")
def written(gpu_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`written(run, ...)` is the folder with the results of these runs, each computed once."""
    folder = tmp_path_factory.mktemp("unsplit")
    for size in (1, 2, 4):
        if size <= torch.cuda.device_count():
            gpu_ranks(size).start()

    def get(*runs: Run) -> Path:
        for run in runs:
            if not run.file(folder).exists():
                gpu_ranks(run.gpus).run(write, [run], folder)
        return folder

    return get


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
# The symmetric transport is for Ulysses groups.
RUNS = [
    Run(model, precision, backend, mesh, transport)
    for mesh, backend, model in itertools.product(MESHES, BACKENDS, ("even", "odd"))
    for precision in ("32-true", "bf16-mixed", "bf16-true")
    for transport in ("collective", "symmetric")
    if transport == "collective" or (mesh[2] > 1 and not backend.startswith("zero"))
]

BY_GRAPHS = [
    run._replace(graphs=True)
    for run in RUNS
    if run.precision != "bf16-true" and run.backend in ("ddp", "zero1", "zero2") and run.mesh[2] * run.mesh[1] > 1
]
OF_A_NODE = [Run("eight", "32-true", backend, mesh) for mesh in NODE for backend in ("ddp", "fsdp2", "zero3")]


def each(runs: list[Run]) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(run, id="-".join(map(str, run)), marks=needs_deepspeed if run.backend.startswith("zero") else [])
        for run in runs
    ]
    return pytest.mark.parametrize("run", parameters)


@each([run for run in (*RUNS, *BY_GRAPHS) if run.precision == "32-true"] + OF_A_NODE)
def test_float32_equals_one_gpu(gpu_ranks: Ranks, written: Callable[..., Path], run: Run) -> None:
    expected = Run(run.model, "32-true", "ddp")
    folder = written(expected)
    errors = gpu_ranks(run.gpus).run(compare, run, expected, folder)
    losses = torch.tensor([error.losses for error in errors], dtype=torch.float64).mean(0)
    assert losses.tolist() == pytest.approx(torch.load(expected.file(folder))[0], rel=1e-5)
    assert max(error.of_one for error in errors) <= 1e-5


@each([run for run in (*RUNS, *BY_GRAPHS) if run.precision != "32-true" and run != run.unsplit])
def test_bf16_is_as_near_to_float64_as_unsplit(
    gpu_ranks: Ranks, written: Callable[..., Path], record_property: Callable[[str, object], None], run: Run
) -> None:
    exact = Run(run.model, "64-true", "ddp")
    folder = written(exact, run.unsplit)
    unsplit = gpu_ranks(1).run(compare_written, run.unsplit, exact, folder)[0].of_all
    ratio = max(error.of_all for error in gpu_ranks(run.gpus).run(compare, run, exact, folder)) / unsplit
    record_property("error over that with whole sequences", ratio)
    assert 1e-4 < unsplit < 1e-1
    assert ratio <= 1.05


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_deepspeed if name.startswith("zero") else []) for name in BACKENDS]
)
def test_every_pair_of_settings_in_float32(gpu_ranks: Ranks, alone: Path, backend: str, gpus: int) -> None:
    ranks = gpu_ranks(gpus)
    meshes = [mesh for mesh in MESHES if math.prod(mesh) == gpus]
    table = TABLE | {"backend": BACKENDS, "mesh": meshes, "graphs": [False, True]}
    pairs = [settings for settings in pairwise_cases(table) if settings["backend"] == backend]
    cases = [Case(**settings, float32=True) for settings in pairs if not settings["graphs"]]
    if backend in ("ddp", "zero1", "zero2"):  # where parameters stay in place
        cases += [Case(**settings, float32=True, steps=STEPS_BY_GRAPHS) for settings in pairs if settings["graphs"]]
    gpu_ranks(1).run(train_alone, list({case.alone: case for case in cases}.values()), alone)
    wrong = []
    for case, *errors in zip(cases, *ranks.run(compare_with_one, cases, alone), strict=True):
        try:
            check_one(case, errors, Outcome(*torch.load(case.file(alone), map_location="cpu")))
        except AssertionError as error:
            wrong.append(f"{error}\n{errors}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n".join(wrong)
