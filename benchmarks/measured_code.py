"""Whether the code that a result file measured is still the code that is there.

    python benchmarks/measured_code.py    # marks the links to older results in README.md and docs/

A result file holds a fingerprint of the parts of the package that its benchmark measures. Comments, docstrings,
annotations and the layout of Python code do not count. A test fails where a page's marks are not what this says.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "†"

_KERNELS = ("csrc", "lightning_videoscale/kernels")
_FUSED = (*_KERNELS, "lightning_videoscale/injection", "lightning_videoscale/models/wan")
_FAMILIES = (*_KERNELS, "lightning_videoscale/injection", "lightning_videoscale/models")
_PARALLEL = "lightning_videoscale/parallel"
_EXCHANGE = tuple(f"{_PARALLEL}/{name}" for name in ("attention.py", "ring.py", "ulysses.py", "transport"))
_SPLIT = tuple(f"{_PARALLEL}/{name}" for name in ("sharding.py", "split_hooks.py", "region_randomness.py"))
_DIVIDING = (f"{_PARALLEL}/layout", f"{_PARALLEL}/schedules")
_PLANNING = ("lightning_videoscale/cost", "lightning_videoscale/data/planning")

MEASURES: dict[str, tuple[str, ...]] = {
    "callbacks/clock_overhead": ("lightning_videoscale/timing",),
    "callbacks/recalibration": _PLANNING,
    "callbacks/recalibration_on_gpus": (*_PLANNING, "callbacks/budget_recalibrator.py", "lightning_videoscale/timing"),
    "cost/longest": ("lightning_videoscale/cost", *_FUSED, *_EXCHANGE, *_SPLIT, "lightning_videoscale/strategies"),
    "cost/step_time_fit": ("lightning_videoscale/cost",),
    "cost/time_budget": ("lightning_videoscale/cost",),
    "data/balances": _PLANNING,
    "data/compute_budgets": _PLANNING,
    "data/decode": tuple(f"lightning_videoscale/data/shards/{n}.py" for n in ("decoding", "film", "frames", "media")),
    "data/index_scale": tuple(f"lightning_videoscale/data/shards/{n}.py" for n in ("columns", "index", "index_table")),
    "data/learning": (*_PLANNING, *_FUSED, *_EXCHANGE, *_SPLIT, "examples/rectified_flow.py"),
    "data/loader": ("lightning_videoscale/data/loading", "lightning_videoscale/data/shards"),
    "data/plan": ("lightning_videoscale/data/planning",),
    "data/read_once": ("lightning_videoscale/data/loading", "lightning_videoscale/strategies/batches"),
    "kernels/family_step": _FAMILIES,
    "data/windows": ("lightning_videoscale/data/planning",),
    "node": ("lightning_videoscale",),
    "finetuning": ("examples/finetune_wan.py", "examples/configs", *_FUSED),
    "kernels/loss_overlay": (*_FUSED, "lightning_videoscale/models/hunyuan_video"),
    "kernels/row_ops": _KERNELS,
    "kernels/wan_step": _FUSED,
    "paired": _FUSED,
    "parallel/activation_memory": (*_EXCHANGE, *_SPLIT, "lightning_videoscale/models/wan"),
    "parallel/agreement": (f"{_PARALLEL}/rank_agreement.py",),
    "parallel/all_to_all": (f"{_PARALLEL}/transport",),
    "parallel/packing": (f"{_PARALLEL}/ulysses.py", f"{_PARALLEL}/words.py"),
    "parallel/attention_backends": ("lightning_videoscale/attention",),
    "parallel/attention_layer": (*_EXCHANGE, "lightning_videoscale/attention"),
    "parallel/family_split": (
        *_EXCHANGE,
        *_SPLIT,
        *_FAMILIES,
        "lightning_videoscale/attention",
        f"{_PARALLEL}/schedules",
    ),
    "parallel/captured_reductions": (*_EXCHANGE, *_SPLIT, *_FUSED, "lightning_videoscale/graphs"),
    "parallel/graphs_on_mix": (*_EXCHANGE, *_SPLIT, *_FUSED, "lightning_videoscale/graphs"),
    "parallel/host_time": (_PARALLEL, *_FUSED, "lightning_videoscale/models/hunyuan_video"),
    "parallel/layouts": (*_EXCHANGE, "lightning_videoscale/attention", f"{_PARALLEL}/layout"),
    "parallel/loss_overlay": (*_EXCHANGE, *_SPLIT, "lightning_videoscale/models/wan"),
    "parallel/schedules": (*_EXCHANGE, "lightning_videoscale/attention", f"{_PARALLEL}/schedules"),
    "parallel/strong_scaling": (*_EXCHANGE, *_SPLIT, *_FUSED, *_DIVIDING, "lightning_videoscale/graphs"),
    "predictions/finetuning": (f"{_PARALLEL}/layout",),
    "predictions/replayed_balances": _PLANNING,
    "predictions/scaling": (*_PLANNING, f"{_PARALLEL}/layout"),
    "strategies/allocator": _FUSED,
    "strategies/background_checkpoints": ("lightning_videoscale/strategies/checkpoints",),
    "strategies/gradient_exchange": _FUSED,
    "strategies/recomputed_share": (*_FUSED, "lightning_videoscale/strategies/blocks.py"),
    "strategies/garbage_collection": ("lightning_videoscale/garbage.py", "lightning_videoscale/strategies/garbage.py"),
    "suite": (*_FUSED, *_PLANNING, "lightning_videoscale/attention"),
}
"""By benchmark, the files and folders of the repository whose speed, memory or results it shows."""


def fingerprint(benchmark: str, root: Path = ROOT) -> str:
    """Returns what tells whether the code that a benchmark measures is still the same.

    Raises:
        ValueError: If it is not listed what the benchmark measures.
    """
    if benchmark not in MEASURES:
        raise ValueError(f"benchmarks/measured_code.py does not list what {benchmark!r} measures: add it to MEASURES.")
    digest = hashlib.sha256()
    for file in sorted(_files(MEASURES[benchmark], root)):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + _content(file) + b"\0")
    return digest.hexdigest()


def is_older(result: Path) -> bool:
    """Returns whether the code that a result file measured has changed since."""
    found = json.loads(result.read_text())
    return bool(found.get("code") != fingerprint(found["benchmark"]))


def marked(text: str) -> str:
    """Returns a page whose links to result files of older code say so, and no others."""

    def link(match: re.Match[str]) -> str:
        label, target, name = match.groups()
        return f"[{label.removesuffix(MARK)}{MARK if is_older(RESULTS / name) else ''}]({target})"

    return re.sub(r"\[([^\]]*)\]\(((?:\.\./)?benchmarks/results/([^)]*\.json))\)", link, text)


def pages() -> list[Path]:
    """The pages that quote results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _files(paths: Iterable[str], root: Path) -> Iterable[Path]:
    for path in paths:
        found = root / path
        if found.is_dir():
            yield from (f for f in found.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        elif found.exists():
            yield found


def _content(file: Path) -> bytes:
    return _bare(file.read_text()) if file.suffix == ".py" else file.read_bytes()


@cache  # most files are measured by several benchmarks
def _bare(code: str) -> bytes:
    return _text(_Bare().visit(ast.parse(code))).encode()


def _text(node: object) -> str:
    """The tree as `ast.dump` has it, but the same for every version of Python: without fields that are empty."""
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields)})"


class _Bare(ast.NodeTransformer):
    """Takes away docstrings and annotations."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not _is_text(statement)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None and not isinstance(node, ast.AnnAssign):
                setattr(node, name, None)
        return node


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def main() -> None:
    for page in pages():
        before = page.read_text()
        if (after := marked(before)) != before:
            page.write_text(after)
            print(f"marked anew: {page.relative_to(ROOT)}")
    older = [result.relative_to(RESULTS).as_posix() for result in sorted(RESULTS.rglob("*.json")) if is_older(result)]
    print(f"of older code: {', '.join(older) or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
