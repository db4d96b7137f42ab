"""`videoscale benchmark-shapes`: what training steps of the shapes in some data take, before anything is trained."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.table import Table

from lightning_videoscale.cost import MemoryModel, ShapeMatrix, StepTimeModel
from lightning_videoscale.data import VideoDataModule, benchmark_shapes

_GIB = 2**30


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        trainer, module, data = _from_config(options)
        output = options.output if options.output is not None else data.matrix_file
        matrix = benchmark_shapes(
            trainer,
            module,
            data,
            max_shapes=options.max_shapes,
            max_tokens=options.max_tokens,
            seconds=options.seconds,
            file=output,
        )
        if trainer.is_global_zero:
            _report(matrix, output, options.json)
    except (ValueError, OSError, ImportError, AttributeError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    return 0


def _from_config(options: argparse.Namespace) -> tuple[Any, Any, VideoDataModule]:
    """The Trainer, the module and the data that the config describes."""
    # As `python script.py` does: a console script does not see the working directory, which jsonargparse leaves for
    # the folder of the config that it reads.
    sys.path.insert(0, os.getcwd())
    try:
        config: Any = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{options.config} is no YAML: {error}") from error
    if not isinstance(config, dict) or "data" not in config:
        raise ValueError(f"{options.config} is no config of LightningCLI with trainer:, model: and data:.")
    named = {part: "class_path" in (config.get(part) or {}) for part in ("model", "data")}
    if not named["model"] and options.model is None:
        raise ValueError(f"{options.config} has no class_path of its model: name it with --model package.Class.")
    data_class = _class(options.data) if options.data else VideoDataModule
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        cli = LightningCLI(
            None if named["model"] else _class(options.model),
            data_class,
            subclass_mode_model=named["model"],
            subclass_mode_data=named["data"],
            save_config_callback=None,
            run=False,
            args=["--config", str(options.config), *options.overrides],
        )
    if not isinstance(cli.datamodule, VideoDataModule):
        raise ValueError(
            f"{type(cli.datamodule).__name__} is no VideoDataModule, whose shapes are known: call benchmark_shapes "
            "with your shapes instead."
        )
    return cli.trainer, cli.model, cli.datamodule


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{path!r} is no package.Class.")
    return getattr(importlib.import_module(module), name)


def _report(matrix: ShapeMatrix, output: Path, as_json: bool) -> None:
    report: dict[str, Any] = {"matrix": str(output), "provenance": dict(matrix.provenance), **_fits(matrix)}
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    console = Console(soft_wrap=True, highlight=False)
    table = Table("shape", "S", "B", "seconds", "spread", "wait", "tokens/s", "peak GiB")
    for row in matrix.rows:
        shape = [f"{row.frames}x{row.height}x{row.width}", str(row.sequence_length), str(row.samples)]
        if row.seconds is None or row.spread is None or row.wait_seconds is None:
            table.add_row(*shape, row.outcome.replace("_", " "))
            continue
        speed = f"{row.samples * row.sequence_length / row.seconds:.0f}"
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / _GIB:.2f}"
        table.add_row(*shape, f"{row.seconds:.4f}", f"{row.spread:.1%}", f"{row.wait_seconds:.4f}", speed, peak)
    console.print(table)
    for name in ("step_time", "memory"):
        console.print(f"{name.replace('_', ' ')}: {report[name]}", markup=False)
    console.print(f"-> {output}", markup=False)


def _fits(matrix: ShapeMatrix) -> dict[str, Any]:
    """What the models make of the matrix, or why they do not."""
    found: dict[str, Any] = {}
    for name, model in (("step_time", StepTimeModel), ("memory", MemoryModel)):
        try:
            fit: Any = model.fit(matrix.measurements)
        except ValueError as error:
            found[name] = str(error)
            continue
        found[name] = fit.to_dict() if isinstance(fit, StepTimeModel) else vars(fit)
    return found
