"""The sections about the data: what workers of loaders did, and which samples were not trained on."""

from __future__ import annotations

from typing import Any

from lightning_videoscale.report.charts import duration, percent, seconds
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.sections import Section

_SHOWN_WORKERS = 16
_SHOWN_SAMPLES = 20


def loading(found: Findings) -> Section | None:
    """What the workers of the loaders did, the busiest first."""
    if found.loading is None:
        return None
    workers = sorted(found.loading.workers, key=lambda worker: -worker.busy)
    rows = [
        (
            f"rank {each.rank}" + ("" if each.worker is None else f", worker {each.worker}"),
            f"{each.samples:,.0f}",
            _span(each.reading),
            _span(each.decoding),
            None if each.worker is None else _span(each.waiting),
            None if each.worker is None else percent(each.busy),
        )
        for each in workers
    ]
    return {
        "rows": rows[:_SHOWN_WORKERS],
        "more": rows[_SHOWN_WORKERS:],
        "in_process": any(each.worker is None for each in workers),
        "reading": percent(found.loading.reading),
        "waiting": percent(found.share_of("data")) if found.windows else None,
    }


def left_out(found: Findings) -> Section | None:
    """What of the shards was not trained on, and why."""
    records = found.run.of("samples")
    if not records and found.loading is None:
        return None
    samples: dict[str, Any] = (
        records[-1] if records else {"indexed": 0, "refused": 0, "too_small": 0, "without_caption": 0}
    )
    named = found.loading.left_out if found.loading is not None else []
    times = found.loading.times_left_out if found.loading is not None else 0
    counted = [
        (samples["refused"], "refused when the shards were indexed", "member"),
        (samples["too_small"], "too small: below one patch of the model", "sample"),
        (times, "left out while training, counted every time", "sample"),
        (samples["without_caption"], "trained with an empty text for want of a caption", "sample"),
    ]
    return {
        "indexed": samples["indexed"],
        "refused": samples["refused"],
        "counts": [(f"{count:,} {what}{'s' * (count != 1)}", how) for count, how, what in counted if count],
        "rows": [(f"{shard}: {member}" if member else shard, reason) for shard, member, reason in
                 samples.get("first_refused", [])],
        "named": named[:_SHOWN_SAMPLES],
        "more_named": len(named) - len(named[:_SHOWN_SAMPLES]),
    }  # fmt: skip


def _span(value: float) -> str:
    return seconds(value) if 0 < value < 1 else duration(value)
