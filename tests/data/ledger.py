"""Which samples the weights of the last of many runs have seen: an account independent of the code under test.

The LightningModule writes down, in every ``training_step``, what it was given and which optimizer step it is for. A
checkpoint names the run that saved it. So the lineage of the last run's weights can be told: of each run, the steps
before the checkpoint that the next one began with.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_videoscale.data import Batch


class Entry(NamedTuple):
    """One micro-batch that ranks trained on together (one rank, or a sequence-parallel group), and for which step."""

    step: int
    epoch: int
    group: int
    ids: list[str]
    weight: float


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
        note(self.folder / f"run{self.run}-rank{self.global_rank}.jsonl", entry)
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


class Step(NamedTuple):
    """An optimizer step of a run, with the micro-batches of all its groups."""

    run: int
    entries: list[Entry]

    @property
    def samples(self) -> list[str]:
        return [name for entry in self.entries if entry.weight for name in entry.ids]


def lineage(folder: Path) -> list[Step]:
    """The optimizer steps that the last run's weights have seen."""
    starts = {run: (parent, step) for run, parent, step in _lines(folder / "starts.jsonl")}
    run, end = list(_lines(folder / "ends.jsonl"))[-1]
    history: list[list[Step]] = []
    while run is not None:
        parent, first = starts[run]
        ranks = [[Entry(*line) for line in _lines(file)] for file in folder.glob(f"run{run}-rank*.jsonl")]
        history.append([Step(run, _of_groups(ranks, step)) for step in range(first, end)])
        run, end = parent, first
    return list(itertools.chain.from_iterable(reversed(history)))


def _of_groups(ranks: list[list[Entry]], step: int) -> list[Entry]:
    """What was trained in a step; the ranks of a group must have trained on the same."""
    groups: dict[int, list[Entry]] = {}
    for entries in ranks:
        if found := [entry for entry in entries if entry.step == step]:
            assert groups.setdefault(found[0].group, found) == found, f"ranks of a group differ in step {step}"
    return list(itertools.chain.from_iterable(groups.values()))


def note(file: Path, content: Any) -> None:
    """Adds a line that stays, even if the process is killed now."""
    with file.open("a") as lines:
        lines.write(json.dumps(content) + "\n")


def _lines(file: Path) -> Iterator[Any]:
    return map(json.loads, file.read_text().splitlines())


def check_steps(steps: list[Step], slots: list[int] | None) -> None:
    """Every step is whole, of one epoch, and weighs its samples alike.

    Args:
        steps: The lineage.
        slots: Micro-batches that a step of each run has on all ranks; None: any number, since epochs are limited.
    """
    for number, (run, entries) in enumerate(steps):
        assert entries, f"nobody trained step {number}"
        assert len({entry.epoch for entry in entries}) == 1, f"step {number} is of two epochs"
        weights = {round(entry.weight / len(entry.ids), 9) for entry in entries if entry.weight}
        assert len(weights) == 1, f"step {number} weighs its samples by {sorted(weights)}"
        if slots is not None:
            assert len(entries) == slots[run], f"step {number} has {len(entries)} micro-batches of {slots[run]}"
            assert abs(sum(entry.weight for entry in entries) - len(entries)) < 1e-6, f"step {number} is not a mean"


def check_once(steps: list[Step], samples: list[str]) -> None:
    """Every sample in exactly one step of every epoch, whose ends are those of steps."""
    seen = [name for step in steps for name in step.samples]
    ends = set(itertools.accumulate(len(step.samples) for step in steps))
    for number, first in enumerate(range(0, len(seen), len(samples))):
        names = seen[first : first + len(samples)]
        assert not (again := _repeated(names)), f"pass {number} trained on {len(again)} samples again: {again[:5]}"
        assert len(names) == len(samples), f"pass {number} trained on {len(names)} of {len(samples)} samples"
        assert first + len(samples) in ends, f"a step reaches over the end of pass {number}"


def check_at_most_once(steps: list[Step]) -> None:
    """No sample in two steps of an epoch, as the Trainer counts epochs."""
    for epoch, group in itertools.groupby(steps, lambda step: step.entries[0].epoch):
        again = _repeated(name for step in group for name in step.samples)
        assert not again, f"epoch {epoch} trained on {len(again)} samples again: {again[:5]}"


def check_evenly(steps: list[Step], dataset: list[str]) -> None:
    """All samples of a dataset before any comes again, over the borders of epochs."""
    counts = Counter(name for step in steps for name in step.samples)
    often = {name: counts[name] for name in dataset}
    assert max(often.values()) - min(often.values()) <= 1, f"a dataset is not walked through evenly: {often}"


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)
