"""Predicts training on 8 to 1 024 GPUs, and holds the same formulas to what was measured on 2 and 4.

    python benchmarks/predictions/scaling.py clips.csv    # columns source, width, height, fps, num_frames

Nothing here is measured. It takes speeds from `MACHINES`, from files in benchmarks/results, and from the planner's
simulation; `steps`, `exchange` and `balance` beside this have the formulas. Assumed are 45 GB/s of each GPU to other
nodes, of the 50 GB/s that an adapter of 400 Gbit/s has, and NVLink between the 8 GPUs of a node as fast as between 4.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.predictions.balance import simulate, table_of
from benchmarks.predictions.exchange import GPUS, exchange
from benchmarks.predictions.steps import WAN_1_3B, WAN_14B, WAN_14B_8, Rest, fit, step
from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.data.planning import Balance
from lightning_videoscale.data.planning.shapes import Clips
from lightning_videoscale.parallel.layout import MACHINES, Layer, Layout, Machine, choose_layout, predict

Row = dict[str, Any]
LENGTHS = (14_040, 32_760, 75_600, 151_200)
LAYOUTS = ((8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (8, 2, 1))  # ulysses, ring, data parallel
JOBS = (8, 16, 64, 256, 1024)
OF_EXCHANGE = 32_760
INPUTS = (
    "cost/step_time_fit-h200",
    "kernels/wan_step-h200",
    "parallel/attention_layer-h200x2",
    "parallel/attention_layer-h200x4",
    "parallel/layouts-h200x2",
    "parallel/strong_scaling-h200x2",
)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((provenance.RESULTS / f"{name}.json").read_text())
    return found


def rest_of_a_step(machine: Machine) -> Rest:
    """The constants of `Rest`, from a fused step and from whole training steps on one GPU."""
    fused = next(row for row in read("kernels/wan_step-h200")["rows"] if row["mode"] == "fused")
    rows = fused["other_ms"] / 1e3 / (fused["tokens"] * WAN_1_3B.layers * WAN_1_3B.width)
    steps = read("parallel/strong_scaling-h200x2")["rows"]
    alone = [(r["tokens"], r["step_ms"] / 1e3) for r in steps if r["sp"] == 1 and r["mode"] == "graphs"]
    return fit(WAN_1_3B, alone, machine, rows)


def strong_scaling(machine: Machine, rest: Rest) -> list[Row]:
    """A step on the 8 GPUs of a node, and of two with a ring between them, beside one GPU with a clip of its own."""
    rows = []
    for model in (WAN_1_3B, WAN_14B_8):
        for tokens in LENGTHS:
            alone = step(model, tokens, Layout(1, 1), machine, rest)
            choice = choose_layout(GPUS, model.heads, 128, machine, {tokens: 1}).layout
            for ulysses, ring, dp in LAYOUTS:
                layout = Layout(ulysses, ring)
                found = step(model, tokens, layout, machine, rest, GPUS)
                sp = ulysses * ring
                rows.append(
                    {
                        "kind": "strong scaling", "model": model.name, "tokens": tokens,
                        "gpus": sp * dp, "ulysses": ulysses, "ring": ring, "dp": dp,
                        "device_ms": round(1e3 * found.device, 1), "host_ms": round(1e3 * found.host, 1),
                        "per_gpu_over_one": round(alone.device / found.device / sp, 3),
                        "per_gpu_over_one_eager": round(alone.eager / found.eager / sp, 3),
                        "auto": layout == choice and dp == 1,
                    }
                )  # fmt: skip
    return rows


def balances(table: Path, step_time: StepTimeModel, samples: int) -> list[Row]:
    """The three balances on 8 to 1 024 data-parallel ranks."""
    clips = Clips.from_csv(table)
    few, many = table_of(clips, samples), table_of(clips, 5 * samples)
    return [
        {"kind": "balance", **simulate(many if ranks > 64 else few, step_time, ranks, micro_batches, balance)}
        for ranks in (8, 16, 64, 1024)
        for micro_batches in (1, 2, 4)
        for balance in get_args(Balance)
    ]


def jobs(machine: Machine, rest: Rest) -> list[Row]:
    """Gradients and parameters between nodes: a clip on each GPU (1.3B), or on each node by Ulysses 8 (14B)."""
    rows = []
    for model, ulysses in ((WAN_1_3B, 1), (WAN_14B, GPUS)):
        work = step(model, OF_EXCHANGE, Layout(ulysses, 1), machine, rest).device
        for gpus in JOBS:
            for name, seconds in exchange(model.parameters, model.layers, gpus // GPUS, machine)._asdict().items():
                rows.append(
                    {
                        "kind": "exchange", "model": model.name, "ulysses": ulysses, "tokens": OF_EXCHANGE,
                        "gpus": gpus, "strategy": name, "step_ms": round(1e3 * work, 1),
                        "exchange_ms": round(1e3 * seconds, 1),
                        "hidden": round(work / max(work, seconds), 3), "shown": round(work / (work + seconds), 3),
                    }
                )  # fmt: skip
    return rows


def checks(machine: Machine, rest: Rest) -> list[Row]:
    """The same formulas where there are measurements: the relative error of each prediction."""
    rows = []

    def add(of: str, case: str, predicted: float, measured: float, *, fitted: bool = False) -> None:
        error = round(predicted / measured - 1, 4)
        rows.append(
            {
                "kind": "check", "of": of, "case": case, "predicted": round(predicted, 4),
                "measured": round(measured, 4), "error": error, "fitted_to": fitted,
            }
        )  # fmt: skip

    for row in read("parallel/strong_scaling-h200x2")["rows"]:
        layout = Layout(row.get("ulysses", row["sp"]), row.get("ring", 1))
        found = step(WAN_1_3B, row["tokens"], layout, machine, rest)
        milliseconds = 1e3 * (found.device if row["mode"] == "graphs" else found.eager)
        case = f"{row['mode']}, {layout}, {row['tokens']} tokens, ms"
        add("step", case, milliseconds, row["step_ms"], fitted=row["sp"] == 1 and row["mode"] == "graphs")
    for name in ("parallel/attention_layer-h200x2", "parallel/attention_layer-h200x4", "parallel/layouts-h200x2"):
        for row in read(name)["rows"]:
            if row.get("variant", "ours, collective") == "ours, collective":
                layout = Layout(row["ulysses_size"], row["ring_size"])
                tokens = row.get("tokens") or row["tokens_per_rank"] * layout.ulysses * layout.ring
                layer = Layer(row["heads"], row["head_dim"], tokens, in_block=False)
                case = f"{row['heads']} heads, {tokens} tokens, {layout}, ms"
                milliseconds = 1e3 * predict(layer, layout, machine).total
                add(name, case, milliseconds, row["median_ms"], fitted="attention_layer" in name)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--samples", type=int, default=200_000, help="drawn for up to 64 ranks; five times for more")
    parser.add_argument("--output", type=Path, default=provenance.RESULTS / "predictions/scaling-h200.json")
    options = parser.parse_args()
    commit = provenance.commit()
    machine = MACHINES["h200"]
    rest = rest_of_a_step(machine)
    step_time = StepTimeModel.from_dict(_cost_of(read("cost/step_time_fit-h200")["settings"]))
    rows = [
        *strong_scaling(machine, rest),
        *balances(options.shapes, step_time, options.samples),
        *jobs(machine, rest),
        *checks(machine, rest),
    ]
    hashes = {name: hashlib.sha256((provenance.RESULTS / f"{name}.json").read_bytes()).hexdigest() for name in INPUTS}
    settings = {
        "kind": "prediction",
        "of": "NVIDIA H200, 8 in a node",
        "inputs": hashes,
        "table": provenance.table(options.shapes),
        "samples": options.samples,
        "constants": {name: getattr(machine, name) for name in ("matmul", "attention", "link", "network", "message")},
        "assumed": ["network", "link between 8 GPUs as between 4"],
        "rest": rest._asdict(),
    }
    provenance.write(options.output, "predictions/scaling", commit, settings, rows)
    for of in dict.fromkeys(row["of"] for row in rows if row["kind"] == "check"):
        errors = [row["error"] for row in rows if row["kind"] == "check" and row["of"] == of and not row["fitted_to"]]
        if errors:
            print(f"{of}: {len(errors)} cases not fitted to, median {statistics.median(map(abs, errors)):.1%}, worst ",
                  f"{max(errors, key=abs):+.1%}")  # fmt: skip


def _cost_of(settings: dict[str, Any]) -> dict[str, Any]:
    """As `StepTimeModel.from_dict` wants it."""
    errors = {f"{name}_error": settings[f"{name}_median_error"] for name in ("power_law", "additive")}
    return {name: settings[name] for name in ("power_law", "additive", "floor")} | errors


if __name__ == "__main__":
    main()
