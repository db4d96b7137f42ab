"""Do the ranks of a group compute with the same numbers? They must, as each takes its slice of what it was given.

A generator of a user's own that is seeded by the global rank, or not at all, gives every rank another noise or another
timestep. Each rank then splits another input, and neither a shape nor a loss shows it. So inputs and losses are
compared, in the first calls and then now and then. So are the gradients with which backward begins: rewards that differ
between ranks may have one loss, as advantages of zero mean have 0.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import is_wrapper, keystr, tensors_of, tree_flatten_with_path
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.plan import ordered_names
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.ranks import gather_over_ranks

_FIRST = 20
_INTERVAL = 211  # a prime, so that of several calls in a step each has its turn
_TOLERANCE = 1e-3  # of the relative distance: a nondeterministic encoder stays below, another draw does not
_OF_GRADIENTS = 0.1  # of what is decoded and judged in bfloat16; another reward does not stay below
_LEAST_LOSS = 1e-3  # that of advantages of zero mean is rounding alone, and gradients are compared beside it
_PART = 2**22  # words that a checksum takes at once, which bounds its memory


class Agreement:
    """Compares values over the ranks that share a sequence: in the first 20 calls and then in every 211th.

    A call that compares is collective over the group: one message of two numbers, for which the host waits once. Where
    these differ, the values follow. Other calls do nothing. Calls with and without gradients are counted apart.

    Args:
        mesh: Whose sp ranks must agree; all of them make the same calls.
        transport: Of the message.
    """

    def __init__(self, mesh: SequenceMesh, transport: Transport) -> None:
        self._axis = mesh.sp
        self._device = torch.device(mesh.device_mesh.device_type)
        self._transport = transport
        self._calls: Counter[bool] = Counter()
        self._warned = False

    def check(
        self, what: str, values: Mapping[str, Any], *, tolerance: float = _TOLERANCE, least_norm: float = 0.0
    ) -> None:
        """Compares tensors, numbers and strings, nested in any way; of other objects their types.

        Args:
            what: Names the values in messages, in the plural.
            values: By name.
            tolerance: The largest relative distance of floats that is no error.
            least_norm: What distances of tensors are relative to at least, where these may be sums of about 0.

        Raises:
            ValueError: On all ranks, if floats differ by a larger distance, or anything else at all.
        """
        mode = torch.is_grad_enabled()
        self._calls[mode] += 1
        if self._calls[mode] <= _FIRST or self._calls[mode] % _INTERVAL == 0:
            with torch.no_grad():
                leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(dict(values))[0]}
                self._compare(what, leaves, tolerance, least_norm)

    def check_loss(self, loss: Tensor) -> None:
        """Compares the losses of a micro-batch; see `check`."""
        self.check("losses", {"loss": loss}, least_norm=_LEAST_LOSS)

    def _compare(self, what: str, leaves: dict[str, Any], *bounds: float) -> None:
        described = {name: _describe(leaves[name]) for name in sorted(leaves)}
        tensors = {name: leaves[name].to(self._device) for name in described if _has_numbers(leaves[name])}
        text = hashlib.blake2b(repr(described).encode(), digest_size=8).digest()
        sums = [torch.tensor([int.from_bytes(text, "little", signed=True)], device=self._device)]
        sums.append(_checksum(torch.cat([sums[0], *map(_checksum, tensors.values())])))
        everyone = self._transport.all_gather(torch.cat(sums), (2,) * self._axis.size, self._axis).tolist()
        if len(set(zip(everyone[::2], everyone[1::2], strict=True))) > 1:
            self._explain(what, described, tensors, *bounds)

    def _explain(
        self, what: str, described: dict[str, Any], tensors: dict[str, Tensor], tolerance: float, least_norm: float
    ) -> None:
        """Raises or warns on all ranks, by how far apart their values are."""
        ranks = list(self._axis.ranks)
        everyone = gather_over_ranks(described, self._axis.group)
        apart: dict[str, float] = {}
        for name in sorted(set().union(*everyone)):
            seen = [theirs.get(name, "nothing") for theirs in everyone]
            if any(value != seen[0] for value in seen):
                floats = all(isinstance(value, float) for value in seen)
                apart[f"{name} ({seen})"] = max(map(_relative(seen[0]), seen)) if floats else float("inf")
            elif name in tensors:
                apart[name] = self._distance(tensors[name], least_norm)
        apart = {name: distance for name, distance in apart.items() if distance > 0}
        listed = ", ".join(
            name if distance == float("inf") else f"{name} by a relative distance of {distance:.1e}"
            for name, distance in apart.items()
        )
        if any(not distance <= tolerance for distance in apart.values()):
            raise ValueError(
                f"Ranks {ranks} share one batch and must compute with the same numbers, but their {what} differ in "
                f"{listed}. Do not seed a generator by the global rank, nor leave it unseeded "
                "(np.random.default_rng(), random.Random()): seed it by the data-parallel rank "
                "(strategy.data_parallel_rank, mesh.dp.rank) and the step, or draw from the default generators of "
                "torch, NumPy and Python, which strategies seed alike on these ranks."
            )
        if not self._warned and self._axis.rank == 0:
            warnings.warn(
                f"On ranks {ranks}, which share one batch, the {what} differ slightly in {listed}, as when an encoder "
                "is not deterministic. Their gradients are then as inexact as these.",
                stacklevel=2,
            )
        self._warned = True

    def _distance(self, x: Tensor, least_norm: float) -> float:
        """The largest of all ranks' distances from the first one's tensor; collective."""
        first = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(first.view(-1).view(torch.uint8), self._axis.ranks[0], group=self._axis.group)
        if x.is_floating_point() or x.is_complex():
            wide = torch.complex128 if x.is_complex() else torch.float64
            # Infinities and NaNs that all ranks have are no difference.
            mine, theirs = (y.to(wide).nan_to_num(0.0, 0.0, 0.0) for y in (x, first))
            norm = theirs.norm().clamp(min=least_norm)
            distance = (mine - theirs).norm() / norm if not mine.equal(theirs) else torch.zeros(())
        else:
            distance = torch.tensor(0.0 if x.equal(first) else float("inf"))
        own = distance.to(self._device, torch.float64).view(1)
        return float(self._transport.all_gather(own, (1,) * self._axis.size, self._axis).max())


def compare_inputs(agreement: Agreement) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Returns a forward pre-hook that compares what a module is called with."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ordered_names(module)
        names += [f"argument {position}" for position in range(len(names), len(args))]
        agreement.check(f"inputs of {type(module).__name__}", dict(zip(names, args, strict=False)) | kwargs)

    return hook


def compare_gradients(agreement: Agreement, module: nn.Module, output: Any) -> None:
    """Has backward compare the gradients that come to what a module has returned."""

    def compare(grad: Tensor, name: str) -> None:
        what = f"gradients of what {type(module).__name__} has returned"
        agreement.check(what, {name: grad}, tolerance=_OF_GRADIENTS)

    for number, x in enumerate(tensors_of(output)):
        if x.requires_grad:
            x.register_hook(partial(compare, name=f"output {number}"))


def _has_numbers(leaf: Any) -> bool:
    """Whether it is a tensor with memory of its own; a ``DTensor`` is a group's already."""
    is_plain = isinstance(leaf, Tensor) and not is_wrapper(leaf)
    return is_plain and leaf.layout is torch.strided and not (leaf.is_meta or leaf.is_nested or leaf.is_quantized)


def _describe(leaf: Any) -> Any:
    """What must be equal on all ranks, as plain data."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested:  # whose ragged size has a number that each process counts for itself
            return f"{leaf.dtype} nested {leaf.ndim} {leaf.layout}"
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    return leaf if isinstance(leaf, bool | int | float | str) else type(leaf).__name__


def _relative(first: float) -> Callable[[float], float]:
    return lambda other: 0.0 if other == first else abs(other - first) / abs(first) if first else float("inf")


def _checksum(x: Tensor) -> Tensor:
    """All bits of a tensor and where they are, as one int64: a sum modulo 2^64, the same in any order of adding."""
    # Copied, since a single element counts as contiguous with any stride.
    flat = x.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    words = F.pad(flat, (0, -len(flat) % 4)).view(torch.int32)
    generator, total = torch.Generator(x.device).manual_seed(0), torch.zeros(1, dtype=torch.int64, device=x.device)
    for part in words.split(_PART):
        weights = torch.empty(part.shape, dtype=torch.int64, device=x.device).random_(generator=generator)
        total += (weights * part).sum()
    return total
