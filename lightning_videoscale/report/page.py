"""Draws the report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_videoscale.report import data_sections, sections
from lightning_videoscale.report.charts import duration, number, percent, seconds
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import RunRecords, read_run

REPORT_NAME = "report.html"


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Draws the report of the run in a folder, from its log.

    Args:
        folder: Where `RunReport` wrote the log.
        output: The file to write, or a folder for ``report.html``; None: beside the log.

    Returns:
        The file. An older one is replaced whole, never left half written.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If the log holds no run, or one of a newer version.
    """
    run = read_run(folder)
    path = run.folder if output is None else Path(output)
    path = path / REPORT_NAME if path.is_dir() else path
    part = path.with_name(path.name + ".part")
    # Names of files that are not UTF-8 have lone surrogates, which no file can hold.
    part.write_text(render(run), encoding="utf-8", errors="backslashreplace")
    os.replace(part, path)
    return path


def render(run: RunRecords) -> str:
    """Returns the page."""
    environment = Environment(
        loader=PackageLoader("lightning_videoscale.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number, percent=percent, seconds=seconds, duration=duration, moment=moment, said=said
    )
    found = Findings(run)
    return environment.get_template("page.html").render(
        found=found,
        start=found.start,
        first=run.records[0],
        tiles=sections.tiles(found),
        loss=sections.loss(found),
        throughput=sections.throughput(found),
        balance=sections.balance(found),
        anatomy=sections.anatomy(found),
        loading=data_sections.loading(found),
        left_out=data_sections.left_out(found),
        buckets=sections.buckets(found),
        cost=sections.cost(found),
        memory=sections.memory(found),
        recalibration=sections.recalibration(found),
        bottlenecks=sections.bottlenecks(found),
        injections=sections.injection(found),
        setup=sections.setup(found),
        missing=sections.missing(found),
        notes=found.notes,
    )


def moment(seconds: float) -> str:
    """A time of day in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def said(value: Any) -> str:
    """A setting as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
