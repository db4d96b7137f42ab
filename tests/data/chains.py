"""Chains of runs that stop anywhere and go on, each a pure function of its seed."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_videoscale import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget, Calibration
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.parallel import SplitPlan
from tests.data.ledger import Ledger, note
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
        more_epochs: The run ends after so many epochs (``max_epochs``), that it begins in included.
        more_steps: The run ends after so many optimizer steps (``max_steps``) instead; None: it does not.
        adopt: Optimizer step of the run after which another budget is adopted; None: never.
        looks_ahead: Whether the optimizers ask how many steps there will be, before anything is restored.
        strategy: Name of the Trainer's strategy, one of ``auto``, ``ddp``, ``sp_ddp`` and ``sp_fsdp2``.
        ranks: Processes.
        sp: Ranks that train on one batch together.
        window: Clips of a window; None: the epoch is planned as a whole.
        mortal: The rank that is killed, where one is.
    """

    micro_batches: int
    balance: str
    budget: int
    workers: int
    savers: tuple[tuple[Any, ...], ...]
    stop: tuple[str, str, int] | None
    more_epochs: int
    more_steps: int | None
    adopt: int | None
    looks_ahead: bool
    strategy: str = "auto"
    ranks: int = 1
    sp: int = 1
    window: int | None = None
    mortal: int = 0


@dataclass(frozen=True)
class Chain:
    """Runs that follow each other.

    Attributes:
        seed: Names the chain.
        validates: ``val_check_interval``, None for no validation; -n: every n batches, across epochs.
        limit: ``limit_train_batches``; None: all.
        weights: Weights of two datasets; None: one dataset.
        legs: The runs.
    """

    seed: int
    validates: float | int | None
    limit: int | float | None
    weights: tuple[float, float] | None
    legs: list[Leg]


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
    same = draw.random() < 0.3
    legs: list[Leg] = []
    for number in range(count := draw.randint(3, 6)):
        leg = _leg(draw, validates is not None, strategies, last=number == count - 1)
        if same and legs:
            leg = _with(leg, legs[0])
        legs.append(leg)
    if processes:  # at least one is surely killed, and it has gone on from a checkpoint if there was one
        legs[1] = replace(legs[1], stop=("kill", _OFTEN[seed % 4], 1 + seed // 4 % 3), more_epochs=2, more_steps=None)
    return Chain(seed, validates, limit, weights, legs)


def in_windows(chain: Chain) -> Chain:
    """The same chain with epochs in windows, often of another size in every run, and sometimes without."""
    draw = random.Random(chain.seed)
    kept = draw.choice([10, 25, None])
    legs = [replace(leg, window=kept or draw.choice([1, 9, 20, 33, 100, None])) for leg in chain.legs]
    return replace(chain, legs=legs)


def _with(leg: Leg, first: Leg) -> Leg:
    kept = ("micro_batches", "balance", "budget", "ranks", "sp", "strategy", "mortal")
    return replace(leg, **{name: getattr(first, name) for name in kept})


def _leg(draw: random.Random, validates: bool, strategies: tuple[str, ...], last: bool) -> Leg:
    hooks = [name for name in HOOKS if validates or "validation" not in name]
    strategy = draw.choice(strategies)
    ranks = 1 if strategy == "auto" else draw.randint(1, 4)
    hook, saver_hook = draw.choice(hooks), draw.choice([name for name in hooks if name != "on_save_checkpoint"])
    processes = strategies != ("auto",)
    hows = ["kill", "kill", "write", "stop"] if processes else ["raise", "raise", "stop"]
    most = 12 // ranks if processes else 30
    stop = (draw.choice(hows), hook, draw.randint(1, most if hook in _OFTEN else 2))
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
        stop=None if last or ends < (0.1 if processes else 0.2) else stop,
        more_epochs=2 if last else draw.choice([0, 1, 2, 2, 3]),
        more_steps=draw.randint(0, 12) if not last and ends < 0.35 else None,
        adopt=draw.randint(0, 4) if draw.random() < 0.25 else None,
        looks_ahead=draw.random() < 0.5,
        strategy=strategy,
        ranks=ranks,
        sp=draw.choice([1, 2]) if strategy.startswith("sp") and ranks % 2 == 0 else 1,
        mortal=0 if stop[0] == "write" else draw.randrange(ranks),
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
        note(folder / "starts.jsonl", (run, state.get("run"), before))
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
    limits = {"max_epochs": max(1, epoch + leg.more_epochs)}
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
        num_workers=leg.workers, window=leg.window, val_shards=None if chain.validates is None else first,
    )  # fmt: skip
    with suppress(Stop):
        trainer.fit(Ledger(folder, run, leg.looks_ahead), data, ckpt_path=start)
    if rank == 0:
        note(folder / "ends.jsonl", (run, trainer.global_step))
