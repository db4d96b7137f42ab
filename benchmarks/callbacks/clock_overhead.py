"""What watching costs: Wan-1.3B's blocks on one GPU, with the clock, `LoadBalanceMonitor` and `BottleneckAnalyzer`.

    python benchmarks/callbacks/clock_overhead.py

All that the clock does is done by the host, which launches ahead of the device: it costs at most the host's time in it,
and that only where the device waits for the host. So that is taken directly, call by call. Beside it, what the training
as a whole shows. One training under each strategy, without a stop from the first to the last step, of three parts:

1. Clips of 16 tokens, for which the device has next to nothing to do: what the host takes to launch a step.
2. Clips so long that the device is what a step waits for. Blocks of a few steps with and without the clock take turns
   in pairs, in random order. Neighbours share the state of a GPU at its power limit, whose clock wanders by more than
   is to be shown; the median of the pairs' ratios is left, with a 95 % interval by bootstrap.
3. Both monitors on, a report every few steps. Reports wait for the device and leave it idle: the step that ends with
   one takes longer by what it costs.

Under `ulysses_ddp` a step has a handful of marks; under `ulysses_fsdp2` there are six for every transformer block, as
many as any strategy sets. The model has 4 of Wan-1.3B's 30 blocks, so that there are many steps; marks and work of a
block keep their ratio. What is the same for every step, such as a report, weighs seven times as much as in the whole
model. Takes two minutes a strategy on an H200.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from scipy.stats import bootstrap
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.callbacks.host_time import HostTime
from benchmarks.launch import say
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow
from lightning_videoscale.callbacks import BottleneckAnalyzer, LoadBalanceMonitor
from lightning_videoscale.data.planning.micro_batch import BatchMeta
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.timing import StepTimer, marks_on

LAYERS = 4
LATENT = (60, 104)  # 480 x 832 pixels: 1560 tokens to a frame
NEXT_TO_NOTHING = (1, 8, 8)
STRATEGIES = {"ulysses_ddp": SequenceParallelDDPStrategy, "ulysses_fsdp2": SequenceParallelFSDP2Strategy}
WARM_UP = 4
LAUNCHES = 12
SETTLING = 1
"""Steps of a block that do not count: the clock comes or goes, and makes the events that it uses again and again."""

STEPS_BETWEEN_REPORTS = 5
DEFAULT_INTERVAL = 50
"""Steps between reports that users have: Lightning's ``log_every_n_steps``."""

Part = Literal["launch", "train", "report"]
Row = dict[str, Any]


class Step(NamedTuple):
    """What a step is for.

    Attributes:
        part: Of the benchmark.
        block: Number of its block in the part; -1 while it warms up.
        is_watched: Whether the clock is on.
    """

    part: Part
    block: int
    is_watched: bool


def schedule(pairs: int, steps: int, reports: int) -> list[Step]:
    """The steps of a training in their order. Blocks 2n and 2n + 1 are a pair."""
    draw, found = random.Random(0), [Step("launch", -1, False)] * WARM_UP + [Step("launch", 0, False)] * LAUNCHES
    found += [Step("train", -1, False)] * WARM_UP
    for pair in range(pairs):
        first = draw.random() < 0.5
        for block, is_watched in ((2 * pair, first), (2 * pair + 1, not first)):
            found += [Step("train", block, is_watched)] * steps
    for block in range(reports):
        found += [Step("report", block, False)] * STEPS_BETWEEN_REPORTS
    return found


class Clips(Dataset[dict[str, Any]]):
    """Clips with the ``meta`` that the callbacks read, in pinned memory: a copy from other memory stops the host."""

    def __init__(self, steps: list[Step], shape: tuple[int, int, int]) -> None:
        self.steps = steps
        self.short, self.long = _clip(NEXT_TO_NOTHING), _clip(shape)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.short if self.steps[index].part == "launch" else self.long)


def _clip(shape: tuple[int, int, int]) -> dict[str, Any]:
    latents, tokens = torch.randn(1, 16, *shape), shape[0] * shape[1] * shape[2] // 4
    return {
        "latents": latents.pin_memory() if torch.cuda.is_available() else latents,
        "meta": BatchMeta(*shape, tokens, samples=1, predicted_cost=1.0, loss_weight=1.0),
    }


class TakingTurns(pl.Callback):
    """Switches clock and monitors on and off by a schedule, and takes every step's time without stopping anything.

    Attributes:
        seconds: Of every step, once the training has ended.
        in_clock: Seconds that the host spent in the clock in every step.
    """

    def __init__(self, steps: list[Step], monitors: list[pl.Callback], host: HostTime) -> None:
        self.steps = steps
        self.monitors = monitors
        self.seconds: list[float] = []
        self.in_clock: list[float] = []
        self._host = host
        self._timer: StepTimer | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._marks = marks_on(trainer.strategy.root_device)
        self._ends = [self._marks.set()]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ends.append(self._marks.set())
        self.in_clock.append(self._host.take())
        if batch_idx + 1 < len(self.steps):
            self._prepare(trainer, pl_module, self.steps[batch_idx], self.steps[batch_idx + 1])

    def _prepare(self, trainer: pl.Trainer, pl_module: pl.LightningModule, now: Step, following: Step) -> None:
        if self._timer is not None and not following.is_watched:
            self._timer.close()
            self._timer = None
        elif self._timer is None and following.is_watched:
            self._timer = StepTimer(trainer)
        if following.part == "report" != now.part:
            for monitor in self.monitors:
                monitor.on_train_start(trainer, pl_module)
        if following.part != now.part:
            say(f"  {following.part}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for monitor in self.monitors:
            monitor.on_train_end(trainer, pl_module)
        self._marks.wait_for(self._ends[-1])
        self.seconds = [self._marks.seconds(*pair) for pair in zip(self._ends, self._ends[1:], strict=False)]


def pairs_of(steps: list[Step], seconds: list[float]) -> list[tuple[float, float]]:
    """Mean seconds of a step without and with the clock, pair by pair."""
    blocks: dict[int, list[float]] = {}
    is_watched: dict[int, bool] = {}
    for step, taken in zip(steps, seconds, strict=True):
        if step.part == "train" and step.block >= 0:
            blocks.setdefault(step.block, []).append(taken)
            is_watched[step.block] = step.is_watched
    means = {block: statistics.fmean(taken[SETTLING:]) for block, taken in blocks.items()}
    return [
        (means[block + is_watched[block]], means[block + (not is_watched[block])]) for block in range(0, len(means), 2)
    ]


def cost_of_a_report(steps: list[Step], seconds: list[float]) -> list[float]:
    """Seconds that a step with a report takes longer than the others of its window, report by report."""
    windows: dict[int, list[float]] = {}
    for step, taken in zip(steps, seconds, strict=True):
        if step.part == "report":
            windows.setdefault(step.block, []).append(taken)
    return [taken[-1] - statistics.median(taken[:-1]) for taken in windows.values()]


def median_of(values: list[float]) -> tuple[float, list[float]]:
    """The median and its 95 % interval."""
    found = bootstrap((values,), np.median, method="percentile", rng=np.random.default_rng(0)).confidence_interval
    return statistics.median(values), [float(found.low), float(found.high)]


def model_of(tiny: bool) -> dict[str, int]:
    """The transformer's configuration."""
    return (TINY_WAN if tiny else WAN_1_3B) | {"num_layers": LAYERS}


def measure(strategy: str, steps: list[Step], frames: int, tiny: bool, folder: str) -> Row:
    """Trains under a strategy and returns what watching costs."""
    shape = (1, 16, 16) if tiny else (frames, *LATENT)
    monitors = [LoadBalanceMonitor(STEPS_BETWEEN_REPORTS), BottleneckAnalyzer(STEPS_BETWEEN_REPORTS)]
    with HostTime() as host:
        turns = TakingTurns(steps, monitors, host)
        train(strategy, turns, shape, tiny, folder)
    return {
        "strategy": strategy,
        "tokens": shape[0] * shape[1] * shape[2] // 4,
        **figures(steps, turns.seconds, turns.in_clock),
    }


def train(strategy: str, turns: TakingTurns, shape: tuple[int, int, int], tiny: bool, folder: str) -> None:
    """All steps of a schedule."""
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](ulysses_size=1, activation_checkpointing=True, graphs=False),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=len(turns.steps),
        use_distributed_sampler=False,  # which would shuffle them
        callbacks=[turns],
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = RectifiedFlow(model_of(tiny))
    trainer.fit(module, DataLoader(Clips(turns.steps, shape), batch_size=None))


def figures(steps: list[Step], seconds: list[float], in_clock: list[float]) -> Row:
    """What the steps' times say."""
    pairs = pairs_of(steps, seconds)
    ratios = [on / off - 1 for off, on in pairs]
    step = statistics.median(off for off, _ in pairs)
    launch = statistics.median(t for s, t in zip(steps, seconds, strict=True) if s.part == "launch" and s.block >= 0)
    host = [t for s, t in zip(steps, in_clock, strict=True) if s.part == "train" and s.is_watched]
    clock, clock_95 = median_of(ratios)
    report, report_95 = median_of(cost_of_a_report(steps, seconds))
    share = report / (DEFAULT_INTERVAL * step)
    return {
        "launch_ms": _rounded(1e3, launch),
        "step_ms": _rounded(1e3, step),
        "host_in_clock_ms": _rounded(1e3, statistics.fmean(host)),
        "host_in_clock_percent": _rounded(100, statistics.fmean(host) / step),
        "clock_percent": _rounded(100, clock),
        "clock_percent_95": _rounded(100, *clock_95),
        "report_ms": _rounded(1e3, report),
        "report_ms_95": _rounded(1e3, *report_95),
        "report_percent_of_default_interval": _rounded(100, share),
        "at_most_percent": _rounded(100, statistics.fmean(host) / step + share),
        "clock_percent_of_pairs": _rounded(100, *ratios),
    }


def _rounded(factor: float, *values: float) -> Any:
    rounded = [round(factor * value, 3) for value in values]
    return rounded if len(rounded) > 1 else rounded[0]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--frames", type=int, default=21, help="latent frames of a clip, 1560 tokens each")
    parser.add_argument("--pairs", type=int, default=24, help="of blocks of steps")
    parser.add_argument("--steps", type=int, default=4, help=f"of a block, of which {SETTLING} does not count")
    parser.add_argument("--reports", type=int, default=8)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, on a CPU too: tries the script")
    options = parser.parse_args()
    commit = "not measured" if options.tiny else options.commit or provenance.commit()
    output = options.output or provenance.path("callbacks", "clock_overhead")
    steps = schedule(options.pairs, options.steps, options.reports)
    settings = {
        "dry_run": options.tiny,
        "model": model_of(options.tiny),
        "precision": "bf16-mixed",
        "activation_checkpointing": True,
        "steps_of_a_block": options.steps,
        "steps_between_reports": STEPS_BETWEEN_REPORTS,
        "default_interval": DEFAULT_INTERVAL,
    }
    rows = []
    with TemporaryDirectory() as folder:
        for strategy in options.strategies:
            say(strategy)
            row = measure(strategy, steps, options.frames, options.tiny, folder)
            rows.append(row)
            provenance.write(output, "callbacks/clock_overhead", commit, settings, rows)
            show(row)
    print(f"written to {output}")


def show(row: Row) -> None:
    low, high = row["clock_percent_95"]
    say(
        f"{row['strategy']}, {row['tokens']} tokens: {row['step_ms']} ms a step, launched in {row['launch_ms']}; in "
        f"the clock {row['host_in_clock_ms']} ms, {row['host_in_clock_percent']} %; steps with it "
        f"{row['clock_percent']:+.3f} % ({low:+.3f} to {high:+.3f}); a report {row['report_ms']} ms, every "
        f"{DEFAULT_INTERVAL} steps {row['report_percent_of_default_interval']:+.3f} %; clock and reports at most "
        f"{row['at_most_percent']:+.3f} %"
    )


if __name__ == "__main__":
    main()
