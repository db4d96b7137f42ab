"""What the layers of a split model share: the mesh, the transport, and how long each rank's slice is.

`SplitRecord`      how one forward pass was split; never changed once made
`SequenceContext`  mesh and transport of one model, and the record of the pass that is computed now
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_videoscale.attention import AttentionBackend, AttentionChoices, as_choices
from lightning_videoscale.compat.torch.autograd import dispatch_modes_active, in_backward, version_of
from lightning_videoscale.compat.torch.trees import tensors_of
from lightning_videoscale.parallel import group_numbers
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.region_randomness import RegionRandomness, RegionSeed
from lightning_videoscale.parallel.schedules import ScheduleName, ScheduleSetting
from lightning_videoscale.parallel.schedules.table import LayerShape, Schedules, ScheduleTable
from lightning_videoscale.parallel.transport import DEFAULT_TRANSPORT, Transport

_T = TypeVar("_T")

_NOT_CALLED = (
    "A module of a split network is called, and the network is not. Its forward pass begins in hooks, so call the "
    "network itself: network(...), and not network.forward(...). A module that two networks share, as a ControlNet's "
    "may be, can only be split in one of them: give the other a copy."
)


@dataclass(frozen=True)
class SplitRecord:
    """How one forward pass was split, which spares its layers the exchange of sizes.

    Made by the splits of the pass, and kept in the autograd graph by its gathers (see `sharding.gather`).

    Attributes:
        rank: This rank's position in the group that shares the sequence.
        tables: Of each stream that was split, the tokens of all ranks; ``tables[stream][r]`` of them on rank ``r``.
            They are lists: `torch.compile` takes tuples for constants, and would compile blocks anew for each length.
        short: Of streams with fewer tokens than there are ranks, but some, how many they have. Each rank holds one
            token, those that are missing are zeros that nobody attends to.
        seed: Of the random numbers between the first split and the last gather; None before the first split.
        wholes: Slices of rotary tables, each with the table of all tokens, for schedules that read these.
        known: What layers have found out of tensors that all of them receive, see `once`.
        sums: The lengths of streams together, as far as they were asked for.
        schedules: Which schedule runs each kind of layer, as chosen when the pass began; None if one runs all.
    """

    rank: int
    tables: Mapping[str, Sequence[int]] = field(default_factory=dict)
    short: Mapping[str, int] = field(default_factory=dict)
    seed: RegionSeed | None = None
    wholes: tuple[tuple[Tensor, Tensor], ...] = ()
    known: dict[Hashable, tuple[weakref.ref[Tensor], int, Any]] = field(default_factory=dict, compare=False, repr=False)
    sums: dict[Sequence[str], tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    schedules: ScheduleTable | None = None

    def once(self, x: Tensor, what: Hashable, find: Callable[[], _T]) -> _T:
        """Returns what ``find`` returns of a tensor, which is computed once in a pass for all layers that receive it.

        All ranks run one program, so they look it up or compute it alike, also where that exchanges. What somebody
        follows op by op, as selective checkpoints and compilers do, is computed anew.

        Args:
            x: Such as a mask; what was found is kept as long as it is.
            what: Says what is found out, and with which settings.
            find: Computes it.
        """
        if x.requires_grad or torch.compiler.is_compiling() or dispatch_modes_active():
            return find()
        key, version = (id(x), what), version_of(x)
        entry = self.known.get(key)
        if entry is None or entry[0]() is not x or entry[1] != version:
            # What was found may be a view of x, which is then there as long as the record. So that is held weakly.
            forget = partial(_forget, weakref.ref(self), key)
            entry = self.known[key] = weakref.ref(x, forget), version, find()
        found: _T = entry[2]
        return found

    def with_stream(self, stream: str, tokens: int, lengths: tuple[int, ...]) -> SplitRecord:
        """Returns the record that also holds a stream of ``lengths[r]`` tokens on rank ``r``.

        Raises:
            ValueError: If the stream was split already and had another length.
        """
        if stream not in self.tables:
            short = {**self.short, stream: tokens} if tokens < sum(lengths) else self.short
            return replace(self, tables={**self.tables, stream: list(lengths)}, short=short, sums={})
        if self.tokens(stream) != tokens:
            raise ValueError(f"The {stream} has {self.tokens(stream)} tokens in this forward pass, not {tokens}.")
        return self

    def tokens(self, stream: str) -> int:
        """Returns how many tokens a stream has."""
        return self.short.get(stream, sum(self.tables[stream]))

    def lengths(self, streams: Sequence[str]) -> tuple[int, ...]:
        """Returns how many tokens of the streams each rank has, together.

        Raises:
            ValueError: If the pass has not split one of them.
        """
        if torch.compiler.is_compiling():
            return self._sum(streams)
        key = tuple(streams)
        if key not in self.sums:
            self.sums[key] = self._sum(key)
        return self.sums[key]

    def _sum(self, streams: Sequence[str]) -> tuple[int, ...]:
        missing = [stream for stream in streams if stream not in self.tables]
        if missing:
            raise ValueError(
                f"No tensor of this forward pass was split as {missing}, only as {list(self.tables)}: the split plan "
                "lacks an input or output that comes before."
            )
        return tuple(map(sum, zip(*(self.tables[stream] for stream in streams), strict=True)))

    def missing(self, streams: Sequence[str], ranks: Iterable[int] | None = None) -> tuple[bool, ...] | None:
        """Returns for each token that some ranks, or this one, have of the streams whether it is none.

        None if no stream is short. The tokens of a stream, rank by rank, stand before those of the next.
        """
        if not any(stream in self.short for stream in streams):
            return None
        return tuple(
            rank >= self.short.get(stream, rank + 1)
            for stream in streams
            for rank in ((self.rank,) if ranks is None else ranks)
            for _ in range(self.tables[stream][rank])
        )

    def find_whole(self, sliced: Tensor) -> Tensor | None:
        """Returns the table of all tokens of which ``sliced`` is this rank's part; None if nobody has noted it."""
        for mine, whole in reversed(self.wholes):  # each block may have its own
            if mine.data_ptr() == sliced.data_ptr() and mine.shape == sliced.shape and mine.dtype == sliced.dtype:
                return whole
        return None

    @property
    def division(self) -> Hashable:
        """Equal for passes whose streams, as far as they were split, are divided among the ranks alike."""
        return tuple((stream, *counts) for stream, counts in self.tables.items()), tuple(self.short.items())

    @property
    def local_lengths(self) -> set[int]:
        """Tokens that this rank has of any streams together."""
        counts = {0}
        for table in self.tables.values():
            counts |= {count + table[self.rank] for count in counts}
        return counts - {0}


class SequenceContext:
    """Shared by the split, the attention layers and the gather of one model.

    Args:
        mesh: The mesh of ranks.
        transport: What sends messages; collectives if left out.
        short_streams: See `SplitPlan.short_streams`.
        attention_backend: Which kernel computes attention, see `AttentionChoices`.
        schedule: In which order projections and exchanges run, see `parallel.schedules`; or what chooses it.

    Attributes:
        number: Under which the ops of compiled code find it.
        choices: What chooses it.
        schedule: The schedule that was asked for.
        record: Of the forward pass whose layers run now, for the first time or recomputed in backward. It is replaced
            when a pass begins, by each of its splits, and when backward comes to what a pass has gathered.
        randomness: The random numbers between the first split and the last gather.
        in_forward: Whether the model's forward runs; layers that run otherwise are recomputed for backward.
        suspended: Whether the model runs whole for now, as if it had never been split.
        on_split: Told of every slice that a split returns, while the model is watched.
        on_exchange: Told what is about to exchange, a module's attention or a gather, and what stands against it, while
            the model is watched.
        attention: The modules that exchange, by path, as far as those who made them do so have noted it.
        network: Weak reference to the model that ran last: this context's, or a copy of it.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        transport: Transport | None = None,
        short_streams: frozenset[str] = frozenset(),
        attention_backend: AttentionBackend | AttentionChoices = "auto",
        schedule: ScheduleName | Schedules = "serial",
    ) -> None:
        self.mesh = mesh
        self.number = group_numbers.number(self)
        self.schedule: ScheduleSetting = schedule if isinstance(schedule, str) else schedule.schedule
        self._schedules = None if isinstance(schedule, str) or schedule.schedule != "auto" else schedule
        self.choices = as_choices(attention_backend)
        self.transport = transport if transport is not None else DEFAULT_TRANSPORT
        self.record = SplitRecord(mesh.sp.rank)
        self.randomness = RegionRandomness(mesh.sp.rank, mesh.regions)
        self.in_forward = False
        self.suspended = False
        self.short_streams = short_streams
        self.on_split: Callable[[Tensor], None] | None = None
        self.on_exchange: Callable[[str, str | None], None] | None = None
        self.attention: dict[str, nn.Module] = {}
        self.network: Callable[[], nn.Module | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceContext:
        """Itself: a copy of a model (an average, a teacher) keeps its hooks, and is split as one more call would be."""
        return self

    def begin_forward(self) -> None:
        """A new forward pass, of which nothing is split yet."""
        self.randomness.leave()  # which a pass that was interrupted has not
        table = None if self._schedules is None else self._schedules.table
        self.record = SplitRecord(self.mesh.sp.rank, schedules=table)
        self.in_forward = True

    def end_forward(self, output: Any) -> None:
        """The end of the forward pass, also by an exception; its record stays for `gather_sequence`.

        Backward that comes to the outputs brings it back. `gather` has backward do so too, but not within a reentrant
        checkpoint, where nothing has a gradient yet.

        Args:
            output: What the network returns; None after an exception.
        """
        self.randomness.leave()
        self.in_forward = False
        if not torch.compiler.is_compiling():
            for x in tensors_of(output):
                self.resume_behind(x)

    def enter_region(self, x: Tensor) -> None:
        """Begins this rank's random numbers before ``x`` is split; those of the first time where that is recomputed.

        Raises:
            RuntimeError: If no call of the network is under way, nor a backward that recomputes some of it.
        """
        if self.in_forward:
            seed = self.randomness.enter(x.device)
            if seed is not None:
                self.record = replace(self.record, seed=seed)
            return
        if not (torch.compiler.is_compiling() or in_backward()):
            raise RuntimeError(_NOT_CALLED)
        if self.record.seed is not None:
            self.randomness.enter_again(x.device, self.record.seed)

    def keep_whole(self, sliced: Tensor, whole: Tensor) -> None:
        """Notes of which table ``sliced`` is this rank's part, where the schedule reads it."""
        if self.schedule != "serial":
            self.record = replace(self.record, wholes=(*self.record.wholes, (sliced, whole)))

    def schedule_of(self, layer: LayerShape) -> ScheduleName:
        """Returns the schedule that runs a layer in this pass; the same when it is recomputed, and on all ranks.

        Where one is chosen, compiled code is "serial": it would be compiled anew for each length and each choice.
        """
        if self.schedule != "auto":
            return self.schedule
        if self._schedules is None or self.record.schedules is None or torch.compiler.is_compiling():
            return "serial"
        return self._schedules.choose(layer, self.record.schedules)

    def watch_schedules(self, objection: Callable[[], str | None]) -> Callable[[], None]:
        """See `ScheduleChoices.watch`; returns the undo."""
        return (lambda: None) if self._schedules is None else self._schedules.watch(objection)

    def resume(self, record: SplitRecord) -> None:
        """Backward has come to a forward pass, whose layers may be recomputed from here on."""
        self.record = record

    def resume_behind(self, x: Tensor) -> None:
        """Has backward that comes to ``x`` bring back the record of now, before anything in front is recomputed."""
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(partial(_resume, self, self.record))

    def lengths(self, streams: Sequence[str] = ("video",)) -> tuple[int, ...]:
        """As `SplitRecord.lengths`, of the pass whose layers run now."""
        return self.record.lengths(streams)


def _resume(context: SequenceContext, record: SplitRecord, _: object) -> None:
    context.resume(record)


def _forget(holder: weakref.ref[SplitRecord], key: Hashable, _: object) -> None:
    if (record := holder()) is not None:
        record.known.pop(key, None)
