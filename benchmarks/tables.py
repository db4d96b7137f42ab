"""The rows of a node's result files as tables in markdown: what was measured, column by column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLUMNS: dict[str, tuple[str, ...]] = {
    "data/balances": (
        *("balance", "micro_batches", "draw", "m_comp_of", "m_comp_over_longest", "steps"),
        *("tokens_per_second", "over_equal_token", "share_of_ceiling", "behind_slowest_share"),
        *("cv_step_mean", "cv_step_median", "cv_step_p95", "compute_cv", "cost_cv", "b_s2_cv"),
    ),
    "node": ("table", "exit_code", "minutes", "tests", "skipped", "failures", "errors"),
    "parallel/strong_scaling": (
        *("model", "tokens", "mode", "strategy", "layout", "transport", "schedule", "ulysses", "ring", "dp"),
        *("step_ms", "per_gpu_over_whole_clips", "eager_over_this", "over_best", "reserved_gib", "refused"),
    ),
    "suite": (
        "variant",
        "steps",
        "samples_per_second",
        "tokens_per_second",
        "over_today",
        "cv_step_mean",
        "cv_step_median",
    ),
}
"""By benchmark, what a table shows of a row."""


def table(result: dict[str, Any]) -> Iterator[str]:
    """The lines of a result file's table; none of a benchmark that is not in `COLUMNS`.

    Columns that no row has are left out, and so are cells that a row lacks.
    """
    wanted = COLUMNS.get(result["benchmark"], ())
    shown = [name for name in wanted if any(row.get(name) is not None for row in result["rows"])]
    if shown:
        yield f"| {' | '.join(shown)} |"
        yield "|---" * len(shown) + "|"
        for row in result["rows"]:
            yield f"| {' | '.join(_text(row.get(name)) for name in shown)} |"
        yield ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
