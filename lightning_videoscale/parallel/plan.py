"""The split plan: which tensors of a model are split where, where they are gathered, and how its attention is joined.

`SplitPlan`              the plan itself; write one by hand for your own model
`read_diffusers_plan`    the splits and gathers that diffusers declares for a model (its `_cp_plan`)
`register_plan`          makes a plan of your own known for a class of models, by the class's full name
`find_plan`              the plan of a model, if one is known
`find_planned_modules`   the networks inside a larger module that have a plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_videoscale.compat.diffusers import declared_splits
from lightning_videoscale.families import AllFamilies, known
from lightning_videoscale.parallel.context import SequenceContext

AttentionChange = Callable[[nn.Module, SequenceContext], Callable[[], None]]
"""Makes a model's self-attention exchange over the group, and returns what takes that back."""


@dataclass(frozen=True)
class Split:
    """Split a tensor along ``dim``.

    Attributes:
        dim: The sequence dim.
        ndim: Apply only to tensors of so many dims (Wan's timesteps are split if they are per token, (B, S), and not
            if they are per sample, (B,)); any number if left out.
    """

    dim: int
    ndim: int | None = None


@dataclass(frozen=True)
class SplitPlan:
    """How one model computes on a slice of its sequence.

    Module paths are relative to the model; ``""`` is the model itself.

    Attributes:
        inputs: Per module path, which arguments of its ``forward`` are split, by name, before it runs.
        outputs: Per module path, which of its outputs are split, by position (0 if it returns one tensor).
        gathers: Per module path, the sequence dim along which its output (one tensor) is gathered. With the last one
            to run, in whatever order they are listed, ranks draw equal random numbers again.
        attention: Makes the model's self-attention exchange over the group, given the model and the shared context;
            returns its undo, after which the model computes as before. It raises a ``ValueError`` if the model's heads
            do not fit the mesh.
        exact: Whether tests hold the plan to one device for this very class of models; others are verified when the
            model is first called.
    """

    inputs: Mapping[str, Mapping[str, Split]]
    outputs: Mapping[str, Mapping[int, Split]]
    gathers: Mapping[str, int]
    attention: AttentionChange
    exact: bool = False


PlanFactory = Callable[[nn.Module], SplitPlan]

_REGISTERED: dict[str, PlanFactory] = {}


def register_plan(class_path: str, factory: PlanFactory) -> None:
    """Makes a plan known for all instances of a class and of its subclasses.

    Args:
        class_path: ``"package.module.ClassName"``; a name, so that nothing is imported for models nobody uses.
        factory: Returns the plan for a model of that class.
    """
    _REGISTERED[class_path] = factory


def find_plan(model: nn.Module) -> SplitPlan | None:
    """Returns the plan known for the model's class or its nearest base class, registered or its family's, or None."""
    factory: PlanFactory | None = known("SPLIT_PLANS", type(model), _REGISTERED)
    return None if factory is None else factory(model)


def find_planned_modules(root: nn.Module) -> dict[str, SplitPlan]:
    """Returns the outermost modules under ``root`` that have a plan, by path; each once, whatever paths it has."""
    found: dict[str, SplitPlan] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        if module in visited:
            return
        visited.add(module)
        plan = find_plan(module)
        if plan is not None:
            found[path] = plan
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(root, "")
    return found


def known_models() -> list[str]:
    """Names of the model classes that have a plan."""
    return sorted({path.rsplit(".", 1)[-1] for path in (*_REGISTERED, *AllFamilies[PlanFactory]("SPLIT_PLANS"))})


def read_diffusers_plan(model: nn.Module, attention: AttentionChange) -> SplitPlan:
    """Reads the splits and gathers that diffusers declares for its own context parallelism.

    diffusers keeps them in the class attribute ``_cp_plan``: module path -> {argument name or output position ->
    ``ContextParallelInput``}, or -> ``ContextParallelOutput``. It says nothing of attention, hence the argument.
    Tried with diffusers 0.42.

    Args:
        model: A diffusers model.
        attention: See `SplitPlan.attention`.

    Raises:
        ValueError: If the model declares no plan, or one with members this reader does not know.
    """
    declared = declared_splits(model)
    if not declared:
        raise ValueError(f"{type(model).__name__} declares no context-parallel plan (`_cp_plan`): pass a SplitPlan.")
    inputs: dict[str, dict[str, Split]] = {}
    outputs: dict[str, dict[int, Split]] = {}
    gathers: dict[str, int] = {}
    for path, entry in declared.items():
        if hasattr(entry, "gather_dim"):
            gathers[path] = entry.gather_dim
        elif isinstance(entry, Mapping):
            for name, member in entry.items():
                if not hasattr(member, "split_dim"):
                    raise ValueError(f"Unknown member {member!r} for {name!r} of {path!r} in the model's `_cp_plan`.")
                split = Split(member.split_dim, member.expected_dims)
                if member.split_output:
                    outputs.setdefault(path, {})[name] = split
                else:
                    inputs.setdefault(path, {})[name] = split
        else:
            raise ValueError(f"Unknown entry {entry!r} for module {path!r} in the model's `_cp_plan`.")
    return SplitPlan(inputs, outputs, gathers, attention)
