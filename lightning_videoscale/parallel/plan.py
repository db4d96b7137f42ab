"""The split plan: which tensors of a model are split where, which modules attend over them, what is gathered.

A model's tokens form *streams*: video, and text or audio that its blocks update as well. Every stream is split over the
ranks on its own. What blocks only read, such as text of cross-attention, stays whole on every rank.

`SplitPlan`              the plan itself; write one by hand for your own model
`Split`                  how a tensor that is an argument or an output depends on tokens
`Count`, `Length`        how an integer does
`Refused`                an argument with which the plan would be wrong
`Attention`, `Whole`     which modules see tokens of other ranks
`register_plan`          makes a plan of your own known for a class of models, by the class's full name
`find_plan`              the plan of a model, if one is known
`find_planned_modules`   the networks inside a larger module that have a plan
`refusals`               why networks inside a larger module can have none
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.families import AllFamilies, class_path, known
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.schedules import ScheduleName

AttentionChange = Callable[[nn.Module, SequenceContext], Callable[[], None]]
"""Makes a model's self-attention exchange over the group, and returns what takes that back."""

Objection = Callable[[Any, Mapping[str, Any]], str | None]
"""Says why a call of a model, given its arguments by name, cannot be split; None if it can."""

VIDEO = ("video",)
"""The streams of most tensors."""


@dataclass(frozen=True)
class Split:
    """A tensor lies along ``dim`` as the tokens of one stream, or of several one behind the other.

    The first tensor of a stream in a forward pass says how long it is. Later ones are as long, or 1 and broadcast,
    which stays. A tuple, list or dict of tensors is split member by member; None stays None.

    Attributes:
        dim: The dim of the tokens.
        streams: Whose tokens they are, in their order.
        ndim: Apply only to tensors of so many dims (Wan's timesteps are split if they are per token, (B, S), and not
            if they are per sample, (B,)); any number if left out.
        broadcasts: Whether a dim of size 1 stays whole though nothing of the stream came before; otherwise it is a
            stream of one token.
        keeps_whole: Of a module's output: whether schedules that rotate after the exchange read all of it, too. So it
            is a rotary table.
    """

    dim: int
    streams: tuple[str, ...] = VIDEO
    ndim: int | None = None
    broadcasts: bool = False
    keeps_whole: bool = False


@dataclass(frozen=True)
class Count:
    """An integer that counts the leading tokens of the streams; each rank gets how many of them it has."""

    streams: tuple[str, ...] = VIDEO


@dataclass(frozen=True)
class Length:
    """An integer that is the length of a stream, perhaps 0; each rank gets that of its share.

    Where no tensor of the stream came before, it says how long the stream is. So several streams can be in one tensor.
    """

    stream: str


@dataclass(frozen=True)
class Refused:
    """An argument that the plan does not cover: an error in every call that has it, unless it is None.

    Attributes:
        reason: What the argument would need, and what to do instead.
    """

    reason: str


Rule = Split | Count | Length | Refused | Mapping[int, Split]
"""What a plan says of an argument."""


@dataclass(frozen=True)
class Attention:
    """A module that attends over split streams, by one call of `torch.nn.functional.scaled_dot_product_attention`.

    A mask may say of each key whether it counts, bool or as a bias of 0 or -inf: (B, 1, 1, keys) and what broadcasts
    to it, of this rank's keys. Causal masks, dropout and masks that differ between queries are refused.

    Attributes:
        queries: The streams that its queries are, in their order.
        keys: Those of its keys and values; as the queries if left out.
        padded_rows: The mask is (B, 1, tokens, tokens) and differs between queries only in those that it masks as
            keys, too: padding, which attends to nothing and gets zeros, as from torch's function.
        unmasked: A stream of which no mask ever hides a token. So every sample has a key to attend to, and none has to
            be looked for that has not.
        arguments: Arguments of its ``forward`` that lie along tokens, such as masks, for schedules that attend after
            the exchange. Tokens and rotary tables are left out, which `Projection` names.
        in_one_call: For a module that attends otherwise: makes it attend by one call, before the call is exchanged,
            and returns what takes that back.
    """

    queries: tuple[str, ...] = VIDEO
    keys: tuple[str, ...] | None = None
    padded_rows: bool = False
    unmasked: str | None = None
    arguments: Mapping[str, Split] = field(default_factory=dict, hash=False)
    in_one_call: Callable[[nn.Module], Callable[[], None]] | None = None

    @property
    def key_streams(self) -> tuple[str, ...]:
        """The streams of its keys."""
        return self.queries if self.keys is None else self.keys


@dataclass(frozen=True)
class Whole:
    """A module that must see all tokens: its inputs are gathered and its outputs split again.

    Every rank computes all of it, so it costs as much time and memory as without sequence parallelism.

    Attributes:
        inputs: Which arguments of its ``forward`` are gathered, by name.
        outputs: Which of its outputs are split, by position (0 if it returns one tensor).
    """

    inputs: Mapping[str, Split]
    outputs: Mapping[int, Split]


@dataclass(frozen=True)
class SplitPlan:
    """How one model computes on slices of its streams.

    Module paths are relative to the model; ``""`` is the model itself. In a path ``*`` stands for any one name, and -1
    for the last name of a list: ``"blocks.*.attn"``, ``"blocks.-1"``.

    Attributes:
        inputs: Per module path, which arguments of its ``forward`` are split, by name, before it runs, and which are
            refused. Of a tuple or list, of which only some members are split, those by position.
        outputs: Per module path, which of its outputs are split, by position (0 if it returns one tensor).
        gathers: Per module path, which of its outputs are gathered, by position. With the last to run, in whatever
            order they are listed, ranks draw equal random numbers again.
        attention: Which modules attend over which streams, by path. For what that cannot say, a function that makes
            the model's attention exchange over the group, given the model and the shared context; it returns its undo,
            after which the model computes as before, and raises a ``ValueError`` if the heads do not fit the mesh.
        whole: Per module path, what must see all tokens.
        objection: Asked before each call of the model; a reason is an error that says it. For what the model would
            compute wrongly on slices, as its arguments or its configuration tell.
        gathers_inside: As ``gathers``, of outputs from which something is split again before the last gather.
        exact: Whether tests hold the plan to one device for this very class of models; others are verified when the
            model is first called.
        schedules: By which its attention can run. All but ``"serial"`` need ``attention`` to be a function, or
            ``hide_exchange``.
        hide_exchange: Makes its attention exchange by the schedule of the context, where ``attention`` is a mapping.
        only_serial: Why no other schedule than ``"serial"`` can run it, for messages.

    Raises:
        ValueError: If ``attention`` is a mapping and ``hide_exchange`` does not make it run by other schedules.
    """

    inputs: Mapping[str, Mapping[str, Rule]]
    outputs: Mapping[str, Mapping[int, Split]]
    gathers: Mapping[str, Mapping[int, Split]]
    attention: Mapping[str, Attention] | AttentionChange
    whole: Mapping[str, Whole] = field(default_factory=dict)
    objection: Objection | None = None
    gathers_inside: Mapping[str, Mapping[int, Split]] = field(default_factory=dict)
    exact: bool = False
    schedules: tuple[ScheduleName, ...] = ("serial",)
    hide_exchange: AttentionChange | None = None
    only_serial: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.attention, Mapping) and self.hide_exchange is None and self.schedules != ("serial",):
            asked = f"A split plan with schedules={self.schedules} and a mapping for attention"
            raise ValueError(f"{asked} needs hide_exchange=.")

    @property
    def splits_anything(self) -> bool:
        """Whether there is a region in which ranks have their own tokens only."""
        return bool(self.inputs or self.outputs)

    @property
    def short_streams(self) -> frozenset[str]:
        """Streams that may have fewer tokens than there are ranks, since they always attend together with others."""
        if not isinstance(self.attention, Mapping):
            return frozenset()
        sides = [side for each in self.attention.values() for side in (each.queries, each.key_streams)]
        return frozenset(name for side in sides for name in side) - {side[0] for side in sides if len(side) == 1}


PlanFactory = Callable[[nn.Module], SplitPlan]

_REGISTERED: dict[str, PlanFactory] = {}


def register_plan(class_path: str, factory: PlanFactory) -> None:
    """Makes a plan known for all instances of a class and of its subclasses.

    Args:
        class_path: ``"package.module.ClassName"``; a name, so that nothing is imported for models nobody uses.
        factory: Returns the plan for a model of that class.
    """
    _REGISTERED[class_path] = factory


def find_plan(model: nn.Module) -> SplitPlan | None:
    """Returns the plan known for the model's class or its nearest base class, registered or its family's, or None.

    Those of families are `SplitPlan.exact`, as tests hold them to one device, but for subclasses: these may compute
    something else, of which no test here knows.
    """
    factory: PlanFactory | None = known("SPLIT_PLANS", type(model), _REGISTERED)
    if factory is None:
        return None
    # FSDP2 makes a subclass of each network it shards.
    path = class_path(next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)))
    plan = factory(model)
    return plan if path in _REGISTERED else replace(plan, exact=path in AllFamilies[PlanFactory]("SPLIT_PLANS"))


def find_planned_modules(root: nn.Module) -> dict[str, SplitPlan]:
    """Returns the outermost modules under ``root`` that have a plan, by path; each once, whatever paths it has."""
    found: dict[str, SplitPlan] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        if module in visited:
            return
        visited.add(module)
        plan = find_plan(module)
        if plan is not None:
            found[path] = plan
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(root, "")
    return found


def refusals(root: nn.Module) -> dict[str, str]:
    """Returns why networks under ``root`` cannot be split, by the names of their classes."""
    reasons = {type(module): known("REFUSALS", type(module)) for module in root.modules()}
    return {cls.__name__: reason for cls, reason in reasons.items() if reason is not None}


def known_models() -> list[str]:
    """Names of the model classes that have a plan."""
    return sorted({path.rsplit(".", 1)[-1] for path in (*_REGISTERED, *AllFamilies[PlanFactory]("SPLIT_PLANS"))})


def matching_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Returns the modules that a path names, by their paths; see `SplitPlan` for what it may hold.

    One that is in several places, as where blocks share their attention, has the first of its paths.
    """
    found = {"": model}
    for part in pattern.split(".") if pattern else ():
        children = {path: dict(module.named_children()) for path, module in found.items()}
        if part == "-1":
            children = {path: dict([*named.items()][-1:]) for path, named in children.items()}
        found = {
            f"{path}.{name}" if path else name: child
            for path, named in children.items()
            for name, child in named.items()
            if part in ("*", "-1", name)
        }
    paths: dict[nn.Module, str] = {}
    for path, module in found.items():
        paths.setdefault(module, path)
    return {path: module for module, path in paths.items()}


def submodules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """As `matching_modules`, of a path in a plan.

    Raises:
        ValueError: If there are none.
    """
    found = matching_modules(model, pattern)
    if not found:
        raise ValueError(f"The split plan names module {pattern!r}, which {type(model).__name__} does not have.")
    return found


def ordered_names(module: nn.Module) -> list[str]:
    """Returns the names of the arguments that may be given to a module by position."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # without self
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]


def check_streams(plan: SplitPlan, name: str) -> None:
    """Refuses a plan that splits a stream whose tokens no module attends to.

    Raises:
        ValueError: Naming the streams.
    """
    if not isinstance(plan.attention, Mapping):
        return
    rules: list[Split | Count] = []
    for rule in (rule for named in plan.inputs.values() for rule in named.values()):
        rules += rule.values() if isinstance(rule, Mapping) else [] if isinstance(rule, Length | Refused) else [rule]
    rules += [rule for positions in plan.outputs.values() for rule in positions.values()]
    rules += [rule for whole in plan.whole.values() for rule in whole.outputs.values()]
    wholes = [rule for whole in plan.whole.values() for rule in whole.inputs.values()]
    seen = {stream for each in plan.attention.values() for stream in each.key_streams}
    seen |= {stream for rule in wholes for stream in rule.streams}
    forgotten = {stream for rule in rules for stream in rule.streams} - seen
    if forgotten:
        raise ValueError(
            f"The split plan of {name} splits {sorted(forgotten)}, whose tokens no module in attention= has for keys: "
            "each rank would see its own share only. Name the attention, or leave the stream whole."
        )
