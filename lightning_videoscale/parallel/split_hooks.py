"""The hooks that split a network's streams, gather them again, and let some modules see all tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import tree_leaves, tree_map_only
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.plan import Count, Length, Refused, Rule, Split, SplitPlan, ordered_names, submodules
from lightning_videoscale.parallel.sharding import gather, gather_inside, share_of_length, split, whole_gradient
from lightning_videoscale.undo import Undo

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def install_hooks(model: nn.Module, plan: SplitPlan, context: SequenceContext) -> Undo:
    """Installs what a plan says of inputs, outputs and gathers.

    Raises:
        ValueError: If the plan names a module or an argument that the model lacks.
    """
    undo = Undo()
    try:
        for pattern, arguments in plan.inputs.items():
            found = submodules(model, pattern)
            share = _share_once if len(found) > 1 else _share
            for path, module in found.items():
                undo.add(_before(module, _change_inputs(module, path, arguments, context, share)))
                undo.add(module.register_forward_hook(_end_recomputed_entrance(context), always_call=True).remove)
        for pattern, positions in plan.outputs.items():
            for path, module in submodules(model, pattern).items():
                undo.add(module.register_forward_hook(_change_outputs(path, positions, context, split)).remove)
        for pattern, whole in plan.whole.items():
            for path, module in submodules(model, pattern).items():
                undo.add(_before(module, _change_inputs(module, path, whole.inputs, context, _gather_argument)))
                undo.add(module.register_forward_hook(_change_outputs(path, whole.outputs, context, split)).remove)
        for pattern, positions in plan.gathers_inside.items():
            for path, module in submodules(model, pattern).items():
                undo.add(module.register_forward_hook(_change_outputs(path, positions, context, gather_inside)).remove)
        _install_gathers(model, plan, context, undo)
    except BaseException:
        undo()
        raise
    return undo


def average_input_gradients(context: SequenceContext) -> Callable[..., _Inputs | None]:
    """Returns the hook in front of the network that makes gradients of its inputs whole."""

    def hook(_: nn.Module, *inputs: Any) -> _Inputs | None:
        if context.suspended or not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(inputs)):
            return None  # the same objects then: a model may write into a dict that it is given
        whole: _Inputs = tree_map_only(Tensor, lambda x: whole_gradient(x, context), inputs)
        return whole

    return hook


def _install_gathers(model: nn.Module, plan: SplitPlan, context: SequenceContext, undo: Undo) -> None:
    gathering = [
        (path, module, positions)
        for pattern, positions in plan.gathers.items()
        for path, module in submodules(model, pattern).items()
    ]
    to_gather: set[str] = set()  # the region of a pass ends when it is empty, or with the pass
    undo.add(model.register_forward_pre_hook(lambda *_: to_gather.update(path for path, *_ in gathering)).remove)

    def leave_after(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            to_gather.discard(path)
            if not (context.suspended or to_gather):
                context.randomness.leave()

        return hook

    for path, module, positions in gathering:
        undo.add(module.register_forward_hook(_change_outputs(path, positions, context, gather)).remove)
        undo.add(module.register_forward_hook(leave_after(path)).remove)


def _before(module: nn.Module, hook: Callable[..., _Inputs]) -> Callable[[], None]:
    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


_Change = Callable[[Any, Any, SequenceContext], Any]
_TensorChange = Callable[..., Tensor]


def _change_inputs(
    module: nn.Module, path: str, rules: Mapping[str, Rule], context: SequenceContext, change: _Change
) -> Callable[..., _Inputs]:
    names = list(inspect.signature(type(module).forward).parameters)[1:]  # without self
    # Behind ``*args`` come those that are given by name alone: what is there by position is none of them.
    by_position = ordered_names(module)
    unknown = [name for name in rules if name not in names]
    if unknown:
        raise ValueError(
            f"The split plan names arguments {unknown} of {type(module).__name__}.forward, which has {names}. A "
            "forward of your own needs arguments of these names."
        )

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
        if context.suspended:
            return args, kwargs
        positional, named = list(args), dict(kwargs)
        for name, rule in rules.items():
            position = by_position.index(name) if name in by_position else len(positional)
            holder: Any = positional if position < len(positional) else named
            key = position if position < len(positional) else name
            if holder is named and name not in named:
                continue
            try:
                holder[key] = change(holder[key], rule, context)
            except (ValueError, TypeError) as error:
                raise _said_of(f"argument {name!r} of {path or 'the network'}", error) from None
        return tuple(positional), named

    return hook


def _change_outputs(
    path: str, positions: Mapping[int, Split], context: SequenceContext, change: _TensorChange
) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if context.suspended:
            return output
        outputs = list(output) if isinstance(output, tuple | list) else [output]
        for position, rule in positions.items():
            if position >= len(outputs):
                raise ValueError(f"The split plan names output {position} of {path!r}, which returns {len(outputs)}.")
            try:
                outputs[position] = _each(outputs[position], rule, context, change)
            except (ValueError, TypeError) as error:
                raise _said_of(f"output {position} of {path or 'the network'}", error) from None
        return _rebuilt(output, outputs) if isinstance(output, tuple | list) else outputs[0]

    return hook


def _share(value: Any, rule: Rule, context: SequenceContext) -> Any:
    """This rank's share of an argument."""
    if value is None:
        return None
    if isinstance(rule, Refused):
        raise ValueError(f"It cannot be given where the sequence is split. {rule.reason}")
    if isinstance(rule, Mapping):
        members = list(value)
        for position, inner in rule.items():
            members[position] = _share(members[position], inner, context)
        return _rebuilt(value, members)
    if isinstance(rule, Count | Length) and not isinstance(value, int):
        raise TypeError(f"A {type(rule).__name__} is an integer, and this is {type(value).__name__}.")
    if isinstance(rule, Length):
        return share_of_length(value, rule.stream, context)
    if isinstance(rule, Count):
        lengths, rank = context.lengths(rule.streams), context.mesh.sp.rank
        return min(max(value - sum(lengths[:rank]), 0), lengths[rank])
    return _each(value, rule, context, _enter_and_split)


def _share_once(value: Any, rule: Rule, context: SequenceContext) -> Any:
    """As `_share`, of what all layers receive, such as a mask."""
    if not isinstance(value, Tensor) or not isinstance(rule, Split) or context.on_split is not None:
        return _share(value, rule, context)
    context.enter_region(value)
    return context.record.once(value, rule, lambda: _share(value, rule, context))


def _enter_and_split(x: Tensor, dim: int, context: SequenceContext, *args: Any, **kwargs: Any) -> Tensor:
    context.enter_region(x)
    return split(x, dim, context, *args, **kwargs)


def _gather_argument(value: Any, rule: Split, context: SequenceContext) -> Any:
    return _each(value, rule, context, gather_inside)


def _each(value: Any, rule: Split, context: SequenceContext, change: _TensorChange) -> Any:
    """Changes a tensor, or each of a tuple, list or dict; what has another number of dims, or is None, stays."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return type(value)({name: _each(x, rule, context, change) for name, x in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return _rebuilt(value, [_each(x, rule, context, change) for x in value])
    if not isinstance(value, Tensor):
        raise TypeError(f"Tensors have tokens, and this is {type(value).__name__}.")
    if rule.ndim is not None and value.ndim != rule.ndim:
        return value
    if not -value.ndim <= rule.dim < value.ndim:
        raise ValueError(f"It has no dim {rule.dim}: its shape is {tuple(value.shape)}.")
    dim = rule.dim % value.ndim
    if change is gather or change is gather_inside:
        return value if value.shape[dim] == 1 and rule.broadcasts else change(value, dim, context, rule.streams)
    changed = change(value, dim, context, rule.streams, broadcasts=rule.broadcasts)
    if rule.keeps_whole:
        context.keep_whole(changed, value)
    return changed


def _rebuilt(like: Any, members: list[Any]) -> Any:
    """A tuple or list of the same class; one with names takes its members one by one."""
    return like._make(members) if hasattr(like, "_make") else type(like)(members)


def _end_recomputed_entrance(context: SequenceContext) -> Callable[..., None]:
    """Puts the generators back as they were where what holds the region's entrance is recomputed."""

    def hook(*_: Any) -> None:
        if not context.in_forward:
            context.randomness.leave()

    return hook


def _said_of(what: str, error: ValueError | TypeError) -> ValueError | TypeError:
    return type(error)(f"Of the {what}, as the split plan names it: {error}")
