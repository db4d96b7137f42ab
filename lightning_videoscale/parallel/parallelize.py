"""Make a model compute on a slice of its sequence: hooks that split and gather, attention that exchanges."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import tree_leaves, tree_map_only
from lightning_videoscale.parallel.auxiliary_loss import attach_context
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.derivatives import refuse_transforms
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.plan import Split, SplitPlan, find_plan, known_models
from lightning_videoscale.parallel.plan_verification import PlanReport, compare
from lightning_videoscale.parallel.rank_agreement import Agreement, compare_inputs
from lightning_videoscale.parallel.sharding import gather, split, whole_gradient
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.parallel.trial_run import SplitNetwork
from lightning_videoscale.undo import Undo

_log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: SequenceMesh,
    plan: SplitPlan | None = None,
    *,
    transport: Transport | None = None,
    verify_plan: bool = True,
    log: Callable[[str], None] = _log.info,
) -> Undo:
    """Splits the model's sequence over ``mesh.sp``; inputs, outputs, parameters and ``state_dict`` stay as they were.

    Every rank of a group must call the model with the same inputs, which the first calls and then every 211th compare
    (see `Agreement`), and gets the same, whole output. Gradients of
    parameters must then be averaged over all ranks, dp × sp (see `sharding`); inputs receive theirs whole. Between the
    first split of an input and the last gather the ranks draw different random numbers, for dropout (see
    `RegionRandomness`).

    A plan that is not known to be exact is verified, as `verify_plan` does, on the inputs of the first call with
    gradients enabled, and of the first call without if it comes earlier. All ranks of the job must make these calls.
    The network, and with it the hooks on its modules, runs two or four times more then; code around it runs once.

    Args:
        model: The network, not yet compiled or wrapped by a data-parallel engine.
        mesh: The mesh; with one rank per group the model is left alone.
        plan: What is split where; the plan known for the model's class if left out.
        transport: How bytes travel; collectives if left out.
        verify_plan: Whether to verify the plan, unless it is `SplitPlan.exact`.
        log: Is told on rank 0 how the verification ended.

    Returns:
        A function that takes everything back.

    Raises:
        ValueError: If no plan is known, the plan names a module or argument the model lacks, or its heads do not fit.
    """
    plan = _plan_for(model, plan)
    if mesh.sp.size == 1:
        return Undo()
    network, undo = _install(model, plan, SequenceContext(mesh, transport))
    if not verify_plan or plan.exact or not (plan.inputs or plan.outputs):
        return undo
    first_calls = _verify_first_calls(network, log)
    undo.add(model.register_forward_pre_hook(first_calls, with_kwargs=True, prepend=True).remove)
    return undo


def verify_plan(
    network: nn.Module,
    mesh: SequenceMesh,
    plan: SplitPlan | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    transport: Transport | None = None,
) -> PlanReport:
    """Compares what a network computes on slices with what it computes on the whole sequence.

    Compared are outputs, buffers and, for a random gradient of the output, gradients of parameters and of inputs that
    require them. The network is run as it is, in eval mode if it draws random numbers, and left as it was; parameters
    that are all zero are random meanwhile. Every rank must be able to hold the whole sequence; where a GPU has no room,
    gradients or all are left out, which the report says. Collective over all ranks of the job.

    Args:
        network: The network, as for `parallelize`; not split yet.
        mesh: The mesh, of at least two ranks per group.
        plan: What is split where; the plan known for the network's class if left out.
        args: What the network is called with, the same on all ranks of a group.
        kwargs: As ``args``, by name.
        transport: How bytes travel; collectives if left out.

    Returns:
        The differences, all of them within rounding.

    Raises:
        ValueError: On all ranks, naming what differs most, if a difference is larger than rounding explains, or if
            the network calls what mixes tokens where ranks have their own only (attention that is not exchanged,
            convolutions, norms or recurrent layers over tokens) and differs by a quarter of that, or has no room to be
            compared. Also for what `parallelize` raises it.
    """
    if mesh.sp.size == 1:
        raise ValueError(f"{mesh} splits nothing: verify_plan needs at least two ranks per group.")
    split_network, undo = _install(network, _plan_for(network, plan), SequenceContext(mesh, transport))
    try:
        return compare(split_network, args, kwargs or {}, gradients=torch.is_grad_enabled())
    finally:
        undo()


def _plan_for(model: nn.Module, plan: SplitPlan | None) -> SplitPlan:
    plan = plan if plan is not None else find_plan(model)
    if plan is None:
        raise ValueError(
            f"No split plan is known for {type(model).__name__}. Models with a plan: {', '.join(known_models())}. "
            "For your own model pass plan=SplitPlan(...), or register one with parallel.register_plan."
        )
    return plan


def _install(model: nn.Module, plan: SplitPlan, context: SequenceContext) -> tuple[SplitNetwork, Undo]:
    agreement = Agreement(context.mesh, context.transport)
    to_gather: set[str] = set()  # the region of a pass ends when it is empty, or with the pass

    def begin(module: nn.Module, *inputs: Any) -> None:
        if not context.suspended:
            _refuse_transforms(module, *inputs)
        context.begin_forward()
        context.network = weakref.ref(module)
        to_gather.update(plan.gathers)

    with ExitStack() as undos:

        def before(path: str, hook: Callable[..., Any]) -> None:
            undos.callback(_submodule(model, path).register_forward_pre_hook(hook, with_kwargs=True).remove)

        def after(path: str, hook: Callable[..., Any], *, always: bool = False) -> None:
            undos.callback(_submodule(model, path).register_forward_hook(hook, always_call=always).remove)

        network = SplitNetwork(model, plan, context)
        undos.callback(network.restore_attention)
        attach_context(model, context)
        undos.callback(attach_context, model, None)
        before("", begin)
        before("", compare_inputs(agreement))
        before("", _average_input_gradients(context))
        for path, arguments in plan.inputs.items():
            before(path, _split_inputs(_submodule(model, path), arguments, context))
            after(path, _end_recomputed_entrance(context), always=True)
        for path, positions in plan.outputs.items():
            after(path, _split_outputs(path, positions, context))
        for path, dim in plan.gathers.items():
            after(path, _gather_output(path, dim, context, to_gather))
        after("", lambda *_: context.end_forward(), always=True)
        return network, Undo(undos.pop_all().close)


def _verify_first_calls(network: SplitNetwork, log: Callable[[str], None]) -> Callable[..., None]:
    verified: set[bool] = set()  # with gradients, without

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients = torch.is_grad_enabled()
        if module is not network.network or verified & {gradients, True}:  # a copy of the network is split likewise
            return
        _refuse_transforms(module, args, kwargs)
        verified.add(gradients)
        try:
            report = compare(network, args, kwargs, gradients=gradients)
        except Exception:
            verified.discard(gradients)  # whoever catches it and goes on hears of it again
            raise
        if dist.get_rank() == 0:
            log(f"Split plan of {network.name} verified on its first call: {report}.")

    uncompiled: Callable[..., None] = torch.compiler.disable(hook)
    return uncompiled


def _refuse_transforms(module: nn.Module, *inputs: Any) -> None:
    tensors = chain(tree_leaves(inputs), module.parameters())
    refuse_transforms(f"The sequence of {type(module).__name__}", tensors)


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"The split plan names module {path!r}, which {type(model).__name__} does not have.") from None


def _applies(rule: Split, x: Tensor) -> bool:
    return rule.ndim is None or x.ndim == rule.ndim


def _average_input_gradients(context: SequenceContext) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
    def hook(_: nn.Module, *inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if context.suspended or not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(inputs)):
            return None  # the same objects then: a model may write into a dict that it is given
        whole: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            Tensor, lambda x: whole_gradient(x, context), inputs
        )
        return whole

    return hook


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
        if context.suspended:
            return args, kwargs
        positional = list(args)
        for name, rule in arguments.items():
            position = names.index(name)
            value = positional[position] if position < len(positional) else kwargs.get(name)
            if not isinstance(value, Tensor) or not _applies(rule, value):
                continue
            context.enter_region(value)
            value = split(value, rule.dim, context)
            if position < len(positional):
                positional[position] = value
            else:
                kwargs = {**kwargs, name: value}
        return tuple(positional), kwargs

    return hook


def _end_recomputed_entrance(context: SequenceContext) -> Callable[..., None]:
    """Puts the generators back as they were where what holds the region's entrance is recomputed."""

    def hook(*_: Any) -> None:
        if not context.in_forward:
            context.randomness.leave()

    return hook


def _split_outputs(
    path: str, positions: Mapping[int, Split], context: SequenceContext
) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if context.suspended:
            return output
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for position, rule in positions.items():
            if position >= len(outputs):
                raise ValueError(f"The split plan names output {position} of {path!r}, which returns {len(outputs)}.")
            if _applies(rule, outputs[position]):
                outputs[position] = split(outputs[position], rule.dim, context)
        return outputs[0] if isinstance(output, Tensor) else tuple(outputs)

    return hook


def _gather_output(
    path: str, dim: int, context: SequenceContext, to_gather: set[str]
) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if context.suspended:
            return output
        if not isinstance(output, Tensor):
            raise ValueError(
                f"The split plan gathers the output of {path!r}, which is {type(output).__name__}, no tensor."
            )
        whole = gather(output, dim, context)
        to_gather.discard(path)
        if not to_gather:
            context.randomness.leave()
        return whole

    return hook
