"""Networks that exchange run by CUDA graphs only where NCCL may."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

from torch import nn

from lightning_videoscale.graphs import GraphOptions
from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.strategies.graphs import run_by_graphs
from tests.distributed.pool import ProcessPool

BOTH = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"}


def refusal(ulysses_size: int) -> str:
    with SequenceMesh.create("cpu", ulysses_size=ulysses_size) as mesh, patch.dict(os.environ, BOTH):
        try:
            run_by_graphs(nn.Linear(1, 1), mesh, GraphOptions(True), tuple, tuple)()
        except ValueError as error:
            return str(error)
        return ""


def test_exchanges_in_segments_that_grow_are_refused_where_nccl_registers_them(
    ranks: Callable[[int], ProcessPool],
) -> None:
    for message in ranks(2).run(refusal, 2):
        assert "NCCL_GRAPH_REGISTER=1" in message and "expandable_segments:True" in message
    assert ranks(2).run(refusal, 1) == ["", ""]
