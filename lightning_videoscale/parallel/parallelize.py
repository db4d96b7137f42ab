"""Make a model compute on a slice of its sequence: hooks that split and gather, attention that exchanges."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_videoscale.attention import AttentionBackend, AttentionChoices, as_choices
from lightning_videoscale.compat.diffusers import cache_by_values
from lightning_videoscale.compat.torch.trees import tree_leaves
from lightning_videoscale.parallel.auxiliary_loss import attach_context
from lightning_videoscale.parallel.chosen_attention import choose_attention
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.derivatives import refuse_transforms
from lightning_videoscale.parallel.layout.divide import divide_mesh
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.pickling import refuse_pickling
from lightning_videoscale.parallel.plan import SplitPlan, check_streams, find_plan, known_models, refusals, submodules
from lightning_videoscale.parallel.rank_agreement import Agreement, compare_gradients, compare_inputs
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices, as_schedules
from lightning_videoscale.parallel.split_hooks import average_input_gradients, install_hooks
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.parallel.verification.attention_changes import checked_again_after_changes
from lightning_videoscale.parallel.verification.plan_verification import PlanReport, check_exchanges, compare
from lightning_videoscale.parallel.verification.trial_run import SplitNetwork
from lightning_videoscale.undo import Undo

_log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: SequenceMesh,
    plan: SplitPlan | None = None,
    *,
    transport: Transport | None = None,
    verify_plan: bool = True,
    attention_backend: AttentionBackend | AttentionChoices = "auto",
    schedule: ScheduleSetting | ScheduleChoices = "serial",
    tokens: int | None = None,
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
    The network, and with it the hooks on its modules, runs two or four times more then; code around it runs once. What
    these hooks have written into lists, dicts and attributes is put back.
    Under other plans it runs once more before its first call, to see that its attention exchanges. So it does under all
    plans where a forward, a processor or a module of attention has changed since, which all ranks must do alike.

    Args:
        model: The network, not yet compiled or wrapped by a data-parallel engine.
        mesh: The mesh; with one rank per group nothing is split, and only the kernel of attention is chosen. One that
            is not divided into ulysses × ring yet is divided here, as is predicted to be the fastest for the model
            (see `choose_layout`); all ranks of the job must then call this.
        plan: What is split where; the plan known for the model's class if left out.
        transport: What sends messages; collectives if left out.
        verify_plan: Whether to verify the plan. One that is `SplitPlan.exact` is verified only where something was
            added to the network that may mix tokens, such as a hook or a convolution in a block.
        attention_backend: Which kernel computes attention: one by name, or ``"auto"``, which is torch's own pick until
            `AttentionChoices` has measured. To have it measure, make one and call its ``settle`` between steps.
        schedule: In which order projections and exchanges run: ``"serial"``, or ``"overlap"`` or ``"sliced"``, which
            hide exchanges where the plan has them; see `parallel.schedules`. ``"auto"`` goes by what earlier runs
            have measured, or by a prediction. To have it measure, make a `ScheduleChoices` and call its ``settle``
            between steps. Then all ranks of the job must call this.
        tokens: Of the longest sequences, by which a mesh is divided; 32 760 if left out.
        log: Is told on rank 0 what the plan costs, where it costs anything, and how the verification ended.

    Returns:
        A function that takes everything back.

    Raises:
        ValueError: If no plan is known, the plan names a module or argument the model lacks or splits tokens that no
            attention has for keys, the heads do not fit, or the plan lacks the schedule.
        TypeError: If the model is no module.
    """
    plan = _plan_for(model, plan)
    choices = as_choices(attention_backend)
    divide_mesh(mesh, [(model, plan)], None if tokens is None else {tokens: 1}, log=log)
    if mesh.sp.size == 1:
        return choose_attention(model, plan, choices)
    schedules = _schedules_for(model, plan, mesh, as_schedules(schedule, log), log)
    network, undo = _install(model, plan, mesh, transport, choices, schedules)
    schedules.prepare(mesh, network.context.transport, choices)
    if dist.get_rank() == 0:
        for line in _costs(model, plan, schedules.schedule):
            log(f"{network.name} on slices of its sequence: {line}")
    if not plan.splits_anything:
        return undo
    check = partial(check_exchanges, network, compares=verify_plan)
    verifies = verify_plan and not plan.exact
    first_calls = _verify_first_calls(network, log) if verifies else _check_first_call(network, check, log)
    checks = checked_again_after_changes(network, first_calls, check)
    undo.add(model.register_forward_pre_hook(checks, with_kwargs=True, prepend=True).remove)
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
        mesh: The mesh, of at least two ranks per group, and divided.
        plan: What is split where; the plan known for the network's class if left out.
        args: What the network is called with, the same on all ranks of a group.
        kwargs: As ``args``, by name.
        transport: What sends messages; collectives if left out.

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
    split_network, undo = _install(network, _plan_for(network, plan), mesh, transport, as_choices("sdpa"))
    try:
        return compare(split_network, args, kwargs or {}, gradients=torch.is_grad_enabled())
    finally:
        undo()


def _schedules_for(
    model: nn.Module, plan: SplitPlan, mesh: SequenceMesh, schedules: ScheduleChoices, log: Callable[[str], None]
) -> ScheduleChoices:
    """What chooses the model's schedules: as given, or "serial" where nothing is to choose, which the log says."""
    why = None
    if schedules.schedule != "serial" and mesh.ulysses.size == 1:
        why = f"has nothing to do: {mesh} exchanges no heads."
    elif schedules.schedule == "auto" and len(plan.schedules) == 1:
        reason = plan.only_serial or "its split plan has no other schedule"
        why = f"is 'serial' for {type(model).__name__}: {reason}."
    if why is None:
        return schedules
    if dist.get_rank() == 0:
        log(f"schedule={schedules.schedule!r} {why}")
    return ScheduleChoices("serial")


def _plan_for(model: nn.Module, plan: SplitPlan | None) -> SplitPlan:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is no nn.Module: give the network, of a pipeline pipeline.transformer."
        )
    plan = plan if plan is not None else find_plan(model)
    if plan is None:
        for name, reason in refusals(model).items():
            raise ValueError(f"{name} cannot be split: {reason}")
        raise ValueError(
            f"No split plan is known for {type(model).__name__}. Models with a plan: {', '.join(known_models())}. "
            "For your own model pass plan=SplitPlan(...), or register one with parallel.register_plan."
        )
    return plan


def _costs(model: nn.Module, plan: SplitPlan, schedule: ScheduleSetting) -> list[str]:
    """What takes time beyond a rank's share of the work, with how many modules do."""

    def counted(patterns: Iterable[str]) -> str:
        counts = {pattern: len(submodules(model, pattern)) for pattern in patterns}
        return f"{sum(counts.values())} modules ({', '.join(f'{n} {pattern}' for pattern, n in counts.items())})"

    lines = []
    if schedule == "serial" and isinstance(plan.attention, Mapping) and plan.attention:
        lines.append(
            f"attention of {counted(plan.attention)} is redirected and exchanges serially, so that computation waits "
            "for its messages."
        )
    if plan.whole:
        lines.append(f"{counted(plan.whole)} see all tokens. Each rank computes all of them, which is slow.")
    return lines


def _install(
    model: nn.Module,
    plan: SplitPlan,
    mesh: SequenceMesh,
    transport: Transport | None,
    choices: AttentionChoices,
    schedules: ScheduleChoices | None = None,
) -> tuple[SplitNetwork, Undo]:
    check_streams(plan, type(model).__name__)
    schedules = schedules or ScheduleChoices("serial")
    if schedules.schedule not in ("auto", *plan.schedules):
        raise ValueError(
            f"schedule={schedules.schedule!r} cannot run {type(model).__name__}: "
            f"{plan.only_serial or f'its split plan has {plan.schedules}'}. Use schedule='serial'."
        )
    context = SequenceContext(mesh, transport, plan.short_streams, choices, schedules)
    inputs_agree, gradients_agree = (Agreement(context.mesh, context.transport) for _ in range(2))

    def begin(module: nn.Module, *inputs: Any) -> None:
        if not context.suspended:
            _refuse_transforms(module, *inputs)
            _refuse_cache(module)
            _refuse_objection(module, plan, *inputs)
        context.begin_forward()
        context.network = weakref.ref(module)

    def end(module: nn.Module, _: Any, output: Any) -> None:
        context.end_forward(output)
        if not (context.suspended or torch.compiler.is_compiling()):
            compare_gradients(gradients_agree, module, output)

    with ExitStack() as undos:

        def before(hook: Callable[..., Any]) -> None:
            undos.callback(model.register_forward_pre_hook(hook, with_kwargs=True).remove)

        undos.callback(refuse_pickling(model))
        network = SplitNetwork(model, plan, context)
        undos.callback(network.restore_attention)
        attach_context(model, context)
        undos.callback(attach_context, model, None)
        before(begin)
        before(compare_inputs(inputs_agree))
        before(average_input_gradients(context))
        undos.callback(install_hooks(model, plan, context))
        undos.callback(model.register_forward_hook(end, always_call=True).remove)
        return network, Undo(undos.pop_all().close)


def _verify_first_calls(network: SplitNetwork, log: Callable[[str], None]) -> Callable[..., None]:
    verified: set[bool] = set()  # with gradients, without

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients = torch.is_grad_enabled()
        if verified & {gradients, True}:
            return
        _refuse_transforms(module, args, kwargs)
        _refuse_cache(module)
        report = compare(network, args, kwargs, gradients=gradients)
        verified.add(gradients)  # after it, so that whoever catches an error and goes on hears of it again
        if dist.get_rank() == 0:
            log(f"Split plan of {network.name} verified on its first call: {report}.")

    return hook


def _refuse_cache(module: nn.Module) -> None:
    if (cache := cache_by_values(module)) is not None:
        raise ValueError(
            f"{type(module).__name__} has a cache ({cache}) that decides by hidden states which blocks run. Each rank "
            "has a slice of them, so ranks would decide differently and wait for each other. Call disable_cache(), or "
            "take a cache that decides by the step, such as MagCache."
        )


def _refuse_objection(module: nn.Module, plan: SplitPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if plan.objection is None:
        return
    arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    if (reason := plan.objection(module, arguments)) is not None:
        raise ValueError(f"{type(module).__name__} cannot be split in this call: {reason}")


def _refuse_transforms(module: nn.Module, *inputs: Any) -> None:
    tensors = chain(tree_leaves(inputs), module.parameters())
    refuse_transforms(f"The sequence of {type(module).__name__}", tensors)


def _check_first_call(
    network: SplitNetwork, check: Callable[..., PlanReport | None], log: Callable[[str], None]
) -> Callable[..., None]:
    checked = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal checked
        if not checked:
            _refuse_transforms(module, args, kwargs)
            _refuse_cache(module)
            report = check(args, kwargs)
            if report is not None and dist.get_rank() == 0:
                what = "what seems to mix tokens of a slice, or code of users"
                log(f"{network.name} has {what}, and was compared: {report}.")
            checked = True  # after it, so that whoever catches an error and goes on hears of it again

    return hook
