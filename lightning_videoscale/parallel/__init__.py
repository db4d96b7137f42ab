"""Sequence parallelism for plain PyTorch.

`SequenceMesh`                  the ranks: dp × ring × ulysses
`parallelize`                   splits a model's sequence over the mesh
`SplitPlan`                     what is split where, in terms of `Split`, `Count`, `Length`, `Refused`, `Attention`,
                                `Whole`;
                                `register_plan` makes a plan known
`sequence_parallel_attention`   attention over a split sequence
`verify_plan`                   compares a split network with a whole one
`gather_sequence`               for loss terms of what a split model computes inside
`split_sequence`                for what hooks add to its hidden states
`SequenceContext`               what the layers of a split model share
`choose_layout`                 how ranks best divide into ulysses × ring, by prediction
`ScheduleChoices`               which schedule of the exchange runs a layer, by what was measured
`Agreement`                     whether the ranks of a group compute with the same numbers
"""

from lightning_videoscale.parallel.attention import sequence_parallel_attention
from lightning_videoscale.parallel.auxiliary_loss import check_loss, gather_sequence, split_sequence
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.layout import choose_layout
from lightning_videoscale.parallel.mesh import Axis, SequenceMesh
from lightning_videoscale.parallel.parallelize import parallelize, verify_plan
from lightning_videoscale.parallel.plan import (
    Attention,
    Count,
    Length,
    Refused,
    Split,
    SplitPlan,
    Whole,
    find_plan,
    find_planned_modules,
    known_models,
    refusals,
    register_plan,
)
from lightning_videoscale.parallel.projection import Projection
from lightning_videoscale.parallel.rank_agreement import Agreement
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.parallel.sharding import gather, split, split_sizes
from lightning_videoscale.parallel.transport import CollectiveTransport, Transport
from lightning_videoscale.parallel.ulysses import check_heads
from lightning_videoscale.parallel.verification.plan_verification import PlanReport

__all__ = [
    "Agreement",
    "Attention",
    "Axis",
    "CollectiveTransport",
    "Count",
    "Length",
    "PlanReport",
    "Projection",
    "Refused",
    "ScheduleChoices",
    "SequenceContext",
    "SequenceMesh",
    "Split",
    "SplitPlan",
    "Transport",
    "Whole",
    "check_heads",
    "check_loss",
    "choose_layout",
    "find_plan",
    "find_planned_modules",
    "gather",
    "gather_sequence",
    "known_models",
    "parallelize",
    "refusals",
    "register_plan",
    "sequence_parallel_attention",
    "split",
    "split_sequence",
    "split_sizes",
    "verify_plan",
]
