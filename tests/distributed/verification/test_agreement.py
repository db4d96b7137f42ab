"""Ranks of a group that draw different numbers are told so, on all ranks, before anything is learnt from them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import (
    Agreement,
    CollectiveTransport,
    SequenceMesh,
    SplitPlan,
    parallelize,
)
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow

Ranks = Callable[[int], ProcessPool]
Draw = Callable[[tuple[int, ...]], Tensor]
STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}


def own_generator(kind: str, trainer: pl.Trainer) -> Draw:
    """How users draw numbers without the default generators."""
    group = trainer.strategy.data_parallel_rank
    torch_generator, numpy_generator, python_generator = torch.Generator(), np.random.default_rng(), random.Random()
    if kind.startswith("torch"):
        {
            "torch by global rank": lambda: torch_generator.manual_seed(trainer.global_rank),
            "torch unseeded": torch_generator.seed,
            "torch by group": lambda: torch_generator.manual_seed(group),
        }[kind]()
        return lambda shape: torch.randn(shape, generator=torch_generator)
    if kind == "numpy by group":
        numpy_generator = np.random.default_rng([group, trainer.global_step])
    if kind.startswith("numpy"):
        return lambda shape: torch.tensor(numpy_generator.standard_normal(shape), dtype=torch.float32)
    if kind == "python by group":
        python_generator.seed(group)
    if kind.startswith("python"):
        return lambda shape: torch.full(shape, python_generator.gauss())
    return torch.randn


class DrawsItself(RectifiedFlow):
    """Draws noise or times with a generator of its own.

    Args:
        kind: Which generator.
        target: "noise", "time", or "target" for noise that the network does not see.
    """

    def __init__(self, kind: str, target: str) -> None:
        super().__init__()
        self.kind, self.target = kind, target

    def on_fit_start(self) -> None:
        self.draw = own_generator(self.kind, self.trainer)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        if self.target == "time":
            batch["time"] = self.draw(tuple(batch["time"].shape)).sigmoid()
        if self.target == "noise":
            batch["noise"] = self.draw(tuple(batch["noise"].shape))
        loss = self.loss(batch)
        return loss * self.draw((1,)).exp().mean() if self.target == "weight" else loss


def fit(strategy: str, sp: int, module: Callable[..., pl.LightningModule], *args: Any, **kwargs: Any) -> str:
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](sp),
        accelerator="cpu",
        devices=dist.get_world_size(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_steps": 2} | kwargs),
    )
    try:
        trainer.fit(module(*args), DataLoader(Clips((2, 4, 4), torch.float32), batch_size=1))
    except ValueError as error:
        return str(error)
    return "trained"


def failing(pool: ProcessPool, *args: Any, **kwargs: Any) -> list[str]:
    try:
        return pool.run(fit, *args, **kwargs)
    finally:
        pool.stop()  # an error in the middle of a fit leaves the processes out of step


DRAWS = ["torch by global rank", "torch unseeded", "numpy", "python"]


@pytest.mark.parametrize(
    ("strategy", "kind", "target"),
    [
        ("ddp", "torch by global rank", "noise"),
        ("ddp", "python", "time"),
        ("fsdp2", "numpy", "time"),
        ("ddp", "torch unseeded", "weight"),
        *(
            pytest.param(strategy, kind, target, marks=pytest.mark.full)
            for strategy in STRATEGIES
            for kind in DRAWS
            for target in ("noise", "time", "weight")
        ),
    ],
)
def test_a_generator_that_differs_in_a_group_is_refused(ranks: Ranks, strategy: str, kind: str, target: str) -> None:
    what = {
        "noise": "WanTransformer3DModel differ in ['hidden_states'] by a relative distance of",
        "time": "WanTransformer3DModel differ in",
        "weight": "losses differ in ['loss'] by a relative distance of",
    }[target]
    for message in failing(ranks(2), strategy, 2, DrawsItself, kind, target):
        assert "Ranks [0, 1] share one batch" in message
        assert what in message and "seed it by the data-parallel rank" in message
        assert target != "time" or "['timestep'] by a relative distance of" in message


@pytest.mark.parametrize("kind", ["default", "torch by group", "numpy by group", "python by group"])
def test_generators_seeded_by_the_group_train(ranks: Ranks, kind: str) -> None:
    assert ranks(4).run(fit, "ddp", 2, DrawsItself, kind, "noise") == ["trained"] * 4


class DropsCaptions(RectifiedFlow):
    """Leaves captions out, as for classifier-free guidance, from a later step on and on one rank."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.fit_loop.total_batch_idx >= 5 and self.global_rank == 1:
            batch["text"] = batch["text"][:, :0]
        return super().training_step(batch)


def test_a_caption_that_one_rank_leaves_out_is_no_hang(ranks: Ranks) -> None:
    messages = failing(ranks(2), "ddp", 2, DropsCaptions, max_steps=8)
    for message in messages:
        assert "['encoder_hidden_states'] (['torch.float32 (1, 5, 16)', 'torch.float32 (1, 0, 16)'])" in message


class Rewarded(RectifiedFlow):
    """A group of samples of one prompt and their advantages, whose mean is 0; so is the loss, whatever the rewards.

    Args:
        apart: How far the rewards of ranks are, as of a judge that draws or rounds.
    """

    def __init__(self, apart: float) -> None:
        super().__init__()
        self.apart = apart

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        samples = {name: torch.cat([x, 2 * x, -x]) for name, x in batch.items()}
        velocity = self.transformer(samples["latents"], 1000 * samples["time"].abs(), samples["text"]).sample
        log_prob = -(velocity - samples["noise"]).square().flatten(1).mean(1)
        generator = torch.Generator().manual_seed(self.global_rank)
        rewards = torch.tensor([1.0, -1.0, 0.5]) + self.apart * torch.rand(3, generator=generator)
        loss = (torch.exp(log_prob - log_prob.detach()) * (rewards.mean() - rewards) / rewards.std()).mean()
        return loss - loss.detach() if self.apart == 1 else loss  # exactly 0, or nearly so


def test_rewards_that_differ_in_a_group_are_refused_where_the_loss_is_zero(ranks: Ranks) -> None:
    for message in failing(ranks(2), "ddp", 2, Rewarded, 1.0):
        assert "gradients of what WanTransformer3DModel has returned differ in ['output 0']" in message


def fit_with_warnings(*args: Any) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return fit(*args), [str(warning.message) for warning in caught if "share one batch" in str(warning.message)]


def test_rounding_of_rewards_is_a_warning_where_the_loss_is_nearly_zero(ranks: Ranks) -> None:
    everyone = ranks(2).run(fit_with_warnings, "ddp", 2, Rewarded, 1e-5)
    assert [outcome for outcome, _ in everyone] == ["trained"] * 2
    assert any("gradients of what WanTransformer3DModel has returned" in said for said in everyone[0][1])


# -- one call at a time --------------------------------------------------------------------------------------------


def compare(first: Any, second: Any) -> str:
    """What two ranks are told that hold these."""
    mesh = SequenceMesh.create("cpu", ulysses_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Agreement(mesh, CollectiveTransport()).check("values", {"x": [first, second][dist.get_rank()]})
        except ValueError as error:
            return str(error)
    return str(caught[0].message) if caught else "agreed"


NUMBERS = torch.arange(24.0).view(2, 3, 4)
NANS = NUMBERS.clone().index_fill_(0, torch.tensor([0]), float("nan"))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (NUMBERS, NUMBERS.mT.contiguous().mT, "agreed"),
        (NUMBERS, NUMBERS.flip(2), "by a relative distance of"),
        (NUMBERS, NUMBERS[[1, 0]], "by a relative distance of"),
        (NUMBERS, NUMBERS.double(), "torch.float64"),
        (NUMBERS, NUMBERS.view(6, 4), "(6, 4)"),
        (NUMBERS, None, "NoneType"),
        (NUMBERS.bfloat16(), NUMBERS.bfloat16(), "agreed"),
        (NUMBERS.bfloat16()[0, 0, :3], NUMBERS.bfloat16()[0, 0, 1:], "by a relative distance of"),
        (NUMBERS > 4, (NUMBERS > 4).flip(0), "differ in ['x']. "),
        (torch.arange(4), torch.tensor([0, 2, 1, 3]), "differ in ['x']. "),
        (torch.tensor(100_000), torch.tensor(100_001), "differ in ['x']. "),
        (torch.complex(NUMBERS, -NUMBERS), torch.complex(NUMBERS, NUMBERS), "by a relative distance of"),
        (NANS, NANS, "agreed"),
        (NANS, NUMBERS, "by a relative distance of"),
        (torch.zeros(3), torch.tensor([0.0, 1e-9, 0.0]), "differ in ['x']. "),
        (5.0, 6.0, "[5.0, 6.0]"),
        (5.0, 5.0 + 1e-9, "differ slightly"),
        ([1, {"a": NUMBERS}], [1, {"a": NUMBERS}], "agreed"),
        ([1, {"a": NUMBERS}], [2, {"a": NUMBERS}], "['x'][0] ([1, 2])"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "agreed"),
        (torch.empty(0), torch.empty(0), "agreed"),
    ],
)  # fmt: skip
def test_what_counts_as_different(ranks: Ranks, first: Any, second: Any, expected: str) -> None:
    told = ranks(2).run(compare, first, second)
    assert expected in told[0]
    assert (told[1] == told[0]) or "slightly" in told[0]


def slightly_different() -> list[str]:
    network = nn.Linear(4, 4)
    parallelize(network, SequenceMesh.create("cpu", ulysses_size=2), SplitPlan({}, {}, {}, lambda m, c: lambda: None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            network(NUMBERS * (1 + 1e-5 * dist.get_rank()))
    return [str(warning.message) for warning in caught]


def test_last_bits_are_a_warning_once(ranks: Ranks) -> None:
    told, silent = ranks(2).run(slightly_different)
    assert len(told) == 1 and silent == []
    assert "Linear" in told[0] and "['input']" in told[0] and "1.0e-05" in told[0]


def of_unusual_layout() -> bool:
    network = nn.Identity()
    parallelize(network, SequenceMesh.create("cpu", ulysses_size=2), SplitPlan({}, {}, {}, lambda m, c: lambda: None))
    column = torch.zeros(1, 4)[:, 1]  # one element, which counts as contiguous with its stride of 4
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    quantized = torch.quantize_per_tensor(NUMBERS.float(), 0.1, 0, torch.qint8)
    unsettled = torch.ones(3, dtype=torch.complex64).conj().imag
    inputs = (column, nested, unsettled, torch.zeros(0, 2), NUMBERS.to_sparse(), quantized)
    return all(network(x) is x for x in inputs)


def test_tensors_of_every_layout_are_compared_or_left_alone(ranks: Ranks) -> None:
    assert ranks(2).run(of_unusual_layout) == [True, True]


class Counting(CollectiveTransport):
    def __init__(self) -> None:
        self.messages: list[tuple[torch.Size, torch.dtype]] = []

    def all_gather(self, x: Tensor, *args: Any) -> Tensor:
        self.messages.append((x.shape, x.dtype))
        return super().all_gather(x, *args)


def messages_of(calls: int) -> tuple[list[Any], list[Any]]:
    network, transport = nn.Linear(4, 4), Counting()
    mesh = SequenceMesh.create("cpu", ulysses_size=2)
    parallelize(network, mesh, SplitPlan({}, {}, {}, lambda m, c: lambda: None), transport=transport)
    for _ in range(calls):
        network(NUMBERS)
    training = list(transport.messages)
    with torch.no_grad():
        network(NUMBERS)
    return training, transport.messages[len(training) :]


def test_a_comparison_is_one_small_message_and_most_calls_have_none(ranks: Ranks) -> None:
    training, sampling = ranks(2).run(messages_of, 3 * 211)[0]
    assert training == [((2,), torch.int64)] * (20 + 3)
    assert sampling == [((2,), torch.int64)], "calls without gradients are counted apart"
