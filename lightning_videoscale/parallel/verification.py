"""Does a split plan change what its network computes? One call, split and whole, side by side.

A plan says what to split and what to exchange, and nothing in it can say what it forgot. So a network is run twice on
the inputs of one call, on slices and on whole sequences; outputs, buffers, and the gradients that a random gradient of
the output gives, must agree. Nothing of it stays: neither gradients nor draws of generators nor what buffers became.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.plan import SplitPlan
from lightning_videoscale.parallel.randomness import RegionRandomness
from lightning_videoscale.parallel.token_mixing import TokenMixing

_MOST_ELEMENTS = 1 << 28  # of gradients that are compared; small parameters come first
_BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-2}  # models compute norms and tables in float32, TF32 rounds
_COARSE = 0.1


@dataclass(frozen=True)
class PlanReport:
    """How far a network on slices is from the same network on the whole sequence; the largest of all ranks.

    Attributes:
        errors: Of each output, changed buffer and gradient, ‖split - whole‖ / ‖whole‖; for outputs in the 2-norm or
            the maximum norm, whichever is larger; gradients count for at least 1 % of the norm of all.
        bound: What rounding may explain in the dtypes at hand.
        seconds: What the comparison took.
        left_out: What was not compared, with the reason; empty if everything was.
    """

    errors: Mapping[str, float]
    bound: float
    seconds: float
    left_out: str

    @property
    def worst(self) -> tuple[str, float]:
        """What differs most, and by how much."""
        return max(self.errors.items(), key=lambda item: item[1], default=("nothing", 0.0))

    def __str__(self) -> str:
        name, error = self.worst
        compared = (
            f"split and whole differ by at most {error:.1e} ({name}; rounding explains {self.bound:.0e})"
            if self.errors
            else "not compared"
        )
        return f"{compared}, {self.seconds:.1f} s{'; ' if self.left_out else ''}{self.left_out}"


class SplitNetwork:
    """A network whose sequence is split, and that can run whole for a while.

    Args:
        network: The network.
        plan: How it is split.
        context: What its hooks and its attention share.
        randomness: Of its region.
    """

    def __init__(
        self, network: nn.Module, plan: SplitPlan, context: SequenceContext, randomness: RegionRandomness
    ) -> None:
        self.name = type(network).__name__  # before a data-parallel engine makes another class of it
        self.network, self.plan, self.context, self.randomness = network, plan, context, randomness
        self._restore_attention = plan.attention(network, context)

    def restore_attention(self) -> None:
        """Takes the exchanges back."""
        self._restore_attention()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the network computes on whole sequences, with the attention it had before it was split."""
        # Later changes, such as compilation, may have wrapped a forward that the attention's undo sets back.
        forwards = [(module, vars(module).get("forward")) for module in self.network.modules()]
        self._restore_attention()
        self.context.suspended = True
        try:
            yield
        finally:
            self.context.suspended = False
            self._restore_attention = self.plan.attention(self.network, self.context)
            for module, forward in forwards:
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward


@dataclass
class _Results:
    """Of one run. All tensors are detached."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    drew: bool = False


def compare(split: SplitNetwork, args: tuple[Any, ...], kwargs: dict[str, Any], *, gradients: bool) -> PlanReport:
    """Runs the network split and whole and compares; collective over all ranks, which must all come here.

    Gradients of at most 2^28 elements are compared, small parameters first. They are left out, and then the rest too,
    where a GPU has no room for the whole sequence. A network that draws random numbers is compared in eval mode.

    Args:
        split: The network.
        args: What it is called with; equal on all ranks of a group.
        kwargs: As ``args``, by name.
        gradients: Whether to compare gradients, too.

    Raises:
        ValueError: On all ranks, if it mixes tokens where ranks have their own only, or the results differ.
    """
    started = time.perf_counter()
    network, mesh = split.network, split.context.mesh
    device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), torch.device("cpu"))
    left_out = ""
    with ExitStack() as contexts:
        contexts.enter_context(_at_rest(network))
        contexts.enter_context(torch.compiler.set_stance("force_eager"))
        contexts.enter_context(_filled_zeros(network))
        contexts.enter_context(_fresh_peak(device))

        def run(whole: bool) -> _Results | None:
            with split.randomness.put_back(device), ExitStack() as how:
                if whole:
                    how.enter_context(split.whole())
                try:
                    return _run(network, args, kwargs, device, gradients)
                except torch.OutOfMemoryError:
                    if not whole or _is_sharded(network):  # peers are in the middle of an exchange
                        raise
                except Exception as error:
                    error.add_note(
                        f"Raised while {split.name} ran {'whole' if whole else 'split'} to verify its split "
                        "plan. The undo that the plan's attention= returns must restore all; verify_plan=False skips "
                        "the comparison."
                    )
                    raise
            return None

        mixing = TokenMixing(split.context)
        with mixing.watching(network):
            on_slices = run(whole=False)
        assert on_slices is not None
        everyone = _agree((mixing.found, _has_room(device, mesh.sp.size)))
        _refuse_mixing(split.name, [found for found, _ in everyone if found])
        if gradients and not all(room for _, room in everyone):
            gradients, left_out = False, "gradients left out, since the whole sequence has no room in memory"
        at_once = run(whole=True)
        if any(_agree(at_once is None)):
            left_out = "left out, since the whole sequence has no room in memory"
            return PlanReport({}, 0.0, time.perf_counter() - started, left_out)
        assert at_once is not None
        buffers = on_slices.buffers, at_once.buffers
        if any(_agree(at_once.drew)):
            with _eval_mode(network):
                on_slices, at_once = run(whole=False), run(whole=True)
            assert on_slices is not None
            assert at_once is not None
    errors = _output_errors(on_slices.outputs, at_once.outputs)
    errors |= {
        f"buffer {name}": _error(*(held.get(name) for held in buffers)) for name in sorted({*buffers[0], *buffers[1]})
    }
    if gradients:
        errors |= _gradient_errors(on_slices.gradients, at_once.gradients, split.context)
    everyone = _agree(errors)
    errors = {name: max(theirs.get(name, 0.0) for theirs in everyone) for theirs in everyone for name in theirs}
    bound = _bound(device, on_slices.dtypes | at_once.dtypes)
    report = PlanReport(errors, bound, time.perf_counter() - started, left_out)
    if report.worst[1] > bound:
        raise ValueError(_difference_message(split.name, report))
    return report


def _difference_message(name: str, report: PlanReport) -> str:
    worst = sorted(report.errors.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{what} by {error:.2g}" for what, error in worst)
    return (
        f"{name} computes something else where its sequence is split. In relation to the whole "
        f"sequence differ: {listed}; rounding explains {report.bound:.0e}. Something in the region looks at tokens of "
        "other ranks and the split plan does not say so: attention that is not exchanged or was causal, a mean, "
        "softmax, cumsum or roll over tokens, positions counted from x.shape[1], or a missing gather. Exchange it in "
        "the plan's attention=, split the positions as inputs, or let the plan split after it or gather before it. "
        "verify_plan=False trains it as it is."
    )


def _refuse_mixing(name: str, found: list[list[str]]) -> None:
    if found:
        listed = "; ".join(dict.fromkeys(found[0]))
        raise ValueError(
            f"{name} mixes tokens where its sequence is split and every rank has only its own: "
            f"{listed}. Exchange attention in the plan's attention= (sequence_parallel_attention), and let the plan "
            "split after the others or gather before them."
        )


def _run(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, gradients: bool
) -> _Results:
    leaves: dict[str, Tensor] = {}

    def copied(x: Tensor) -> Tensor:
        if not (gradients and x.requires_grad):
            return x.detach().clone()
        leaf = leaves[f"input {len(leaves)}"] = x.detach().requires_grad_()
        return leaf.clone()  # the network may write into it, as it may not into a leaf

    args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
    before = _generator_states(device)
    with _kept_buffers(network) as changed, torch.set_grad_enabled(gradients):
        torch.clear_autocast_cache()  # of casts of parameters with other values
        with _parameters_in_use(network) as parameters:
            output = network(*args, **kwargs)
        drew = not all(map(torch.equal, before, _generator_states(device)))
        outputs = [x for x in _tensors(output) if x.is_floating_point()]
        results = _Results([x.detach() for x in outputs], buffers=changed(), drew=drew)
        results.dtypes = {x.dtype for x in (*outputs, *parameters.values()) if x.is_floating_point()}
        if gradients:
            leaves |= {name: p for name, p in _smallest(parameters).items() if p.requires_grad}
            results.gradients = _gradients(outputs, leaves)
        torch.clear_autocast_cache()
    return results


def _gradients(outputs: list[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Of the leaves, from gradients of the outputs that are random and the same on all ranks; fills no ``.grad``."""
    roots = [x for x in outputs if x.requires_grad]
    if not roots or not leaves:
        return {}
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in roots]
    return dict(
        zip(leaves, torch.autograd.grad(roots, list(leaves.values()), cotangents, allow_unused=True), strict=True)
    )


@contextmanager
def _parameters_in_use(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fills with the parameters by name as they are in forward: FSDP2 puts the gathered ones there meanwhile."""
    names = {module: f"{name}." if name else "" for name, module in network.named_modules()}
    found: dict[str, Tensor] = {}

    def look(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters() if module in names else ():
            if not isinstance(parameter, DTensor):
                found[names[module] + name] = parameter

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _smallest(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    chosen, room = {}, _MOST_ELEMENTS
    for name, parameter in sorted(parameters.items(), key=lambda item: (_elements(item[1]), item[0])):
        room -= _elements(parameter)
        if room < 0:
            break
        chosen[name] = parameter
    return chosen


def _elements(parameter: Tensor) -> int:
    count: int = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 has emptied what it partitioned
    return count


@contextmanager
def _kept_buffers(network: nn.Module) -> Iterator[Any]:
    """Yields a function that returns the buffers that were written since, by name; puts all back at the end."""
    held = {
        f"{path}.{name}": (module, name, x, x.clone())
        for path, module in network.named_modules()
        for name, x in module.named_buffers(recurse=False)
    }

    def changed() -> dict[str, Tensor]:
        now = {key: module._buffers[name] for key, (module, name, _, _) in held.items()}
        return {key: x.clone() for key, x in now.items() if x is not None and not torch.equal(x, held[key][3])}

    try:
        yield changed
    finally:
        for module, name, x, copy in held.values():
            if not torch.equal(x, copy):
                x.data.copy_(copy)
            module._buffers[name] = x


@contextmanager
def _filled_zeros(network: nn.Module) -> Iterator[None]:
    """Inside, parameters that are all zero, as gates and LoRA start, are random: they would hide what is behind."""
    filled = []
    for seed, parameter in enumerate(network.parameters()):
        values = parameter.detach()
        local = (values.to_local() if isinstance(values, DTensor) else values).data  # whose version nobody counts
        if local.numel() and local.is_floating_point() and not local.any():
            noise = torch.randn(local.shape, generator=torch.Generator().manual_seed(seed))
            local.copy_(noise * (local.shape[-1] ** -0.5 if local.ndim > 1 else 0.5))
            filled.append(local)
    try:
        yield
    finally:
        for local in filled:
            local.zero_()


@contextmanager
def _at_rest(network: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 holds no gathered parameters: backward would free those of modules whose forward is under way."""
    under_way: list[FSDPModule] = []
    sharded = next((module for module in network.modules() if isinstance(module, FSDPModule)), None)
    if sharded is not None:
        # Private, as FSDP2 tells nobody else in whose forward, also around this network, a call is.
        states = sharded._get_fsdp_state()._state_ctx.all_states
        modules = [module for state in states if state._training_state.name == "FORWARD" for module in state._modules]
        under_way = [module for module in modules if isinstance(module, FSDPModule)]
    for module in under_way:
        module.reshard()
    try:
        yield
    finally:
        for module in under_way:
            module.unshard()


def _is_sharded(network: nn.Module) -> bool:
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in network.parameters())


@contextmanager
def _eval_mode(network: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _fresh_peak(device: torch.device) -> Iterator[None]:
    """A peak of memory of its own, inside and, for whoever measures the steps, afterwards."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _has_room(device: torch.device, times: int) -> bool:
    """Whether the device can hold, so many times, what the run on a slice has needed at its peak."""
    if device.type != "cuda":
        return True
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return (torch.cuda.max_memory_allocated(device) - allocated) * times <= free


def _generator_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _agree(mine: Any) -> list[Any]:
    """What every rank says."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, also those in the attributes of an object."""
    leaves = tree_leaves(output)
    leaves += [y for x in leaves if not isinstance(x, Tensor) and hasattr(x, "__dict__") for y in tree_leaves(vars(x))]
    return [x for x in leaves if isinstance(x, Tensor)]


def _output_errors(split: list[Tensor], whole: list[Tensor]) -> dict[str, float]:
    shapes = [[tuple(x.shape) for x in outputs] for outputs in (split, whole)]
    if shapes[0] != shapes[1]:
        return {f"output shapes {shapes[0]} rather than {shapes[1]}": float("inf")}
    return {f"output {n}": _error(*pair) for n, pair in enumerate(zip(split, whole, strict=True))}


def _gradient_errors(
    split: dict[str, Tensor | None], whole: dict[str, Tensor | None], context: SequenceContext
) -> dict[str, float]:
    sp = context.mesh.sp
    differences, norms = {}, {}
    for name, expected in whole.items():
        if expected is None:
            continue
        mine = split.get(name)
        averaged = (torch.zeros_like(expected) if mine is None else mine).float().contiguous()
        dist.all_reduce(averaged, group=sp.group)
        norms[name] = float(expected.norm())
        differences[name] = float((averaged / sp.size - expected).norm())
    floor = 1e-2 * sum(norm**2 for norm in norms.values()) ** 0.5
    return {name: differences[name] / max(norm, floor, 1e-300) for name, norm in norms.items()}


def _error(split: Tensor | None, whole: Tensor | None) -> float:
    """Where the whole is finite; infinite if the split is not."""
    if split is None or whole is None or split.shape != whole.shape:
        return float("inf")
    there = whole.isfinite()
    split, whole = (torch.where(there, x, torch.zeros_like(x)).double() for x in (split, whole))
    errors = [float(torch.linalg.vector_norm(split - whole, p)) for p in (2, torch.inf)]
    norms = [max(float(torch.linalg.vector_norm(whole, p)), 1e-300) for p in (2, torch.inf)]
    worst = max(error / norm for error, norm in zip(errors, norms, strict=True))
    return worst if worst == worst else float("inf")


def _bound(device: torch.device, dtypes: set[torch.dtype]) -> float:
    coarse = torch.is_autocast_enabled(device.type) or torch.get_float32_matmul_precision() != "highest"
    return max([_BOUNDS.get(dtype, _COARSE) for dtype in dtypes] + [_COARSE if coarse else 0.0])
