"""What is changed in a model, in which order: the same for all strategies, before any wrapping.

The transforms that callbacks and users registered, the split of the sequence, compilation, activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.compat.torch.modules import is_compiled
from lightning_videoscale.parallel import (
    SequenceMesh,
    SplitPlan,
    Transport,
    find_planned_modules,
    known_models,
    parallelize,
    refusals,
)
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.strategies.blocks import checkpoint_activations, watch_own_checkpoints
from lightning_videoscale.strategies.compilation import compile_blocks
from lightning_videoscale.strategies.graphs import run_by_graphs
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from lightning_videoscale.undo import Undo

ModelTransform = Callable[[nn.Module], None]


def transform(module: nn.Module, transforms: Sequence[ModelTransform]) -> None:
    """Makes the changes to a LightningModule that come before its sequence is split; they are not taken back.

    Raises:
        ValueError: If a part is compiled already.
    """
    _refuse_compiled(module)
    for each in transforms:
        each(module)


def change_networks(
    module: nn.Module,
    mesh: SequenceMesh,
    transport: Transport | None,
    settings: SequenceParallelSettings,
    choices: AttentionChoices,
    schedules: ScheduleChoices,
) -> Undo:
    """Splits the networks of a LightningModule, compiles and checkpoints their blocks; returns what takes all back.

    Raises:
        ValueError: If it is unclear what to split.
    """
    undo = Undo()
    for path, plan in split_plans(module, mesh, settings).items():
        network = module.get_submodule(path)
        undo.add(
            parallelize(
                network,
                mesh,
                plan,
                transport=transport,
                verify_plan=settings.verify_plan,
                attention_backend=choices,
                schedule=schedules,
                log=rank_zero_info,
            )
        )
        if settings.compile:  # a checkpointed block runs its compiled forward a second time
            undo.add(compile_blocks(network, settings.compile, stays_compiled=schedules.schedule != "serial"))
        if settings.activation_checkpointing:
            undo.add(checkpoint_activations(network, settings.activation_checkpointing))
        else:
            undo.add(watch_own_checkpoints(network))
        if settings.graphs.mode is not False:
            undo.add(
                run_by_graphs(
                    network,
                    mesh,
                    settings.graphs,
                    lambda: (choices.version, schedules.version),
                    lambda: () if transport is None else transport.places,
                )
            )
    return undo


def split_plans(
    module: nn.Module, mesh: SequenceMesh, settings: SequenceParallelSettings
) -> Mapping[str, SplitPlan | None]:
    """The networks to split, by path, with their plans (None: the one registered for the class).

    A part that is named and has no plan stands for the network in it that has one: peft's ``PeftModel``, for instance,
    for what it adapts.

    Raises:
        ValueError: If the settings name a part that is not there, or name none and there is no or more than one.
    """
    modules = settings.modules
    if modules is not None:
        check_present("modules", modules, module)
        return {_planned_part(module, path, settings.plan): settings.plan for path in modules}
    found = find_planned_modules(module)
    if mesh.sp.size > 1 and len(found) != 1:
        classes = {name: type(child).__name__ for name, child in module.named_children()}
        what = f"Several networks have a split plan: {sorted(found)}" if found else "No network has a split plan"
        refused = "".join(f" {name} cannot be split: {reason}" for name, reason in refusals(module).items())
        raise ValueError(
            f"{what} in the LightningModule with children {classes}. Name what to split with modules=[...]"
            + ("." if found else f" and plan=SplitPlan(...); models with a plan: {', '.join(known_models())}.")
            + refused
        )
    return dict.fromkeys(found, None)


def _planned_part(root: nn.Module, path: str, plan: SplitPlan | None) -> str:
    """The path of what a plan is for: of the part that is named, or of the network that it is wrapped around."""
    named: Any = root.get_submodule(path)
    if plan is None:
        inner = list(find_planned_modules(named))
    else:
        adapted = named.get_base_model() if hasattr(named, "get_base_model") else named
        inner = [name for name, child in named.named_modules() if child is adapted]
        described = {*plan.inputs, *plan.outputs, *plan.gathers} - {""}
        if described and described <= {name for name, _ in named.named_modules()}:  # a plan for the wrapper itself
            return path
    return ".".join(filter(None, (path, inner[0]))) if len(inner) == 1 else path


def _refuse_compiled(module: nn.Module) -> None:
    """What is compiled already would keep running as it was, without what is added to it here."""
    compiled = [path or type(child).__name__ for path, child in module.named_modules() if is_compiled(child)]
    if compiled:
        raise ValueError(
            f"These modules were compiled before the strategy could change them: {compiled}. Leave out "
            "torch.compile and set the strategy's compile=True."
        )


def check_present(name: str, paths: list[str], module: nn.Module) -> None:
    """Raises a ``ValueError`` if paths that the user gave as the argument ``name`` are not in the module."""
    missing = [path for path in paths if not _has_submodule(module, path)]
    if missing:
        children = [child for child, _ in module.named_children()]
        raise ValueError(f"{name}={paths} names {missing}, which the LightningModule lacks; it has {children}.")


def _has_submodule(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
