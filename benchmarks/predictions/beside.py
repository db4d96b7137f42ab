"""What was measured beside what was predicted before, as tables for the documentation.

    python benchmarks/predictions/beside.py benchmarks/results/*/*-h200x8.json
    python benchmarks/predictions/beside.py benchmarks/results/*/*-h200x2.json --output /tmp/beside.md

Reads result files of any number of GPUs: whole steps (strong_scaling), attention layers (layouts) and balances; of
others it prints what was measured. Predictions are those of benchmarks/results/predictions/scaling-h200.json. Of
steps that are not in it, such as those on two GPUs or with activation checkpointing, its constants predict by the same
formulas, and it says of how many. An error is predicted over measured, less one; beyond 10 % it is bold.

Nothing is predicted of other transports and schedules, nor of compiled steps: they are in the table of measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.predictions.finetuning import AGAIN
from benchmarks.predictions.steps import WAN_1_3B, WAN_14B_8, Rest, StepTime, Work, step
from benchmarks.tables import COLUMNS, table
from lightning_videoscale.parallel.layout import MACHINES, Layout

Result = dict[str, Any]
Row = dict[str, Any]
MODELS = {"wan-1.3b": WAN_1_3B, "wan-14b-8": WAN_14B_8}
OFF = 0.1
MIX = {"longest": 75_600, "m_mem_over_longest": 2, "strategy": "ulysses_ddp", "ulysses_size": 1}  # of what is simulated
M_COMP = (1, None)  # likewise, over the longest sample; equal_token has none


class Case(NamedTuple):
    """One cell.

    Attributes:
        figure: What is compared, the title of a table.
        cell: What ran.
        predicted: The number before.
        measured: And after.
        is_published: Whether the prediction is in a file, not computed now by its formulas.
    """

    figure: str
    cell: str
    predicted: float
    measured: float
    is_published: bool = True

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1


class Pick(NamedTuple):
    """A layout that was chosen.

    Attributes:
        cell: What ran.
        picked: The layout.
        best: The one that was measured to be the fastest.
        over_best: How many times as long the picked one takes.
    """

    cell: str
    picked: str
    best: str
    over_best: float


class Steps:
    """Predicted steps.

    Args:
        prediction: The file of ``predictions/scaling``.
        is_checkpointed: Whether the forward pass is computed twice.
    """

    def __init__(self, prediction: Result, is_checkpointed: bool) -> None:
        settings = prediction["settings"]
        self._machine = replace(MACHINES["h200"], **settings["constants"])
        self._rest = Rest(**settings["rest"])
        self._work = AGAIN if is_checkpointed else Work()
        self._published = {
            tuple(row[name] for name in ("model", "tokens", "gpus", "ulysses", "ring")): row
            for row in ([] if is_checkpointed else prediction["rows"])
            if row["kind"] == "strong scaling"
        }

    def of(self, row: Row, layout: Layout) -> tuple[StepTime, bool]:
        """The seconds of a measured row's step under a layout, and whether the file has them."""
        model = MODELS[row.get("model", "wan-1.3b")]
        key = (model.name, row["tokens"], row["gpus"], layout.ulysses, layout.ring)
        if (found := self._published.get(key)) is not None:
            return StepTime(found["device_ms"] / 1e3, found["host_ms"] / 1e3), True
        time = step(model, row["tokens"], layout, self._machine, self._rest, row["gpus"], self._work)
        return time, False


def steps(result: Result, prediction: Result) -> Iterator[Case]:
    """Whole training steps, and the throughput of a GPU over that of one with a clip of its own."""
    predicted = Steps(prediction, result["settings"].get("checkpointing", False))
    for row in result["rows"]:
        if not _is_predicted(row):
            continue
        layout = Layout(row.get("ulysses", row["sp"]), row.get("ring", 1))
        (time, is_published), (alone, _) = predicted.of(row, layout), predicted.of(row, Layout(1, 1))
        seconds, whole = (t.device if row["mode"] == "graphs" else t.eager for t in (time, alone))
        cell = f"{_cell(row)}, {_division(row, layout)}"
        yield Case("A step, ms", cell, 1e3 * seconds, row["step_ms"], is_published)
        if row["sp"] > 1 and "per_gpu_over_whole_clips" in row:
            ratio = whole / seconds / row["sp"]
            measured = row["per_gpu_over_whole_clips"]
            yield Case("A GPU over one with a clip of its own", cell, ratio, measured, is_published)


def layers(result: Result, prediction: Result) -> Iterator[Case]:
    """Attention layers; the file itself has what was predicted."""
    for row in result["rows"]:
        cell = f"{row['heads']} heads, {row['tokens']} tokens, {row['ulysses_size']} x {row['ring_size']}"
        yield Case("An attention layer, ms", cell, row["predicted_ms"], row["median_ms"])


def balances(result: Result, prediction: Result) -> Iterator[Case]:
    """Balances.

    Raises:
        ValueError: If they had other lengths or budgets than those that were simulated.
    """
    settings = result["settings"]
    if {name: settings.get(name, value) for name, value in MIX.items()} != MIX:
        raise ValueError(f"only a mix of {MIX} was simulated")
    simulated = {
        (row["ranks"], row["balance"], row["micro_batches"]): row
        for row in prediction["rows"]
        if row["kind"] == "balance"
    }
    for row in result["rows"]:
        if row.get("m_comp_over_longest", 1) not in M_COMP:
            continue
        cell = f"{row['balance']}, K = {row['micro_batches']}"
        if (found := simulated.get((settings["ranks"], row["balance"], row["micro_batches"]))) is None:
            raise ValueError(f"balances on {settings['ranks']} ranks were not simulated")
        yield Case("Mean / max of the ranks", cell, found["efficiency"], row["share_of_measured_compute"])
        yield Case("CV_step, mean", cell, found["cv_step"], row["cv_step_mean"])


def picks(result: Result) -> Iterator[Pick]:
    """The layouts that were chosen, beside the fastest of as many ranks."""
    for row in result["rows"]:
        if row.get("layout") == "auto" and "step_ms" in row:
            rivals = [r for r in result["rows"] if "step_ms" in r and r["sp"] == row["sp"] and _cell(r) == _cell(row)]
            best = min(rivals, key=lambda r: float(r["step_ms"]))
            picked, fastest = (f"{r['ulysses']} x {r['ring']}" for r in (row, best))
            yield Pick(_cell(row), picked, fastest, row["step_ms"] / best["step_ms"])
        elif row.get("chosen"):
            here = ("heads", "tokens")
            best = min(
                (r for r in result["rows"] if all(r[name] == row[name] for name in here)),
                key=lambda r: float(r["median_ms"]),
            )
            picked, fastest = (f"{r['ulysses_size']} x {r['ring_size']}" for r in (row, best))
            yield Pick(f"{row['heads']} heads, {row['tokens']} tokens", picked, fastest, row["over_best"])


def nothing(result: Result, prediction: Result) -> Iterator[Case]:
    """What was predicted of other benchmarks."""
    return iter(())


PREDICTED = {"parallel/strong_scaling": steps, "parallel/layouts": layers, "data/balances": balances}


def page(result: Result, prediction: Result) -> Iterator[str]:
    """The lines of one result file."""
    machine = result["machine"]
    name = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else "CPUs"
    dry = ", a dry run: nothing to publish" if result["settings"].get("dry_run") else ""
    yield f"## {result['benchmark']}: {name}, torch {machine['torch']}, commit {result['commit'][:8]}{dry}\n"
    for what in ("refused", "unfinished"):
        if count := sum(what in row for row in result["rows"]):
            yield f"{count} cells were {what}.\n"
    yield from table(result)
    try:
        cases = list(PREDICTED.get(result["benchmark"], nothing)(result, prediction))
    except ValueError as error:
        yield f"Nothing was predicted: {error}.\n"
        return
    for figure in dict.fromkeys(case.figure for case in cases):
        mine = [case for case in cases if case.figure == figure]
        yield f"| {figure} | predicted | measured | error |\n|---|---|---|---|"
        for case in mine:
            bold = "**" if abs(case.error) > OFF else ""
            yield f"| {case.cell} | {case.predicted:.4g} | {case.measured:.4g} | {bold}{case.error:+.1%}{bold} |"
        worst = max(mine, key=lambda case: abs(case.error))
        off = sum(abs(case.error) > OFF for case in mine)
        computed = sum(not case.is_published for case in mine)
        yield f"\n{off} of {len(mine)} are off by more than {OFF:.0%}; the worst is {worst.cell}: {worst.error:+.1%}."
        yield f"{computed} are in no file of predictions, but computed by its formulas.\n" if computed else ""
    if chosen := list(picks(result)):
        yield "| cell | `auto` picks | the fastest | time over its |\n|---|---|---|---|"
        yield from (f"| {pick.cell} | {pick.picked} | {pick.best} | {pick.over_best:.3f} |" for pick in chosen)
        yield ""


def _is_predicted(row: Row) -> bool:
    usual = {"transport": "collective", "schedule": "serial"}
    return (
        "step_ms" in row
        and row["mode"] in ("eager", "graphs")
        and all(row.get(name, value) == value for name, value in usual.items())
    )


def _cell(row: Row) -> str:
    """What is trained how, but for the layout."""
    names = ("model", "strategy", "transport", "schedule", "mode")
    shown = [row[name] for name in names if name in row and row[name] not in ("collective", "serial")]
    return f"{', '.join(shown)}, {row['tokens']} tokens"


def _division(row: Row, layout: Layout) -> str:
    dp = row["gpus"] // row["sp"]
    auto = " (auto)" if row.get("layout") == "auto" else ""
    return f"{f'dp {dp} x ' if dp > 1 else ''}{layout.ulysses} x {layout.ring}{auto}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files")
    parser.add_argument("--predictions", type=Path, default=provenance.RESULTS / "predictions/scaling-h200.json")
    parser.add_argument("--output", type=Path, help="markdown to write; left out, it is printed")
    options = parser.parse_args()
    prediction = json.loads(options.predictions.read_text())
    lines = [f"Predicted for {prediction['settings']['of']}, commit {prediction['commit'][:8]}.\n"]
    for file in options.results:
        result = json.loads(file.read_text())
        if result.get("benchmark") in {*COLUMNS, *PREDICTED}:
            lines += page(result, prediction)
        else:
            lines.append(f"{file.name} is no table of a node.\n")
    text = "\n".join(lines)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
