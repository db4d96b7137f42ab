"""How much of a run CUDA graphs have computed."""

from __future__ import annotations

from lightning_videoscale.report.charts import percent
from lightning_videoscale.report.reading import RunRecords


def graph_figures(run: RunRecords) -> dict[str, str | int]:
    """Returns figures by name, of rank 0 and since the run was last started; empty where no network runs by graphs."""
    counts = run.last("graphs")
    if counts is None:
        return {}
    replayed, eager, busy = (counts.get(name, 0) for name in ("replayed", "eager", "busy"))
    calls = replayed + eager + busy
    return {
        "forward passes by graph": f"{percent(replayed / calls) if calls else 'none'} of {calls}",
        "eager": eager,
        "eager, as a pass before had not gone backward": busy,
        "captured": counts.get("captured", 0),
        "memory": f"{counts.get('bytes', 0) / 2**30:.2f} GiB",
    }
