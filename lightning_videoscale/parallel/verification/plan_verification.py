"""Does a split plan change what its network computes? One call, split and whole, side by side.

A plan says what to split and what to exchange, and nothing in it can say what it forgot. So a network is run twice on
the inputs of one call, on slices and on whole sequences; outputs, buffers, and the gradients that a random gradient of
the output gives, must agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.torch.precision import float32_products_are_coarse
from lightning_videoscale.compat.torch.trees import tree_leaves
from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.verification.exchange_watch import ExchangeWatch
from lightning_videoscale.parallel.verification.token_mixing import TokenMixing
from lightning_videoscale.parallel.verification.trial_run import Rehearsal, SplitNetwork, eval_mode, rehearse, stage
from lightning_videoscale.parallel.verification.user_code import user_code
from lightning_videoscale.ranks import gather_over_ranks

_BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-2}  # models compute norms and tables in float32, TF32 rounds
_COARSE = 0.1
_NO_ROOM = "a device has no room for the whole sequence"


@dataclass(frozen=True)
class PlanReport:
    """How far a network on slices is from the same network on the whole sequence; the largest of all ranks.

    Attributes:
        errors: Of each output, changed buffer and gradient, ‖split - whole‖ / ‖whole‖; for outputs in the 2-norm or
            the maximum norm, whichever is larger; gradients count for at least 1 % of the norm of all.
        bound: What rounding may explain in the dtypes at hand.
        seconds: What the comparison took.
        remark: What was left out, with the reason, and in which mode the network ran; empty if there is nothing to say.
    """

    errors: Mapping[str, float]
    bound: float
    seconds: float
    remark: str

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
        return f"{compared}, {self.seconds:.1f} s{'; ' if self.remark else ''}{self.remark}"


def compare(
    split: SplitNetwork,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradients: bool,
    group: ProcessGroup | None = None,
    may_fail: bool = False,
) -> PlanReport:
    """Runs the network split and whole and compares; collective over a group, or all ranks, which must all come here.

    Where a GPU has no room for the whole sequence, gradients are left out, or all. A network that draws random numbers
    is compared in eval mode. With ``may_fail`` all is left out where the whole network ends in an error, as with a hook
    that adds the slices of another split network.

    Raises:
        ValueError: On all ranks, if it mixes tokens where ranks have their own only, or the results differ.
    """
    started, gathered = time.perf_counter(), partial(gather_over_ranks, group=group)
    network, sp = split.network, split.context.mesh.sp
    device = _device_of(split, args, kwargs)
    remark = ""
    with stage(split), _fresh_peak(device):
        mixing = TokenMixing(split.context)
        with mixing.watching(network), ExchangeWatch(split, group).watching():
            on_slices = _attempt(split, args, kwargs, device, gradients, whole=False)
        assert on_slices is not None
        everyone = gathered((mixing.found, _has_room(device, sp.size)))
        found = [found for found, _ in everyone if found]  # or a dim that is as long as a slice by chance
        if gradients and on_slices.gradients is None:
            gradients, remark = False, "gradients left out, as checkpoints with use_reentrant=True give none"
        elif gradients and not all(room for _, room in everyone):
            gradients, remark = False, f"gradients left out, since {_NO_ROOM}"
        whole, why = None, _NO_ROOM
        try:
            whole = _attempt(split, args, kwargs, device, gradients, whole=True)
        except Exception as error:
            if not may_fail:
                raise
            why = f"it does not run on the whole sequence ({type(error).__name__}: {error})"
        if not all(gathered(whole is not None)):
            _refuse_mixing(split.name, found)
            return PlanReport({}, 0.0, time.perf_counter() - started, f"since {why}")
        assert whole is not None
        buffers = on_slices.buffers, whole.buffers
        if any(gathered(whole.drew)):  # in the region, each rank draws its own
            with eval_mode(network):
                on_slices = _attempt(split, args, kwargs, device, gradients, whole=False)
                whole = _attempt(split, args, kwargs, device, gradients, whole=True)
            assert on_slices is not None
            assert whole is not None
            if any(gathered(whole.drew)):
                _refuse_mixing(split.name, found)
                return PlanReport({}, 0.0, time.perf_counter() - started, "as it draws random numbers in eval mode too")
            remark = f"{remark}{', ' if remark else ''}in eval mode, as it draws random numbers"
    errors = _output_errors(on_slices.outputs, whole.outputs)
    errors |= {
        f"buffer {name}": _error(*(held.get(name) for held in buffers)) for name in sorted({*buffers[0], *buffers[1]})
    }
    if whole.gradients is not None:
        errors |= _gradient_errors(on_slices.gradients or {}, whole.gradients, sp)
    of_ranks = gathered(errors)
    errors = {name: max(theirs.get(name, 0.0) for theirs in of_ranks) for theirs in of_ranks for name in theirs}
    bound = _bound(device, on_slices.dtypes | whole.dtypes)
    report = PlanReport(errors, bound, time.perf_counter() - started, remark)
    if found and report.worst[1] > bound / 4:  # of what seems to mix tokens, less is believed to be rounding
        _refuse_mixing(split.name, found)
    if report.worst[1] > bound:
        raise ValueError(_difference_message(split.name, report))
    return report


def check_exchanges(
    split: SplitNetwork, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, compares: bool
) -> PlanReport | None:
    """Runs the network once, on slices and without gradients, and looks at its attention; collective over the group.

    For plans whose values need no comparison. What is seen is what a user may have changed: another attention backend,
    a mask, a module that attends to its own tokens only. What seems to mix tokens otherwise, such as a convolution
    that was added to a block, need not: another dim may be as long as a slice. Nor need hooks and modules of users,
    of which nothing is seen. Then all is compared, and reported.

    Args:
        split: The network.
        args: What it is called with.
        kwargs: As ``args``, by name.
        compares: Whether to compare where tokens seem to be mixed, or code of users runs.

    Raises:
        ValueError: On all ranks of the group, naming the module.
    """
    group, device = split.context.mesh.sp.group, _device_of(split, args, kwargs)
    with stage(split), _fresh_peak(device):  # around the comparison too: FSDP2 has forgotten what it gathered
        mixing = TokenMixing(split.context)
        with mixing.watching(split.network), ExchangeWatch(split, group).watching():
            _attempt(split, args, kwargs, device, gradients=False, whole=False)
            attention = [found for found in mixing.found if "attention" in found.rpartition(" calls ")[2]]
            if attention:
                raise ValueError(_mixing_message(split.name, attention))
        if not compares:
            return None
        together = None if _is_sharded(split) else group  # ranks that hold parameters for each other run alike
        theirs = user_code(split.network, mixing.region)
        has_room = _has_room(device, split.context.mesh.sp.size)
        everyone = gather_over_ranks((bool(mixing.found), bool(theirs), has_room), together)
        mixes, runs_theirs = (any(of_ranks) for of_ranks in list(zip(*everyone, strict=True))[:2])
        if not (mixes or runs_theirs):
            return None
        if not (mixes or all(room for _, _, room in everyone)):
            return PlanReport({}, 0.0, 0.0, f"since {_NO_ROOM}")
        gradients = torch.is_grad_enabled()
        try:
            report = compare(split, args, kwargs, gradients=gradients, group=together, may_fail=not mixes)
        except ValueError as error:
            if theirs:
                error.add_note(_of_users(theirs))
            raise
        return report if mixes or report.remark else None


def _is_sharded(split: SplitNetwork) -> bool:
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in split.network.parameters())


def _device_of(split: SplitNetwork, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    tensors = (x for x in (*tree_leaves((args, kwargs)), *split.network.parameters()) if isinstance(x, Tensor))
    return next((x.device for x in tensors), torch.device("cpu"))


def _attempt(
    split: SplitNetwork,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    gradients: bool,
    *,
    whole: bool,
) -> Rehearsal | None:
    """None where the whole sequence has no room."""
    try:
        with split.whole() if whole else nullcontext():
            return rehearse(split, args, kwargs, device, gradients=gradients)
    except Exception as error:
        if whole and not _is_sharded(split) and isinstance(error, torch.OutOfMemoryError):
            return None  # nobody waits for this rank
        if not whole and (replaced := split.replaced()):
            error.add_note(
                f"{', '.join(replaced[:3])}{' and others' * (len(replaced) > 3)} of {split.name} are other modules "
                "than when its sequence was split, which is split and gathered at those before. Add adapters, and "
                "replace or leave out blocks, before the split, which a Trainer makes when fit begins. Or call the "
                "undo that parallelize has returned, change the network, and split it again."
            )
        error.add_note(
            f"Raised while {split.name} ran {'whole' if whole else 'on slices'}, without compilation, to verify its "
            "split plan; verify_plan=False leaves that out."
            + (
                " The undo that the plan's attention= returns must restore what was before."
                if whole
                else " Hooks inside of it have hidden states of this rank's tokens only; "
                "lightning_videoscale.parallel.split_sequence gives those of what is added to them."
            )
        )
        raise


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


def _of_users(theirs: list[str]) -> str:
    """A hint where the cause is not the plan."""
    listed = "; ".join(theirs[:3]) + f", and {len(theirs) - 3} others" * (len(theirs) > 3)
    return (
        "The split plan is one that tests hold to one device, so look at what else runs on this rank's tokens: "
        f"{listed}. With lightning_videoscale.parallel.gather_sequence it sees all tokens, and split_sequence gives "
        "this rank's of what is whole. Hooks on the network itself see all tokens if they are added before the split."
    )


def _refuse_mixing(name: str, found: list[list[str]]) -> None:
    if found:
        raise ValueError(_mixing_message(name, found[0]))


def _mixing_message(name: str, found: list[str]) -> str:
    return (
        f"{name} mixes tokens where its sequence is split and every rank has only its own: "
        f"{'; '.join(dict.fromkeys(found))}. Name attention in the plan's attention=, and let the plan split after "
        "the others, gather before them, or name them in whole=."
    )


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


def _output_errors(split: list[Tensor], whole: list[Tensor]) -> dict[str, float]:
    shapes = [[tuple(x.shape) for x in outputs] for outputs in (split, whole)]
    if shapes[0] != shapes[1]:
        return {f"output shapes {shapes[0]} rather than {shapes[1]} (gather_sequence makes a slice whole)": math.inf}
    return {f"output {n}": _error(*pair) for n, pair in enumerate(zip(split, whole, strict=True))}


def _gradient_errors(
    split: Mapping[str, Tensor | None], whole: Mapping[str, Tensor | None], sp: Axis
) -> dict[str, float]:
    differences, norms = {}, {}
    for name, expected in whole.items():
        if expected is None or not expected.isfinite().all():
            continue
        mine = split.get(name)
        averaged = (torch.zeros_like(expected) if mine is None else mine).float().contiguous()
        dist.all_reduce(averaged, group=sp.group)
        norms[name] = float(expected.norm())
        differences[name] = float((averaged / sp.size - expected).norm())
    floor = 1e-2 * sum(norm**2 for norm in norms.values()) ** 0.5
    return {name: _ratio(differences[name], max(norm, floor)) for name, norm in norms.items()}


def _error(split: Tensor | None, whole: Tensor | None) -> float:
    """Where the whole is finite; infinite if the split is not."""
    if split is None or whole is None or split.shape != whole.shape:
        return math.inf
    there = whole.isfinite()
    split, whole = (torch.where(there, x, torch.zeros_like(x)).double() for x in (split, whole))
    return max(
        _ratio(*(float(torch.linalg.vector_norm(x, order)) for x in (split - whole, whole))) for order in (2, torch.inf)
    )


def _ratio(difference: float, norm: float) -> float:
    ratio = difference / max(norm, 1e-300)
    return ratio if math.isfinite(ratio) else math.inf


def _bound(device: torch.device, dtypes: set[torch.dtype]) -> float:
    coarse = torch.is_autocast_enabled(device.type) or float32_products_are_coarse(device.type)
    return max([_BOUNDS.get(dtype, _COARSE) for dtype in dtypes] + [_COARSE if coarse else 0.0])
