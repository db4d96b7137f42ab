"""The layer that `schedule="auto"` measures computes the same under each schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh
from lightning_videoscale.parallel.schedules.table import LayerPlacement, LayerShape, ScheduleKey
from lightning_videoscale.parallel.schedules.trial_layer import TrialGroup, TrialLayer
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks

Ranks = Callable[[int], ProcessPool]
SHAPE = LayerShape(batch=1, tokens=64, width=16, heads=4, kv_heads=4, head_dim=4, across_heads=True, dtype="float64")
TRANSPORT = CollectiveTransport()
OF_KEY_WEIGHT, OF_KEY_BIAS = 3, 6  # places among output, gradient of the input, and those of q, k, v and their biases


def trial_differences(ring: int) -> float:
    """The largest difference of any output or gradient from serial's."""
    worst, size = 0.0, dist.get_world_size() // ring
    with SequenceMesh.create("cpu", ulysses_size=size, ring_size=ring) as mesh:
        group = TrialGroup(mesh, TRANSPORT, AttentionChoices("sdpa"), torch.device("cpu"))
        for changes in (
            {},
            {"across_heads": False, "is_projected": False},
            {"has_biases": False},
            {"across_heads": False, "has_biases": False, "is_projected": False},
            {"batch": 3, "tokens": 23},
            {"heads": 5, "width": 12},
            {"across_heads": False, "apart": 11},
            {"across_heads": False, "apart": 3, "is_projected": False, "batch": 2},
        ):
            shape = SHAPE._replace(**changes)
            shape = shape._replace(kv_heads=shape.heads)
            key = ScheduleKey.of(shape, LayerPlacement("cpu", "collective", size, ring, 1))
            serial, *others = (run(TRANSPORT) for run in TrialLayer(key, group).runs().values())
            assert len(others) == 2
            of_weights = [x for found in (serial, *others) for x in found[4 if shape.apart else 2 :]]
            sum_over_ranks(of_weights, mesh.sp.group)
            sizes = [float(x.norm()) for x in serial]
            if shape.has_biases and not shape.across_heads and not shape.apart:
                # It adds the same to all logits of a query: its gradient is rounding, and no measure of rounding.
                assert sizes[OF_KEY_BIAS] < 1e-12 * sizes[OF_KEY_WEIGHT]
                sizes[OF_KEY_BIAS] = sizes[OF_KEY_WEIGHT]
            triples = [triple for other in others for triple in zip(serial, other, sizes, strict=True)]
            worst = max(worst, *(float((a - b).norm()) / size for a, b, size in triples))
    return worst


@pytest.mark.parametrize(("size", "ring"), [(2, 1), (3, 1), (4, 2)])
def test_what_is_timed_computes_the_same_under_each_schedule(ranks: Ranks, size: int, ring: int) -> None:
    assert max(ranks(size).run(trial_differences, ring)) < 1e-12
