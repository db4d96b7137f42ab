"""The forward that takes the place of an attention's own: `hide_exchange` installs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import own_attention_backend
from lightning_videoscale.compat.patching import only_redirects, own_forward
from lightning_videoscale.families import class_path, known
from lightning_videoscale.injection.fused_block import fused_block_of, original_forward
from lightning_videoscale.kernels.recompute import recomputed
from lightning_videoscale.models.hidden_exchange.across_heads import changed_norm
from lightning_videoscale.models.hidden_exchange.arguments import of_all_tokens, refused_argument, uneven_mask
from lightning_videoscale.models.hidden_exchange.attention import AttendByHeads
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement, Streams, groups_of
from lightning_videoscale.models.hidden_exchange.outputs import outputs
from lightning_videoscale.models.hidden_exchange.projections import Arrived, project
from lightning_videoscale.models.hidden_exchange.view import seen_by_heads
from lightning_videoscale.parallel import SequenceContext, SplitPlan, check_heads
from lightning_videoscale.parallel.plan import submodules
from lightning_videoscale.parallel.projection import Projection
from lightning_videoscale.parallel.redirection import AttentionPlace, exchanging_forward
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.schedules.input_projections import norm_again
from lightning_videoscale.parallel.schedules.table import LayerShape
from lightning_videoscale.undo import Undo


def hide_exchange(model: nn.Module, context: SequenceContext, plan: SplitPlan) -> Undo:
    """Makes the attention of a plan exchange by a schedule that hides it, or as ``"auto"`` chooses call by call.

    Raises:
        ValueError: If a path names no module, the heads are too few, or a forward was replaced by what does not take
            the module. What else stands against an attention is an error of its calls. Where there is a choice, all of
            it makes all layers "serial", see `ScheduleChoices.watch`.
    """
    assert isinstance(plan.attention, Mapping)
    described = known("PROJECTIONS", type(model))
    streams_of: Mapping[str, Streams] = described(model)  # type: ignore[misc]
    undo = Undo()
    try:
        for pattern, rule in plan.attention.items():
            for path, module in submodules(model, pattern).items():
                heads = _heads(module)
                check_heads(heads, context.mesh.ulysses.size)
                if rule.in_one_call is not None:
                    undo.add(rule.in_one_call(module))
                streams = streams_of[pattern]
                width = max(_widths(module, streams), default=None)
                layer = _Layer(
                    AttentionPlace(path, rule, context, is_marked=False),
                    streams,
                    HeadPlacement(context, heads),
                    module.forward,
                    width,
                    tuple(vars(module)),
                )
                if context.schedule != "auto" and not layer.is_method:
                    raise ValueError(f"schedule={context.schedule!r}: {layer.watched(module)}. Use schedule='serial'.")
                undo.add(context.watch_schedules(partial(layer.watched, module)))
                context.attention[path] = module
                serial = exchanging_forward(module, path, rule, context)
                forward = only_redirects(_forward(layer, serial), own_forward(module))
                undo.set(module, "forward", MethodType(forward, module))
    except BaseException:
        undo()
        raise
    return undo


def _heads(module: nn.Module) -> int:
    heads: int = getattr(module, "heads", None) or module.num_heads  # type: ignore[assignment]
    return heads


def _objection(attn: Any, described: Streams) -> str | None:
    """Why an attention cannot hide its exchange, as far as can be told before it is called."""
    processor = class_path(type(attn.processor)) if hasattr(attn, "processor") else "diffusers."
    if not processor.startswith(("diffusers.", "lightning_videoscale.")):
        return f"its processor is a {processor}, whose computation is unknown here"
    if processor.rpartition(".")[2].startswith("Fused"):
        return "its projections were joined by fuse_qkv_projections(), which gave it a processor of their own"
    for projection in described.values():
        if projection.across_heads and (change := changed_norm(attn, projection)) is not None:
            return f"{change}, and only 'serial' calls norms over all heads"
    if getattr(attn, "residual_connection", False) or getattr(attn, "rescale_output_factor", 1) != 1:
        return "it adds its input to its output, or scales that"
    widths = _widths(attn, described)
    return f"its keys have other channels than its queries: {sorted(widths)}" if len(widths) > 1 else None


def _widths(attn: Any, described: Streams) -> set[int]:
    """How many channels its projections make, as far as they say so: what a user wraps around a Linear may not."""
    linears = [getattr(attn, str(name)) for projection in described.values() for name in projection.linears]
    return {linear.out_features for linear in linears if hasattr(linear, "out_features")}


def _has_biases(attn: Any, projection: Projection) -> bool:
    linears = (getattr(attn, name) for name in projection.linears if name is not None)
    return any(getattr(linear, "bias", None) is not None for linear in linears)


@dataclass(eq=False)
class _Layer:
    """Where an attention is, and what it does.

    Attributes:
        at: Where the module is, and what the plan says of it; compiled code of all layers is one, and never reads its
            path.
        described: Its streams.
        place: Where tokens and heads are.
        own: Its forward before this one.
        width: Channels of its heads when it was split; None if none of its projections said.
        attributes: The names of what it had when it was split, for compiled code, which may not list them.
        met: What stood against a call of it, which then ran by "serial"; None if nothing ever did.
        checked: Whether ranks have compared what they sent with what it returned.
    """

    at: AttentionPlace
    described: Streams
    place: HeadPlacement
    own: Any
    width: int | None
    attributes: tuple[str, ...]
    met: str | None = None
    checked: bool = False

    @property
    def is_method(self) -> bool:
        """Whether its own forward can be called with a view of the module."""
        return isinstance(self.own, MethodType)

    def watched(self, attn: nn.Module) -> str | None:
        """Why the attention can only run by "serial", as far as this rank knows; None if it can run by others."""
        reason = self.met or _objection(attn, self.described)
        if self.width is None:
            reason = "none of its projections says how many channels it makes, as out_features of a Linear does"
        if not self.is_method:
            reason = "its forward was replaced by a function that does not take the module"
        return None if reason is None else f"{self.at.path}: {reason}"

    def schedule(self, attn: Any, arguments: Mapping[str, Any]) -> ScheduleName:
        """Returns the schedule of a call; the same on all ranks that share the sequence."""
        context = self.place.context
        if context.schedule != "auto":
            return context.schedule
        if (refused := refused_argument(arguments, self.described, self.at.rule)) is not None:
            self.met = refused
            return "serial"
        groups = groups_of(self.described)
        tokens = [sum(context.lengths(group.streams)) for group in groups]
        largest = groups[tokens.index(max(tokens))].projection
        x = arguments.get(largest.tokens)
        if not isinstance(x, Tensor) or self.width is None:
            return "serial"
        shape = LayerShape.of(
            x,
            sum(tokens),
            self.place.heads,
            self.width // self.place.heads,
            across_heads=largest.across_heads,
            apart=sum(tokens) - max(tokens),
            is_projected=getattr(attn, largest.output, None) is not None,
            has_biases=_has_biases(attn, largest),
        )
        return context.schedule_of(shape)

    def refusal(self, attn: nn.Module, arguments: Mapping[str, Any]) -> str | None:
        """Why a call cannot hide its exchange."""
        if (objection := _objection(attn, self.described)) is not None:
            return f"{objection}. Use schedule='serial'. Under 'auto', change modules before fit begins, which it sees."
        context = self.place.context
        of_class = context.on_exchange is not None and own_forward(attn) is None  # a change of it is looked at
        if of_class and type(attn).forward is not self.own.__func__:
            return "its class has another forward than when it was split. Use schedule='serial', or patch it before."
        for stream, projection in self.described.items():
            name, streams = projection.tokens, projection.tokens_of or (stream,)
            mine = context.lengths(streams)[context.mesh.sp.rank]
            x = arguments.get(name)
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != mine:
                shape = tuple(x.shape) if isinstance(x, Tensor) else x
                return f"its {name} is {shape}, and this rank has {mine} tokens of {', '.join(streams)}."
        if (refused := refused_argument(arguments, self.described, self.at.rule)) is not None:
            return f"{refused}. Use schedule='serial'."
        return uneven_mask(arguments, self.at.rule, by_values=context.on_exchange is not None)

    def run(self, attn: nn.Module, arguments: dict[str, Any], *, by_slices: bool) -> Any:
        """Attends over the tokens of all ranks."""
        place, context = self.place, self.place.context
        detach_bias = arguments.pop("detach_bias", False)
        refusal = self.refusal(attn, arguments)
        if context.on_exchange is not None:
            context.on_exchange(self.at.path, refusal)
        if refusal is not None:
            raise ValueError(f"{self.at.path} cannot attend over a split sequence: {refusal}")
        groups = groups_of(self.described)
        arrived = [project(attn, group, self.described, arguments, place, by_slices=by_slices) for group in groups]
        received: dict[str, Tensor] = {}
        for group, each in zip(groups, arrived, strict=True):
            received |= each.by_linear(group, place)
        tokens = arguments[groups[0].projection.tokens]
        whole = of_all_tokens(arguments, self.described, self.at.rule, place, tokens)
        attributes = self.attributes if torch.compiler.is_compiling() else tuple(vars(attn))
        view = seen_by_heads(attn, self.described, len(place.mine), received, attributes)
        run: Callable[..., Any] = partial(self.own.__func__, view)
        if arrived[0].norm is not None and fused_block_of(attn) is not None:
            run = original_forward(view)  # the fused one would look for its norms
        by_torch = own_attention_backend(getattr(attn, "processor", None)) is not None
        attend = AttendByHeads(self.at, place, by_torch, by_slices=by_slices)
        with _again(attn, arrived[0], tokens.shape[0]), attend:  # of norms over all heads there is one group
            attended = run(**whole)
        attend.check_calls(type(attn).__name__)
        home = None if attend.arriving is None else attend.arriving()
        check = home is not None and self._checks()
        settings = {"by_slices": by_slices, "detach_bias": detach_bias, "check": check}
        found = outputs(attn, attended, self.described, place, home, **settings)
        if check:
            self.checked = True
        return found

    def _checks(self) -> bool:
        """Whether what was sent is compared in this call; compiled code leaves it to the first call, which is eager."""
        if torch.compiler.is_compiling():
            return False
        return self.place.context.on_exchange is not None or not self.checked


def _again(attn: Any, arrived: Arrived, batch: int) -> Any:
    """Computes norms over all heads again in backward, where the fused attention would do so."""
    heads, norm = arrived
    if norm is None or heads.before_norm is None:
        return recomputed((), lambda: (), recompute=False)
    recipe = partial(norm_again, heads.before_norm, batch, norm)
    return recomputed((heads.query, heads.key), recipe, recompute=getattr(attn, "recompute_norms", False))


def _forward(layer: _Layer, serial: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(layer.own.__func__ if layer.is_method else layer.own)
    gathering = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = layer.place.context
        compiled = context.schedule == "auto" and torch.compiler.is_compiling()
        if not layer.is_method or compiled or context.suspended:  # of the first, all ranks know
            return serial(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs).arguments
        arguments = dict(list(bound.items())[1:])
        for name in gathering:
            arguments |= arguments.pop(name, {})
        if (schedule := layer.schedule(self, arguments)) == "serial":
            return serial(self, *args, **kwargs)
        return layer.run(self, arguments, by_slices=schedule == "sliced")

    return forward
