"""Trains on the same clips in three ways, one after the other, and compares them: `python demo.py --config demo.yaml`.

1. `equal_token`: two processes, each with batches of its own, of about equally many tokens.
2. `planned`: the same, but the planner gives both processes batches that take equally long.
3. `split`: both processes share every sequence (Ulysses), so that there is nothing to balance.

Each takes up the weights of the one before. In the end there are three reports, a picture of a clip that the model made
of noise, and a table. Arguments after the config are those of `train.py fit`, for all three.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.cli import LightningCLI
from rectified_flow import RectifiedFlow
from rich.console import Console
from rich.table import Table
from sample_figure import SampleFigure

import lightning_videoscale as vs
from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.report.charts import percent
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run

STAGES = {
    "equal_token": {"ulysses_size": 1, "balance": "equal_token", "share": 1},
    "planned": {"ulysses_size": 1, "balance": "planned", "share": 1},
    "split": {"ulysses_size": 2, "balance": "planned", "share": 3},
}
"""By name: how many ranks share a sequence, how batches are made, and how many times the config's epochs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="one of configs/demo*.yaml")
    args, others = parser.parse_known_args()
    weights, runs = None, {}
    for name in STAGES:
        weights, runs[name] = fit(name, args.config, others, weights)
    if runs["split"].is_global_zero:
        compare(runs)


def fit(name: str, config: Path, others: list[str], weights: dict | None) -> tuple[dict, pl.Trainer]:
    """Trains one stage, and returns the weights that it ends with."""
    stage = STAGES[name]
    options = [
        "--trainer.strategy=lightning_videoscale.SequenceParallelDDPStrategy",
        f"--trainer.strategy.ulysses_size={stage['ulysses_size']}",
        f"--data.balance={stage['balance']}",
        f"--trainer.logger.init_args.sub_dir={name}",
    ]
    cli = LightningCLI(RectifiedFlow, vs.VideoDataModule, args=["--config", str(config), *options, *others], run=False)
    cli.trainer.fit_loop.max_epochs *= stage["share"]
    if cli.trainer.is_global_zero:
        print(f"\n== {name}: {cli.trainer.max_epochs} epochs at most ==", flush=True)
    cli.model.configure_model()
    if weights is not None:
        cli.model.load_state_dict(weights)
    cli.trainer.fit(cli.model, cli.datamodule)
    return {key: value.detach().cpu().clone() for key, value in cli.model.state_dict().items()}, cli.trainer


def compare(runs: dict[str, pl.Trainer]) -> None:
    console, table = Console(), Table(title="The same clips on two processes of this machine, measured")
    for column in ("", "tokens/s", "CV_step", "waiting", "exchange", "loss"):
        table.add_column(column, justify="right" if column else "left")
    reports = {name: one_of(run, RunReport).path for name, run in runs.items()}
    for name, report in reports.items():
        table.add_row(name, *figures(Findings(read_run(report.parent))))
    console.print(table)
    console.print(
        "tokens/s: trained by both processes together. CV_step: (max - min) / max of their work in a step, median. "
        "waiting: share of the time that they wait for the slower one. exchange: share that they exchange slices of "
        "sequences. -: not defined, as both work on the same sequences. loss: mean of the last steps.\n"
        "Processes that share a processor with each other and with other programs are no benchmark."
    )
    for name, report in reports.items():
        console.print(f"report of {name}: {report}", soft_wrap=True)
    console.print(f"picture: {one_of(runs['split'], SampleFigure).path}", soft_wrap=True)


def one_of(run: pl.Trainer, kind: type) -> Any:
    """The callback of a class, which the config names."""
    return next(callback for callback in run.callbacks if isinstance(callback, kind))


def figures(found: Findings) -> list[str]:
    """The row of a run."""
    tokens, alone = found.total("tokens"), found.data_parallel_ranks > 1
    losses = [window["loss"] for window in found.windows if window["loss"] is not None]
    return [
        f"{tokens / found.seconds:,.0f}" if tokens and found.seconds else "-",
        percent(float(np.median(found.per_step("cv_step")))) if alone else "-",
        percent(found.idle) if alone else "-",
        "-" if alone else percent(found.share_of("exchange")),
        f"{losses[-1]:.3f}" if losses else "-",
    ]


if __name__ == "__main__":
    main()
