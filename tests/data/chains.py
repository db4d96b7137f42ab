"""Chains of runs that stop anywhere and go on, each a pure function of its seed, and a ledger of what was trained.

The ledger is independent of the code under test: the LightningModule writes down, in every ``training_step``, what it
was given and which optimizer step it is for. A checkpoint names the run that saved it. So the lineage of the last
run's weights can be told: of each run, the steps before the checkpoint that the next one began with.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
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

from lightning_videoscale import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget, Calibration
from lightning_videoscale.data import Batch, VideoDataModule
from lightning_videoscale.parallel import SplitPlan
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
    """One micro-batch that ranks trained on together (one rank, or a sequence-parallel group), and for which step."""

    step: int
    epoch: int
    group: int
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
        stop: How the run ends (see `At`), in which hook and at which of its calls; None: not before its last step.
        more_steps: The run ends after so many optimizer steps (``max_steps``); None: at the last epoch.
        adopt: Optimizer step of the run after which another budget is adopted; None: never.
        looks_ahead: Whether the optimizers ask how many steps there will be, before anything is restored.
        strategy: Name of the Trainer's strategy, one of ``auto``, ``ddp``, ``sp_ddp`` and ``sp_fsdp2``.
        ranks: Processes.
        sp: Ranks that train on one batch together.
        mortal: The rank that is killed, where one is.
    """

    micro_batches: int
    balance: str
    budget: int
    workers: int
    savers: tuple[tuple[Any, ...], ...]
    stop: tuple[str, str, int] | None
    more_steps: int | None
    adopt: int | None
    looks_ahead: bool
    strategy: str = "auto"
    ranks: int = 1
    sp: int = 1
    mortal: int = 0


@dataclass(frozen=True)
class Chain:
    """Runs that follow each other.

    Attributes:
        seed: Names the chain.
        epochs: That the last run ends with.
        validates: ``val_check_interval``, None for no validation; -n: every n batches, across epochs.
        limit: ``limit_train_batches``; None: all.
        weights: Weights of two datasets; None: one dataset.
        legs: The runs.
    """

    seed: int
    epochs: int
    validates: float | int | None
    limit: int | float | None
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
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        self.folder, self.run, self.looks_ahead = folder, run, looks_ahead

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        group = getattr(self.trainer.strategy, "data_parallel_rank", self.global_rank)
        entry = Entry(self.global_step, self.current_epoch, group, batch["sample_ids"], batch["meta"].loss_weight)
        _note(self.folder / f"run{self.run}-rank{self.global_rank}.jsonl", entry)
        return self._loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: Batch) -> Tensor:
        x: Tensor = self.net(batch["latents"].double().mean(dim=(1, 2, 3, 4))[:, None] / 100)
        return ((x - 1) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.steps = self.trainer.estimated_stepping_batches if self.looks_ahead else None
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = self.run


class At(Callback):
    """Ends a run at the n-th call of a hook.

    Args:
        how: ``raise`` an exception, ``stop`` as `EarlyStopping` does, ``kill`` the process as an operating system that
            is out of memory does, or kill it while it next ``write``s a checkpoint.
        hook: The hook.
        count: At which of its calls.
    """

    def __init__(self, how: str, hook: str, count: int) -> None:
        self.how, self.count = how, count
        setattr(self, hook, self._count)

    def _count(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count -= 1
        if self.count == 0:
            self.act(trainer)

    def act(self, trainer: pl.Trainer) -> None:
        match self.how:
            case "raise":
                raise Stop
            case "stop":
                trainer.should_stop = True
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "write":
                sys.addaudithook(_kill_before_rename)


def _kill_before_rename(event: str, _: Any) -> None:
    """Checkpoints are written under another name first."""
    if event in ("shutil.move", "os.rename"):
        os.kill(os.getpid(), signal.SIGKILL)


class SaveAt(At):
    """Saves a checkpoint, as any callback of a user may."""

    def __init__(self, hook: str, count: int, file: Path) -> None:
        super().__init__("save", hook, count)
        self.file = file

    def act(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.file)


class Adopt(At):
    """Gives the data another budget between two steps."""

    def __init__(self, step: int, budget: BucketBudget) -> None:
        super().__init__("adopt", "on_train_batch_end", -1)
        self.step, self.budget, self.first = step, budget, -1

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first = trainer.global_step

    def _count(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first + self.step and self.count:
            self.count = 0
            trainer.datamodule.adopt(Calibration(self.budget))  # type: ignore[attr-defined]


def chain_of(seed: int, processes: bool = False) -> Chain:
    """The chain of a seed: in this process, or of one to four processes some of which are killed."""
    draw = random.Random(seed)
    families = [("auto", "ddp"), ("sp_ddp", "sp_fsdp2")]  # Lightning's strategies do not read ours' checkpoints
    strategies = draw.choice(families) if processes else ("auto",)
    validates = draw.choice([None, None, 1.0, 1.0, 0.5, 2, -3])
    limit, weights = draw.choice(
        [(None, None)] * 6 + [(4, None), (7, None), (0.6, None), (None, (1.0, 1.0)), (None, (3.0, 1.0))]
    )
    epochs = draw.randint(2, 4)
    same = draw.random() < 0.3
    legs: list[Leg] = []
    for number in range(count := draw.randint(3, 6)):
        leg = _leg(draw, validates is not None, strategies, last=number == count - 1)
        if same and legs:
            leg = _with(leg, legs[0])
        legs.append(leg)
    return Chain(seed, epochs, validates, limit, weights, legs)


def _with(leg: Leg, first: Leg) -> Leg:
    kept = ("micro_batches", "balance", "budget", "ranks", "sp", "strategy")
    return Leg(**{name: getattr(first if name in kept else leg, name) for name in Leg.__dataclass_fields__})


def _leg(draw: random.Random, validates: bool, strategies: tuple[str, ...], last: bool) -> Leg:
    hooks = [name for name in HOOKS if validates or "validation" not in name]
    strategy = draw.choice(strategies)
    ranks = 1 if strategy == "auto" else draw.randint(1, 4)
    hook, saver_hook = draw.choice(hooks), draw.choice([name for name in hooks if name != "on_save_checkpoint"])
    hows = ["raise", "raise", "stop"] if strategies == ("auto",) else ["kill", "kill", "write", "stop"]
    stop = (draw.choice(hows), hook, draw.randint(1, 30 // ranks if hook in _OFTEN else 2))
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
        strategy=strategy,
        ranks=ranks,
        sp=draw.choice([1, 2]) if strategy.startswith("sp") and ranks % 2 == 0 else 1,
        mortal=draw.randrange(ranks),
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


def _strategy(leg: Leg) -> Any:
    if not leg.strategy.startswith("sp"):
        return leg.strategy
    kind = SequenceParallelDDPStrategy if leg.strategy == "sp_ddp" else SequenceParallelFSDP2Strategy
    return kind(ulysses_size=leg.sp, modules=["net"], plan=SplitPlan({}, {}, {}, lambda model, context: lambda: None))


def newest(folder: Path) -> Path | None:
    """The checkpoint that was written last."""
    return max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns, default=None)


def train(chain: Chain, run: int, start: Path | None, folder: Path, rank: int = 0) -> None:
    """One rank of one run of a chain, from a checkpoint to its end or to where it is stopped.

    Args:
        chain: The chain.
        run: Number of the run.
        start: The checkpoint.
        folder: Holds ``shards``, and ``runs`` for checkpoints and what is written down.
        rank: The rank.
    """
    leg, shards, folder = chain.legs[run], folder / "shards", folder / "runs"
    meta = start / "meta.pt" if start is not None and start.is_dir() else start
    state = {} if meta is None else torch.load(meta, weights_only=False)
    before = state.get("global_step", 0)
    if rank == 0:
        _note(folder / "starts.jsonl", (run, state.get("run"), before))
    callbacks: list[Callback] = [LossWeighting()]
    if leg.adopt is not None:
        callbacks.append(Adopt(leg.adopt, BUDGETS[leg.budget - 1]))
    callbacks += [_saver(kind, folder, run) for kind in leg.savers]
    if leg.stop is not None:
        place = random.Random(chain.seed).choice([0, len(callbacks)])  # before or after others save
        if leg.stop[0] in ("raise", "stop") or rank == leg.mortal:
            callbacks.insert(place, At(*leg.stop))
    validates: dict[str, Any] = {} if chain.validates is None else {"val_check_interval": abs(chain.validates)}
    if chain.validates is not None and chain.validates < 0:
        validates["check_val_every_n_epoch"] = None
    epoch = state.get("epoch", 0)
    # Where max_steps has cut an epoch short, the Trainer counts one more.
    limits: dict[str, Any] = {"max_epochs": max(chain.epochs, epoch + 2 if leg is chain.legs[-1] else epoch)}
    if leg.more_steps is not None:
        limits: dict[str, Any] = {"max_epochs": -1, "max_steps": before + leg.more_steps}
    trainer = trainer_with(
        strategy=_strategy(leg), devices=leg.ranks, accumulate_grad_batches=leg.micro_batches, callbacks=callbacks,
        limit_train_batches=chain.limit, enable_checkpointing=True, num_sanity_val_steps=0, default_root_dir=folder,
        **validates, **limits,
    )  # fmt: skip
    first, others, every = (str(shards / name) for name in ("000.tar", "{001..002}.tar", "{000..002}.tar"))
    data = VideoDataModule(
        every if chain.weights is None else dict(zip((first, others), chain.weights, strict=True)),
        folder / "index.json", leg.balance, BUDGETS[leg.budget], micro_batches=leg.micro_batches,
        num_workers=leg.workers, val_shards=None if chain.validates is None else first,
    )  # fmt: skip
    with suppress(Stop):
        trainer.fit(Ledger(folder, run, leg.looks_ahead), data, ckpt_path=start)
    if rank == 0:
        _note(folder / "ends.jsonl", (run, trainer.global_step))


def lineage(folder: Path) -> Iterator[list[Entry]]:
    """The optimizer steps that the last run's weights have seen, each with the micro-batches of all groups."""
    starts = {run: (parent, step) for run, parent, step in _lines(folder / "runs/starts.jsonl")}
    run, end = list(_lines(folder / "runs/ends.jsonl"))[-1]
    history: list[list[list[Entry]]] = []
    while run is not None:
        parent, first = starts[run]
        ranks = [[Entry(*line) for line in _lines(file)] for file in folder.glob(f"runs/run{run}-rank*.jsonl")]
        history.append([_of_groups(ranks, step) for step in range(first, end)])
        run, end = parent, first
    return itertools.chain.from_iterable(reversed(history))


def _of_groups(ranks: list[list[Entry]], step: int) -> list[Entry]:
    """What was trained in a step; the ranks of a group must have trained on the same."""
    groups: dict[int, list[Entry]] = {}
    for entries in ranks:
        if found := [entry for entry in entries if entry.step == step]:
            assert groups.setdefault(found[0].group, found) == found, f"ranks of a group differ in step {step}"
    return list(itertools.chain.from_iterable(groups.values()))


def _note(file: Path, content: Any) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(content) + "\n")


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
