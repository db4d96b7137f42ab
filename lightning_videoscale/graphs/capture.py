"""Captures one pass of a network, forward and backward: `capture` makes a `CapturedPass`.

Nothing of the pass is computed meanwhile. Backward is recorded as the autograd engine runs it. At a few blocks'
entrances the engine comes to a `_Cut`, which ends one graph and begins the next. So each graph holds whole layers, and
gradients are complete, last layers first, while the next graph still runs.

All graphs of a network take their memory from one pool. A graph's activations, outputs and gradients lie there only
until the next forward, so tensors over them do not own their memory (`alias`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_videoscale.compat.torch.graphs import alias
from lightning_videoscale.compat.torch.modules import parameters_of
from lightning_videoscale.compat.torch.trees import tree_flatten, tree_unflatten
from lightning_videoscale.graphs.calls import NetworkCall
from lightning_videoscale.graphs.host_constants import HostConstants, differ
from lightning_videoscale.graphs.recorder import Recorder
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.region_randomness import RegionRandomness

_OTHER_SEED = "set_current_seed"
"""Named by torch's error for a seed that is set in a capture."""


@dataclass
class Segment:
    """A part of backward.

    Attributes:
        graph: Its kernels.
        parameters: Whose gradients are complete when it has run.
        gradients: Of these parameters, in memory of the pool.
    """

    graph: torch.cuda.CUDAGraph
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class CapturedPass:
    """A pass that can be replayed.

    Attributes:
        inputs: Tensors of the arguments, to be filled before forward.
        forward: Its kernels.
        outputs: Leaves of what the network returns; tensors lie in memory of the pool.
        structure: Of the outputs.
        output_gradients: To be filled before backward, one for each output that requires it, else None.
        segments: Of backward, those that run first in front; empty without gradients.
        input_gradients: For each input, in memory of the pool; None where it requires none.
        constants: What the kernels read beside inputs and parameters; None where that was not asked for.
        messages: Keeps the memory in which its messages lie.
        is_gone: Whether it was let go, and can be replayed no more.
    """

    inputs: list[Tensor]
    forward: torch.cuda.CUDAGraph
    outputs: list[Any]
    structure: Any
    output_gradients: list[Tensor | None]
    segments: list[Segment]
    input_gradients: list[Tensor | None]
    constants: HostConstants | None = None
    messages: object = None
    is_gone: bool = False

    def let_go(self) -> None:
        """Lets its graphs go, whoever still holds the pass; the device is to have run them."""
        self.is_gone, self.messages = True, None
        for graph in (self.forward, *(segment.graph for segment in self.segments)):
            graph.reset()

    @property
    def last(self) -> int:
        """The segment that runs last: those behind it have no gradients that anybody takes."""
        if any(gradient is not None for gradient in self.input_gradients):
            return len(self.segments) - 1
        return max((number for number, segment in enumerate(self.segments) if segment.parameters), default=-1)


def capture(
    network: nn.Module,
    forward: Callable[..., Any],
    call: NetworkCall,
    entrances: Sequence[nn.Module],
    recorder: Recorder,
    region: Callable[[], AbstractContextManager[object]],
    constants: HostConstants | None = None,
    draws: bool = False,
) -> CapturedPass:
    """Records a pass.

    Args:
        network: Whose.
        forward: Its forward.
        call: Inputs that the pass is recorded for.
        entrances: Modules in front of which backward is cut.
        recorder: Records.
        region: Holds the region in which random numbers are drawn.
        constants: Takes what the forward copies from the host; None if it does not.
        draws: Whether the forward draws random numbers, which checkpoints would have to draw again.

    Raises:
        RuntimeError: If something in the pass cannot be captured.
    """
    inputs = [_static(x) for x in call.tensors]
    of_tensor = iter(inputs)
    leaves = [next(of_tensor) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.structure)
    cuts = _Cuts()
    with recorder.stream(), fresh_parameters(network) as parameters, constants or nullcontext(), region():
        with cuts.in_front_of(entrances), _casting_anew(), recorder.recording() as graph:
            outputs, structure = tree_flatten(forward(*args, **kwargs))
        needs = [isinstance(x, Tensor) and x.requires_grad for x in outputs]
        refuse_other_leaves([x for x, need in zip(outputs, needs, strict=True) if need], [*inputs, *parameters])
        gradients = [torch.zeros_like(x) if need else None for x, need in zip(outputs, needs, strict=True)]
        trained = [x for x in (*inputs, *parameters) if x.requires_grad]
        if constants is not None:
            constants.end_forward()
        with _refusing_to_draw_again() if draws else nullcontext():
            segments, others = _record_backward(
                [x for x, need in zip(outputs, needs, strict=True) if need],
                [x for x in gradients if x is not None],
                trained,
                cuts,
                recorder,
            )
    if any(x.grad is not None for x in trained):
        raise RuntimeError("Its backward goes backward by itself, and keeps gradients that a graph would not have.")
    for segment in segments:
        segment.parameters = [parameters[fresh] for fresh in segment.parameters]
    of_inputs = [others.get(x) for x in inputs]
    for static in inputs:
        static.requires_grad_(False)
    aliases = [alias(x.detach()) if isinstance(x, Tensor) else x for x in outputs]
    return CapturedPass(inputs, graph, aliases, structure, gradients, segments, of_inputs, constants)


def capture_with_constants(
    record: Callable[[HostConstants], CapturedPass], device: torch.device, recorder: Recorder
) -> CapturedPass:
    """Records a pass that may copy from the host: then twice, as what differs from call to call is no constant.

    Args:
        record: Records it, by `capture`.
        device: To which is copied.
        recorder: By which it is recorded.

    Raises:
        RuntimeError: If what is copied differs, or something in the pass cannot be captured.
    """
    first, second = (HostConstants(device, recorder.beside) for _ in range(2))
    captured = record(first)
    if first.kept:
        captured = record(second)
        if differ(first, second):
            raise RuntimeError("What it copies from the host differs between two calls.")
    return captured


@contextmanager
def without_traces(context: SequenceContext | None, device: torch.device) -> Iterator[None]:
    """What a capture draws is drawn again by its replay, and what layers find out meanwhile was never computed."""
    randomness = RegionRandomness(0) if context is None else context.randomness
    with randomness.put_back(device):
        if context is None:
            yield
            return
        begun = context.record
        context.record = replace(begun, known={})
        try:
            yield
        finally:
            context.record = begun


@contextmanager
def _refusing_to_draw_again() -> Iterator[None]:
    """Inside, a checkpoint that brings generators back breaks the capture.

    Where nothing is drawn, generators are brought back to the seed that they have, without effect. A recomputed layer
    that draws would have other numbers than its forward: they follow from the place in the graph.
    """
    torch.cuda.manual_seed(torch.cuda.initial_seed() ^ 1)  # torch refuses other seeds than this while it captures
    try:
        yield
    except RuntimeError as error:
        if _OTHER_SEED in str(error):
            raise RuntimeError("Checkpoints would draw random numbers again, such as those of dropout.") from error
        raise


@contextmanager
def fresh_parameters(network: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Inside, the network has other parameters of the same values, in the same memory.

    The autograd engine has the gradients of a parameter wait for the stream on which it first saw that parameter, also
    where nobody accumulates them. That stream is outside of the capture, and these parameters it has not seen.

    Yields:
        The network's parameters by those that take their place.
    """
    places = [
        (parameters, name, own)
        for parameters in map(parameters_of, network.modules())
        for name, own in parameters.items()
        if own is not None
    ]
    fresh = {id(own): nn.Parameter(own.detach(), requires_grad=own.requires_grad) for _, _, own in places}
    try:
        for parameters, name, own in places:
            parameters[name] = fresh[id(own)]
        yield {fresh[id(own)]: own for _, _, own in places}
    finally:
        for parameters, name, own in places:
            parameters[name] = own


def _static(x: Tensor) -> Tensor:
    """A tensor that takes the place of an argument in all replays."""
    static = torch.empty_like(x, requires_grad=False)
    static.copy_(x.detach())
    return static.requires_grad_(x.requires_grad and torch.is_grad_enabled())


def _record_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], trained: Sequence[Tensor], cuts: _Cuts, recorder: Recorder
) -> tuple[list[Segment], dict[Tensor, Tensor]]:
    """Returns the parts of backward, and the gradients of what is no parameter."""
    if not outputs or not trained:
        return [], {}
    segments: list[Segment] = []
    found: list[Tensor | None] = []
    completed: dict[Tensor, Segment] = {}

    def next_segment() -> None:
        recorder.end()
        segments.append(Segment(recorder.begin()))

    def note(x: Tensor) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            completed[x] = segments[-1]

        return hook

    handles = [x.register_hook(note(x)) for x in trained]
    try:
        cuts.reached = next_segment
        # As backward runs outside of the user's autocast.
        with torch.autocast("cuda", enabled=False), recorder.recording() as first:
            segments.append(Segment(first))
            found = gradients_of(outputs, trained, gradients)
    finally:
        for handle in handles:
            handle.remove()
    others: dict[Tensor, Tensor] = {}
    for x, gradient in zip(trained, found, strict=True):
        if gradient is None:
            continue
        if isinstance(x, nn.Parameter):
            completed[x].parameters.append(x)
            completed[x].gradients.append(alias(gradient))
        else:
            others[x] = alias(gradient)
    return segments, others


def refuse_other_leaves(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raises a ``RuntimeError`` if outputs have gradients for a leaf that is not known, which a graph would not have.

    Such as adapters that another module owns, and a changed forward calls.
    """
    ours, seen = set(map(id, known)), set[Any]()
    nodes = [x.grad_fn for x in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only those that add to a leaf's gradient have one
        if leaf is not None and id(leaf) not in ours:
            raise RuntimeError(f"It trains a parameter of shape {tuple(leaf.shape)} that none of its modules owns.")
        nodes += [following for following, _ in node.next_functions]


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """`torch.autograd.grad`, which a `HostConstants` around it follows: what checkpoints copy again is seen.

    Given tensors, torch tells the mode of the whole call, and leaves it aside meanwhile.
    """
    begins, ends = [get_gradient_edge(x) for x in outputs], [get_gradient_edge(x) for x in inputs]
    return list(torch.autograd.grad(begins, ends, gradients, allow_unused=True))


class _Cuts:
    """Places where backward goes from one graph to the next."""

    def __init__(self) -> None:
        self.reached: Callable[[], None] = lambda: None

    @contextmanager
    def in_front_of(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(self._hook, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cuts at the first argument that has a gradient: what the blocks hand on."""
        leaves, structure = tree_flatten((args, kwargs))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[number] = _Cut.apply(self, leaf)  # type: ignore[no-untyped-call]
                break
        changed: tuple[Any, Any] = tree_unflatten(leaves, structure)
        return changed


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cuts: _Cuts, x: Tensor) -> Tensor:
        ctx.cuts = cuts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.cuts.reached()
        return None, gradient


def _casting_anew() -> AbstractContextManager[object]:
    """Autocast as it is, without the casts of parameters that earlier calls have left: they would be constants."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
