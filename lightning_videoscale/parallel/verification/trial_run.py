"""Running a split network once more, split or whole, without a trace: `SplitNetwork` and `rehearse`.

Neither gradients nor draws of generators stay behind, nor what buffers and diffusers' caches became, nor what hooks
wrote down. What surrounds the call (DDP, FSDP2, ZeRO, autocast, a checkpoint, compiled blocks) is as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.deepspeed import full_numel
from lightning_videoscale.compat.diffusers import keep_caches
from lightning_videoscale.compat.torch.data_parallel import modules_in_forward
from lightning_videoscale.compat.torch.modules import attributes_but_children, buffers_of, keep_children
from lightning_videoscale.compat.torch.trees import quick_leaves, tensors_of, tree_map_only
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.plan import SplitPlan, matching_modules
from lightning_videoscale.parallel.redirection import exchange_attention
from lightning_videoscale.parallel.verification import hook_traces
from lightning_videoscale.undo import Undo

_MOST_ELEMENTS = 1 << 28  # of all gradients that are asked for


class SplitNetwork:
    """A network whose sequence is split, and that can run whole for a while."""

    def __init__(self, network: nn.Module, plan: SplitPlan, context: SequenceContext) -> None:
        self.name = type(network).__name__  # FSDP2 makes another class of it
        self.network, self.plan, self.context = network, plan, context
        self.around: list[FSDPModule] = []  # sharded, whose forward is under way; see `stage`
        patterns = {*plan.inputs, *plan.outputs, *plan.gathers, *plan.gathers_inside, *plan.whole}
        self._planned = {
            path: x for pattern in sorted(patterns) for path, x in matching_modules(network, pattern).items()
        }
        self._restore_attention = exchange_attention(network, plan, context)
        self._exchanging = self._attending()

    def replaced(self) -> list[str]:
        """Returns where other modules are than those whose inputs or outputs the split has to do with."""
        now = dict(self.network.named_modules(remove_duplicate=False))
        return [path for path, module in self._planned.items() if now.get(path) is not module]

    def restore_attention(self) -> None:
        """Takes the exchanges back."""
        self._restore_attention()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the network computes on whole sequences, with the attention it had before it was split."""
        # Later changes, such as compilation, may have wrapped what the attention's undo sets back: they stay around it,
        # and an exchange in them is left out. All others are made anew, as what stands against schedules is asked of
        # the new ones.
        held = self._attending()
        wrapped = {place: value for place, value in held.items() if value is not self._exchanging.get(place)}
        restore_children = keep_children(self.network)  # what FSDP2 sharded and users hooked, not what is made anew
        self._restore_attention()
        self.context.suspended = True
        try:
            with _attributes(wrapped):
                yield
        finally:
            self.context.suspended = False
            self._restore_attention = exchange_attention(self.network, self.plan, self.context)
            self._exchanging = self._attending()
            restore_children()
            for (module, name), value in wrapped.items():
                vars(module).pop(name, None)
                if value is not None:
                    setattr(module, name, value)

    def _attending(self) -> dict[tuple[nn.Module, str], Any]:
        """What modules have in place of their class's forward, and their processors; None for none."""
        names = ("forward", "processor")
        return {(module, name): vars(module).get(name) for module in self.network.modules() for name in names}


@contextmanager
def _attributes(values: Mapping[tuple[nn.Module, str], Any]) -> Iterator[None]:
    """Inside, modules have these attributes of their own, but for those that are None."""
    undo = Undo()
    for (module, name), value in values.items():
        if value is not None:
            undo.set(module, name, value)
    try:
        yield
    finally:
        undo()


@dataclass(frozen=True)
class Rehearsal:
    """What a run gave; all tensors are detached.

    Attributes:
        outputs: The floating-point tensors that the network returned.
        buffers: What it wrote into its buffers, by name.
        gradients: Of inputs and parameters, by name, None for those without influence. None if nobody asked, or if
            a checkpoint of the network cannot give them (``use_reentrant=True``).
        dtypes: Of outputs and parameters.
        drew: Whether it drew from torch's generators, outside of its region.
    """

    outputs: list[Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None] | None
    dtypes: set[torch.dtype]
    drew: bool


def rehearse(
    split: SplitNetwork, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, *, gradients: bool
) -> Rehearsal:
    """Runs the network on copies of the inputs; with gradients, for a gradient of the outputs that is random.

    That gradient is the same on all ranks. Gradients of 2^28 elements at most are asked for, small parameters first.
    """
    leaves: dict[str, Tensor] = {}

    def copied(x: Tensor) -> Tensor:
        if not (gradients and x.requires_grad):
            return x.detach().clone()
        leaf = leaves[f"input {len(leaves)}"] = x.detach().requires_grad_()
        return leaf.clone()  # the network may write into it, as it may not into a leaf

    args, kwargs = tree_map_only(Tensor, copied, (args, dict(kwargs)))
    for module in split.around:  # hooks may use what it holds beside the network, and an earlier backward has freed it
        module.unshard()
    with ExitStack() as contexts:
        contexts.enter_context(_filled_zeros(_beside(split.network)))
        contexts.enter_context(split.context.randomness.put_back(device))
        contexts.enter_context(_own_generators_put_back(split.network, args, kwargs))
        contexts.callback(keep_caches(split.network))
        contexts.enter_context(hook_traces.undone(split.network))
        contexts.enter_context(torch.set_grad_enabled(gradients))
        # A checkpoint around this call counts what is saved in it, and would compute that again for its gradients.
        contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        contexts.callback(torch.clear_autocast_cache)  # it may hold casts of parameters that are not zero now
        torch.clear_autocast_cache()
        changed = contexts.enter_context(_kept_buffers(split.network))
        before = _generator_states(device)
        with _parameters_in_use(split.network) as parameters:
            outputs = [x for x in tensors_of(split.network(*args, **kwargs)) if x.is_floating_point()]
        drew = not all(map(torch.equal, before, _generator_states(device)))
        leaves |= {name: p for name, p in _smallest(parameters).items() if p.requires_grad}
        return Rehearsal(
            [x.detach() for x in outputs],
            changed(),
            _gradients(outputs, leaves) if gradients else None,
            {x.dtype for x in (*outputs, *parameters.values()) if x.is_floating_point()},
            drew,
        )


@contextmanager
def stage(split: SplitNetwork) -> Iterator[None]:
    """What surrounds the rehearsals of a network: nothing is compiled, gathered or zero."""
    with torch.compiler.set_stance("force_eager"), _at_rest(split), _filled_zeros(split.network.parameters()):
        yield


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Inside, the network is in eval mode, for example without dropout."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _gradients(outputs: list[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None] | None:
    """Fills no ``.grad`` and calls no hook that waits for one."""
    roots = [x for x in outputs if x.requires_grad]
    if not roots or not leaves:
        return {}
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in roots]
    try:
        found = torch.autograd.grad(roots, list(leaves.values()), cotangents, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            return None
        raise
    return dict(zip(leaves, found, strict=True))


@contextmanager
def _parameters_in_use(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fills with the parameters by name as they are in forward: FSDP2 puts the gathered ones there meanwhile."""
    if not any(isinstance(p, DTensor) for p in network.parameters()):
        yield dict(network.named_parameters())
        return
    prefixes = {module: f"{name}." if name else "" for name, module in network.named_modules()}
    found: dict[str, Tensor] = {}

    def look(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters() if module in prefixes else ():
            if not isinstance(parameter, DTensor):
                found[prefixes[module] + name] = parameter

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _smallest(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    chosen, room = {}, _MOST_ELEMENTS
    for name, parameter in sorted(parameters.items(), key=lambda item: (full_numel(item[1]), item[0])):
        room -= full_numel(parameter)
        if room < 0:
            break
        chosen[name] = parameter
    return chosen


@contextmanager
def _kept_buffers(network: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Yields a function that returns the buffers that were written since, by name; puts all back at the end."""
    held = [
        (f"{path}.{name}" if path else name, module, name, x, x.clone())
        for path, module in network.named_modules()
        for name, x in module.named_buffers(recurse=False)
    ]

    # A network knows by attributes what its buffers hold, such as the length of a rotary table.
    attributes = [(module, hook_traces.attributes(module), set(buffers_of(module))) for module in network.modules()]

    def changed() -> dict[str, Tensor]:
        now = [(full, getattr(module, name), copy) for full, module, name, _, copy in held]
        return {full: x.clone() for full, x, copy in now if not torch.equal(x, copy)}

    try:
        yield changed
    finally:
        for _, module, name, x, copy in held:
            if not torch.equal(x, copy):
                x.data.copy_(copy)
            setattr(module, name, x)
        for module, before, buffers in attributes:
            for name in set(buffers_of(module)) - buffers:
                delattr(module, name)
            hook_traces.put_back_attributes(module, before)


@contextmanager
def _own_generators_put_back(network: nn.Module, *inputs: Any) -> Iterator[None]:
    """Afterwards generators that the network holds, or is given, are as before."""
    held = quick_leaves((inputs, [attributes_but_children(module) for module in network.modules()]))
    undos: list[Callable[[], Any]] = []
    for x in {id(x): x for x in held}.values():
        if isinstance(x, torch.Generator):
            undos.append(partial(x.set_state, x.get_state()))
        elif isinstance(x, random.Random):
            undos.append(partial(x.setstate, x.getstate()))
        elif isinstance(x, np.random.RandomState):
            undos.append(partial(x.set_state, x.get_state()))
        elif isinstance(x, np.random.Generator):
            undos.append(partial(setattr, x.bit_generator, "state", x.bit_generator.state))
    try:
        yield
    finally:
        for undo in undos:
            undo()


def _generator_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _beside(network: nn.Module) -> list[nn.Parameter]:
    """What trains in modules that hooks refer to, such as an adapter beside the network."""
    modules = (x for x in hook_traces.reached(network) if isinstance(x, nn.Module))
    inside = set(network.parameters())
    found = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    return [p for p in found if p not in inside]


@contextmanager
def _filled_zeros(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters that are all zero, as gates and LoRA start, are random: they would hide what is behind."""
    filled = []
    for seed, parameter in enumerate(parameters):
        values = parameter.detach()
        local = (values.to_local() if isinstance(values, DTensor) else values).data  # whose version nobody counts
        if type(local) is Tensor and local.numel() and local.is_floating_point() and not local.any():
            noise = torch.randn(local.shape, generator=torch.Generator().manual_seed(seed))
            local.copy_(noise * (local.shape[-1] ** -0.5 if local.ndim > 1 else 0.5))
            filled.append(local)
    try:
        yield
    finally:
        for local in filled:
            if local.untyped_storage().size():  # else FSDP2 has freed it, and gathers the zeros anew
                local.zero_()


@contextmanager
def _at_rest(split: SplitNetwork) -> Iterator[None]:
    """Inside, FSDP2 holds no gathered parameters: backward would free those of modules whose forward is under way."""
    under_way = modules_in_forward(split.network)
    before, inside = split.around, set(map(id, split.network.modules()))
    split.around = before or [module for module in under_way if id(module) not in inside]
    for module in under_way:
        module.reshard()
    try:
        yield
    finally:
        split.around = before
        for module in under_way:
            module.unshard()
