"""Schedules that hide the exchange, for any attention whose projections are described; see `parallel.schedules`.

A family says which Linear makes what of which stream, in its `Projection`s, and that its plan can run these schedules::

    SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

An attention's own code then runs as if this rank had all tokens, and only its heads: norms, rotations, masks and
kernels are those of any other schedule.

- `layer`: the forward that takes the place of an attention's own.
- `groups`: its streams, by the layers that project them.
- `arguments`: what it is called with, of all tokens.
- `whole`: the tokens of all ranks, of what each has a slice.
- `view`: the attention as its own code then sees it.
- `projections`, `outputs`: what is sent before and after.
- `across_heads`: norms over all heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from lightning_videoscale.models.hidden_exchange.layer import hide_exchange
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.parallel.plan import PlanFactory
from lightning_videoscale.parallel.schedules import HIDING

__all__ = ["with_hidden_exchange"]


def with_hidden_exchange(factory: PlanFactory) -> PlanFactory:
    """Returns what makes the same plans, which other schedules than "serial" can run, too.

    Args:
        factory: Of plans whose ``attention`` is a mapping, of models with `Projection`s.
    """

    def plan_of(model: nn.Module) -> SplitPlan:
        plan = factory(model)
        return replace(plan, schedules=("serial", *HIDING), hide_exchange=partial(hide_exchange, plan=plan))

    return plan_of
