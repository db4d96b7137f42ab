"""Chains of runs that stop anywhere and go on, each a pure function of its seed, and a ledger of what was trained.

The ledger is independent of the code under test: the LightningModule writes down, in every ``training_step``, what it
was given and which optimizer step it is for. A checkpoint names the run that saved it. So the lineage of the last
run's weights can be told: of each run, the steps before the checkpoint that the next one began with.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget, Calibration
from lightning_videoscale.data import Batch, VideoDataModule
from tests.data.training import trainer_with

BUDGETS = [BucketBudget(m_mem=tokens, m_comp=tokens * 80) for tokens in (80, 160, 320)]
HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
)
_OFTEN = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")


class Stop(Exception):
    """What ends a run."""


class Entry(NamedTuple):
    """One micro-batch that a rank trained on, and the optimizer step that it is part of."""

    step: int
    epoch: int
    rank: int
    ids: list[str]
    weight: float


@dataclass(frozen=True)
class Leg:
    """The settings of one run of a chain.

    Attributes:
        micro_batches: K.
        balance: The plan's.
        budget: Micro-batches may hold.
        workers: Processes per rank that read ahead.
        savers: What saves checkpoints, see `_saver`.
        stop: Hook, and at which of its calls the run ends by an exception; None trains to the end.
        more_steps: The run ends after so many optimizer steps (``max_steps``); None: at the last epoch.
        adopt: Optimizer step of the run after which another budget is adopted; None: never.
        looks_ahead: Whether the optimizers ask how many steps there will be, before anything is restored.
        ranks: Processes.
        sp: Ranks that train on one batch together.
        strategy: Name of the Trainer's strategy, one of ``auto``, ``ddp``, ``sp_ddp`` and ``sp_fsdp2``.
    """

    micro_batches: int
    balance: str
    budget: int
    workers: int
    savers: tuple[tuple[Any, ...], ...]
    stop: tuple[str, int] | None
    more_steps: int | None
    adopt: int | None
    looks_ahead: bool
    ranks: int = 1
    sp: int = 1
    strategy: str = "auto"


@dataclass(frozen=True)
class Chain:
    """Runs that follow each other.

    Attributes:
        seed: Names the chain.
        epochs: That the last run ends with.
        validates: ``val_check_interval``, None for no validation.
        limit: ``limit_train_batches``; None: all.
        weights: Weights of two datasets; None: one dataset.
        legs: The runs.
    """

    seed: int
    epochs: int
    validates: float | int | None
    limit: int | None
    weights: tuple[float, float] | None
    legs: list[Leg] = field(default_factory=list)


class Ledger(pl.LightningModule):
    """Learns nothing and writes down what it trains on.

    Args:
        folder: Where each rank of each run has a file.
        run: Number of the run.
        looks_ahead: Whether to ask how many steps there will be.
    """

    def __init__(self, folder: Path, run: int, looks_ahead: bool = False) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.folder, self.run, self.looks_ahead = folder, run, looks_ahead

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        entry = Entry(
            self.global_step, self.current_epoch, self.global_rank, batch["sample_ids"], batch["meta"].loss_weight
        )
        with (self.folder / f"run{self.run}-rank{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return self._loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: Batch) -> Tensor:
        return ((self.slope * batch["latents"].double().mean(dim=(1, 2, 3, 4)) / 100 - 1) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert not self.looks_ahead or self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = self.run


class At(Callback):
    """Does something at the n-th call of a hook."""

    def __init__(self, hook: str, count: int) -> None:
        self.count = count
        setattr(self, hook, self._count)

    def _count(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count -= 1
        if self.count == 0:
            self.act(trainer)

    def act(self, trainer: pl.Trainer) -> None:
        raise Stop


class SaveAt(At):
    """Saves a checkpoint, as any callback of a user may."""

    def __init__(self, hook: str, count: int, file: Path) -> None:
        super().__init__(hook, count)
        self.file = file

    def act(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.file)


class Adopt(At):
    """Gives the data another budget between two steps."""

    def __init__(self, step: int, budget: BucketBudget) -> None:
        super().__init__("on_train_batch_end", -1)
        self.step, self.budget, self.first = step, budget, -1

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first = trainer.global_step

    def _count(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first + self.step and self.count:
            self.count = 0
            trainer.datamodule.adopt(Calibration(self.budget))  # type: ignore[attr-defined]


def chain_of(seed: int, ranks: bool = False) -> Chain:
    """The chain of a seed."""
    draw = random.Random(seed)
    validates = draw.choice([None, None, 1.0, 1.0, 0.5, 2])
    limit, weights = draw.choice(
        [(None, None)] * 6 + [(4, None), (7, None), (None, (1.0, 1.0)), (None, (3.0, 1.0))]
    )
    epochs = draw.randint(2, 3)
    same = draw.random() < 0.3
    legs: list[Leg] = []
    for number in range(count := draw.randint(3, 6)):
        leg = _leg(draw, validates is not None, last=number == count - 1)
        if same and legs:
            leg = _with(leg, legs[0])
        legs.append(leg)
    return Chain(seed, epochs, validates, limit, weights, legs)


def _with(leg: Leg, first: Leg) -> Leg:
    kept = ("micro_batches", "balance", "budget", "ranks", "sp", "strategy")
    return Leg(**{name: getattr(first if name in kept else leg, name) for name in Leg.__dataclass_fields__})


def _leg(draw: random.Random, validates: bool, last: bool) -> Leg:
    hook = draw.choice([name for name in HOOKS if validates or "validation" not in name])
    often = hook in _OFTEN
    stop = (hook, draw.randint(1, 40 if often else 2))
    saver_hook = draw.choice([name for name in HOOKS if (validates or "validation" not in name)])
    savers = [
        ("steps", draw.choice([1, 1, 2, 3, 5])),
        ("last",),
        ("epochs", draw.choice([None, True, False])),
        ("exception", draw.randint(3, 6)),
        ("hook", saver_hook, draw.randint(1, 12 if saver_hook in _OFTEN else 2)),
    ]
    ends = draw.random()
    return Leg(
        micro_batches=draw.choice([1, 1, 2, 3]),
        balance=draw.choice(["planned", "dual_constraint", "equal_token"]),
        budget=draw.randrange(len(BUDGETS)),
        workers=draw.choice([0, 0, 0, 0, 1, 2]),
        savers=tuple(draw.sample(savers, draw.randint(1, 3))),
        stop=None if last or ends < 0.2 else stop,
        more_steps=draw.randint(0, 12) if not last and ends < 0.35 else None,
        adopt=draw.randint(0, 4) if draw.random() < 0.25 else None,
        looks_ahead=draw.random() < 0.5,
    )


class Saver(ModelCheckpoint):
    """May stand beside another of the same settings."""

    @property
    def state_key(self) -> str:
        return str(self.filename)


def _saver(kind: tuple[Any, ...], folder: Path, run: int) -> Callback:
    """One of the ways in which people save checkpoints."""
    keep = {"dirpath": folder, "filename": f"{run}-{kind[0]}-{{step}}", "save_top_k": -1}
    match kind:
        case "steps", n:
            return Saver(every_n_train_steps=n, **keep)
        case ("last",):
            return Saver(every_n_train_steps=2, save_last=True, **keep | {"save_top_k": 1})
        case "epochs", at_train_end:
            return Saver(every_n_epochs=1, save_on_train_epoch_end=at_train_end, **keep)
        case "exception", n:
            return Saver(every_n_train_steps=n, save_on_exception=True, **keep)
        case "hook", hook, count:
            return SaveAt(hook, count, folder / f"{run}-hook.ckpt")
    raise ValueError(kind)


def newest(folder: Path) -> Path | None:
    """The checkpoint that was written last."""
    return max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns, default=None)


def train(chain: Chain, run: int, shards: Any, folder: Path) -> None:
    """One run of a chain, from the newest checkpoint to its end or to the exception that it draws."""
    leg = chain.legs[run]
    start = newest(folder)
    state = {} if start is None else torch.load(start, weights_only=False)
    before = state.get("global_step", 0)
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps((run, state.get("run"), before)) + "\n")
    callbacks: list[Callback] = [LossWeighting()]
    if leg.adopt is not None:
        callbacks.append(Adopt(leg.adopt, BUDGETS[leg.budget - 1]))
    callbacks += [_saver(kind, folder, run) for kind in leg.savers]
    if leg.stop is not None:
        place = random.Random(chain.seed).choice([0, len(callbacks)])  # before or after others save
        callbacks.insert(place, At(*leg.stop))
    validates = {} if chain.validates is None else {"val_check_interval": chain.validates}
    epoch = state.get("epoch", 0)
    # Where max_steps has cut an epoch short, the Trainer counts one more.
    limits = {"max_epochs": max(chain.epochs, epoch + 2 if leg is chain.legs[-1] else epoch)}
    if leg.more_steps is not None:
        limits = {"max_epochs": -1, "max_steps": before + leg.more_steps}
    trainer = trainer_with(
        accumulate_grad_batches=leg.micro_batches, callbacks=callbacks, limit_train_batches=chain.limit,
        enable_checkpointing=True, num_sanity_val_steps=0, default_root_dir=folder, **validates, **limits,
    )  # fmt: skip
    names = [shards] if chain.weights is None else shards
    data = VideoDataModule(
        shards if chain.weights is None else dict(zip(names, chain.weights, strict=True)),
        folder / "index.json", leg.balance, BUDGETS[leg.budget], micro_batches=leg.micro_batches,
        num_workers=leg.workers, val_shards=None if chain.validates is None else names[0],
    )  # fmt: skip
    with suppress(Stop):
        trainer.fit(Ledger(folder, run, leg.looks_ahead), data, ckpt_path=start)
    with (folder / "ends.jsonl").open("a") as file:
        file.write(json.dumps((run, trainer.global_step)) + "\n")


def lineage(folder: Path) -> Iterator[list[Entry]]:
    """The optimizer steps that the last run's weights have seen, each with the micro-batches of all ranks."""
    starts = {run: (parent, step) for run, parent, step in _lines(folder / "starts.jsonl")}
    run, end = list(_lines(folder / "ends.jsonl"))[-1]
    history: list[list[list[Entry]]] = []
    while run is not None:
        parent, first = starts[run]
        entries = [Entry(*line) for file in folder.glob(f"run{run}-rank*.jsonl") for line in _lines(file)]
        steps = [[entry for entry in entries if entry.step == step] for step in range(first, end)]
        history.append(steps)
        run, end = parent, first
    return itertools.chain.from_iterable(reversed(history))


def _lines(file: Path) -> Iterator[Any]:
    """JSON lines; of a process that was killed the last one may be half written."""
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def check(steps: list[list[Entry]], chain: Chain, samples: list[str]) -> None:
    """Every sample in one step of every epoch, and of equal weight within a step."""
    for number, step in enumerate(steps):
        assert step, f"nobody trained step {number}"
        per_sample = {round(entry.weight / len(entry.ids), 9) for entry in step if entry.weight}
        assert len(per_sample) == 1, f"step {number} weighs its samples by {sorted(per_sample)}"
        assert len({entry.epoch for entry in step}) == 1, f"step {number} is of two epochs"
    trained = [[name for entry in step if entry.weight for name in entry.ids] for step in steps]
    if chain.limit is not None:
        for epoch, group in itertools.groupby(zip(steps, trained, strict=True), lambda pair: pair[0][0].epoch):
            twice = _more_than(itertools.chain.from_iterable(names for _, names in group), 1)
            assert not twice, f"epoch {epoch} trained on {len(twice)} samples again: {twice[:5]}"
        return
    seen: list[str] = []
    ends = {sum(map(len, trained[: i + 1])) for i in range(len(trained))}
    for names in trained:
        seen += names
    if chain.weights is not None:
        for dataset in {name.partition("/")[0] for name in samples}:
            counts = Counter({name: 0 for name in samples if name.startswith(dataset)})
            counts.update(name for name in seen if name.startswith(dataset))
            assert max(counts.values()) - min(counts.values()) <= 1, f"{dataset} is not walked through evenly: {counts}"
        return
    for epoch, first in enumerate(range(0, len(seen), len(samples))):
        names = seen[first : first + len(samples)]
        twice = _more_than(names, 1)
        assert not twice, f"pass {epoch} trained on {len(twice)} samples again: {twice[:5]}"
        assert len(names) == len(samples), f"pass {epoch} trained on {len(names)} of {len(samples)} samples"
        assert first + len(samples) in ends, f"a step reaches over the end of pass {epoch}"


def _more_than(names: Any, times: int) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > times)
