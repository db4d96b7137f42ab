"""Make a model compute on a slice of its sequence: hooks that split and gather, attention that exchanges."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.plan import Split, SplitPlan, Undo, find_plan, known_models
from lightning_videoscale.parallel.sharding import gather, split
from lightning_videoscale.parallel.transport import CollectiveTransport, Transport


def parallelize(
    model: nn.Module, mesh: SequenceMesh, plan: SplitPlan | None = None, *, transport: Transport | None = None
) -> Undo:
    """Splits the model's sequence over ``mesh.sp``; inputs, outputs, parameters and ``state_dict`` stay as they were.

    Every rank of a group must call the model with the same inputs and gets the same, whole output. Gradients must
    then be averaged over all ranks, dp × sp (see `sharding`).

    Args:
        model: The network, not yet compiled or wrapped by a data-parallel engine.
        mesh: The mesh; with one rank per group the model is left alone.
        plan: What is split where; the plan registered for the model's class if left out.
        transport: How bytes travel; functional collectives if left out.

    Returns:
        A function that takes everything back.

    Raises:
        ValueError: If no plan is known, the plan names a module or argument the model lacks, or its heads do not fit.
    """
    plan = plan if plan is not None else find_plan(model)
    if plan is None:
        raise ValueError(
            f"No split plan is known for {type(model).__name__}. Models with a plan: {', '.join(known_models())}. "
            "For your own model pass plan=SplitPlan(...), or register one with parallel.register_plan."
        )
    if mesh.sp.size == 1:
        return lambda: None
    context = SequenceContext(mesh, transport if transport is not None else CollectiveTransport())
    undos = [plan.attention(model, context)]
    undos.append(model.register_forward_pre_hook(lambda *_: context.begin_forward()).remove)
    for path, arguments in plan.inputs.items():
        module = _submodule(model, path)
        hook = _split_inputs(module, arguments, context)
        undos.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for path, positions in plan.outputs.items():
        undos.append(_submodule(model, path).register_forward_hook(_split_outputs(path, positions, context)).remove)
    for path, dim in plan.gathers.items():
        undos.append(_submodule(model, path).register_forward_hook(_gather_output(path, dim, context)).remove)

    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"The split plan names module {path!r}, which {type(model).__name__} does not have.") from None


def _apply(x: Tensor, rule: Split, context: SequenceContext) -> Tensor:
    return split(x, rule.dim, context) if rule.ndim is None or x.ndim == rule.ndim else x


def _split_inputs(
    module: nn.Module, arguments: Mapping[str, Split], context: SequenceContext
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    names = list(inspect.signature(type(module).forward).parameters)[1:]  # without self
    unknown = [name for name in arguments if name not in names]
    if unknown:
        raise ValueError(
            f"The split plan names arguments {unknown} of {type(module).__name__}.forward, which has {names}."
        )

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = list(args)
        for name, rule in arguments.items():
            position = names.index(name)
            if position < len(positional) and isinstance(positional[position], Tensor):
                positional[position] = _apply(positional[position], rule, context)
            elif isinstance(kwargs.get(name), Tensor):
                kwargs = {**kwargs, name: _apply(kwargs[name], rule, context)}
        return tuple(positional), kwargs

    return hook


def _split_outputs(
    path: str, positions: Mapping[int, Split], context: SequenceContext
) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for position, rule in positions.items():
            if position >= len(outputs):
                raise ValueError(f"The split plan names output {position} of {path!r}, which returns {len(outputs)}.")
            outputs[position] = _apply(outputs[position], rule, context)
        return outputs[0] if isinstance(output, Tensor) else tuple(outputs)

    return hook


def _gather_output(path: str, dim: int, context: SequenceContext) -> Callable[[nn.Module, Any, Any], Tensor]:
    def hook(_: nn.Module, __: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"The split plan gathers the output of {path!r}, which is {type(output).__name__}, no tensor."
            )
        return gather(output, dim, context)

    return hook
