"""A rank of a job on several nodes, trained by the Trainer that docs/cluster.md shows, at a smaller size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed.wan_training import RectifiedFlow
from tests.strategies.fsdp2.training import clips


def train(script: str, folder: Path) -> None:
    """Runs the script, trains by its ``trainer``, and writes down which ranks share what."""
    names: dict[str, Any] = {}
    exec(script, names)
    trainer = names["trainer"]
    trainer.fit(RectifiedFlow(), clips())
    with trainer.strategy.mesh as mesh:
        groups = {axis: dist.get_process_group_ranks(getattr(mesh, axis).group) for axis in ("sp", "dp")}
    place = {"node": trainer.node_rank, "local": trainer.local_rank, "steps": trainer.global_step}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(groups | place))
