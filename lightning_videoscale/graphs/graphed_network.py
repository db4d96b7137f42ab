"""A network that runs by CUDA graphs where it can: `GraphedNetwork`.

A call is first computed eagerly. The second call of its kind is inspected (`inspect_call`), and, where the mode is
``"auto"``, timed. The third is captured and replayed, as are all that follow. A call that no graph can serve stays
eager, which is logged once with the reason.

Replayed or eager, a call makes the same collectives in the same order, so ranks need not run it in the same way. They
agree on what is captured, in the third call of a kind and then in every 64th: a rank may have lost its graphs, because
somebody has added a hook there.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from lightning_videoscale.compat.torch.modules import is_compiled
from lightning_videoscale.graphs.calls import NetworkCall, is_observed, read_call
from lightning_videoscale.graphs.capture import CapturedPass, capture, capture_with_constants, without_traces
from lightning_videoscale.graphs.capture_together import Captured, Readiness, capture_together
from lightning_videoscale.graphs.host_constants import HostConstants
from lightning_videoscale.graphs.inspection import inspect_call
from lightning_videoscale.graphs.kinds import Kind, Kinds
from lightning_videoscale.graphs.memory import GraphMemory
from lightning_videoscale.graphs.options import GraphOptions
from lightning_videoscale.graphs.recorder import Recorder
from lightning_videoscale.graphs.replay import Tenancy, replay
from lightning_videoscale.graphs.snapshot import Snapshot
from lightning_videoscale.parallel.auxiliary_loss import context_of
from lightning_videoscale.parallel.context import SequenceContext

EAGER_CALLS = 2
"""Calls of a kind that run eagerly before one is captured: the first, and the one that is inspected."""

_TRAINS = attrgetter("requires_grad")
_DROPS = 4  # after which a network that is changed again and again stays eager
_AGREE = 64  # calls of a kind between two agreements, or two looks at whether what stood against it has gone
_WORTH = 64  # replays for each capture, after which those that are used may be captured anew
_LAUNCH_BOUND = 0.8  # of the device's time between the begin and the end of forward, that the host needs to launch it


class GraphedNetwork:
    """Stands in front of a network's forward; see the module.

    Args:
        network: The network, split already.
        forward: Its forward, inside its hooks.
        entrances: Modules in front of which backward is cut.
        options: When to capture, and with how much memory.
        gather: Returns what all ranks that share the sequence hand in together. None: this rank has it alone.
        kernels: Tells, in one value, which kernels of attention and schedules of exchanges are chosen.
        places: Tells, in one value, where messages lie, and keeps their memory.
        move_together: Whether all ranks that share the sequence see another such value in the same call.
        log: Is told what is captured, and what is not and why.

    Attributes:
        counts: Of calls: ``"replayed"``, ``"eager"``, ``"busy"`` (a pass before had not gone backward), ``"captured"``.
        memory: Of the device, that the graphs keep.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[..., Any],
        entrances: list[nn.Module],
        options: GraphOptions,
        gather: Callable[[Any], list[Any]] | None,
        kernels: Callable[[], Hashable],
        places: Callable[[], Hashable],
        move_together: bool,
        log: Callable[[str], None],
    ) -> None:
        self._network, self._forward, self._entrances = network, forward, entrances
        self._options, self._log = options, log
        self._kernels, self._chosen = kernels, kernels()
        self._places, self._lie, self._move_together = places, places(), move_together
        self._is_alone, self._gather = gather is None, gather or _alone
        self._name = type(network).__name__
        self._kinds = Kinds()
        self._said: set[str] = set()
        self._changes, self._always, self._untold = 0, "", ""
        self._parameters = list(network.parameters())
        self._state: Hashable = None  # train or eval mode, and which parameters train
        self._relied_on: dict[Hashable, Snapshot] = {}  # by state
        self.counts: Counter[str] = Counter()
        self.memory = GraphMemory(options.max_memory)
        self._recorder: Recorder | None = None
        self._tenancy = Tenancy()
        self._passes = WeakSet[CapturedPass]()
        self._before = Counter[str]()  # what was counted when graphs were last dropped

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of the copy: a copy of a network (an average, a teacher) runs eagerly."""
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self._forward,)

    def close(self) -> None:
        """Lets all graphs go, and the memory of messages."""
        self.drop("they are taken back")
        self._lie = None
        if self._passes:  # also those whose loss somebody keeps: NCCL waits for their graphs when its groups end
            torch.cuda.synchronize()
        for each in self._passes:
            each.let_go()

    def drop(self, reason: str) -> None:
        """Lets all graphs go; calls are inspected and captured anew as they come."""
        if any(kind.captured is not None for kind in self._kinds):
            torch.cuda.synchronize()  # some may still run
            self._log(f"CUDA graphs of {self._name} are dropped: {reason}.")
            self._untold = reason
        self._kinds.let_go()
        self._relied_on.clear()
        self._parameters = list(self._network.parameters())
        self._recorder, self._tenancy, self.memory = None, Tenancy(), GraphMemory(self._options.max_memory)
        self._before = self.counts.copy()

    def _begin_anew(self) -> None:
        """Has the kinds inspected and agreed on again; to be called by all ranks between the same calls."""
        for known in self._kinds:
            known.calls = min(known.calls, EAGER_CALLS - 1)

    def _compare(self) -> None:
        """Drops the graphs if the network is another than the one that they were captured of."""
        before = self._relied_on.get(self._state)
        where = None if before is None else before.difference()
        if where is not None:
            self.drop(f"{where} has changed")
            self._note_change(where)

    def _note_change(self, where: str) -> None:
        self._changes += 1
        if self._changes == _DROPS:
            self._always = f"{where} has changed between calls, as something did {_DROPS} times"
            self._explain(self._always)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's forward."""
        context = context_of(self._network)
        if torch.compiler.is_compiling() or (context is not None and (context.suspended or context.on_exchange)):
            return self._forward(*args, **kwargs)
        call = read_call(self._network, args, kwargs)
        if isinstance(call, str) or not call.tensors:
            self._explain(call if isinstance(call, str) else "no input is a tensor, which would tell its device")
            return self._eagerly("eager", args, kwargs)
        if (chosen := self._kernels()) != self._chosen:
            self._chosen = chosen
            self.drop("kernels or schedules were chosen anew")
            self._kinds.clear()  # as on all ranks, which agree in the third call from here
        if (lie := self._places()) != self._lie:
            self.drop("messages lie elsewhere")
            self._lie = lie  # graphs that repeat messages where they lay before are gone
            if self._move_together:  # else peers agree in other calls; no first call here is slower than others
                self._begin_anew()
        self._state = self._kinds.one_of(self._network.training, tuple(map(_TRAINS, self._parameters)))
        # Arguments may be slices already, and one rank's of equal length where those of others are not.
        split = None if context is None else context.record.division
        kind = self._kinds.find((call.key, self._state, split))
        kind.calls += 1
        if kind.captured is not None:
            self._compare()
        if kind.calls == EAGER_CALLS + 1 or kind.calls % _AGREE == 0 or (self._is_alone and kind.calls > EAGER_CALLS):
            self._settle(kind, call, context)
        if is_observed():
            return self._eagerly("eager", args, kwargs)
        if kind.captured is None:
            if kind.calls > 1 and kind.seen is None and not self._always:
                return self._inspected(kind, call, context, args, kwargs)
            return self._eagerly("eager", args, kwargs)
        if self._tenancy.is_taken:
            return self._eagerly("busy", args, kwargs)
        return self._replayed(kind, call, context)

    def _eagerly(self, count: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts[count] += 1
        return self._forward(*args, **kwargs)

    def _explain(self, reason: str, about: str = "") -> None:
        """Says once why a call stays eager: of the calls that are told ``about`` alike, of the first one."""
        if (about or reason) not in self._said:
            self._said.add(about or reason)
            self._log(f"{self._name} runs without CUDA graphs: {reason}.")

    def _inspected(
        self,
        kind: Kind,
        call: NetworkCall,
        context: SequenceContext | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def run() -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()  # a forward that waits for the device is not to wait for what came before
            begin.record()
            start = time.perf_counter()
            result = self._eagerly("eager", args, kwargs)
            seconds = time.perf_counter() - start
            end.record()
            kind.waits, kind.replayed = (seconds, begin, end), None
            return result

        result, seen = inspect_call(self._network, run, call, (args, kwargs), context, call.tensors[0].device)
        self._kinds.note(kind, self._state, seen.network)
        kind.objection = seen.objection
        kind.bytes, kind.draws = seen.bytes, seen.draws
        if kind.objection is not None:
            self._explain(kind.objection)
        return result

    def _settle(self, kind: Kind, call: NetworkCall, context: SequenceContext | None) -> None:
        """Captures a pass if it is worth it and fits; collective over the ranks that share the sequence."""
        is_settled = kind.captured is not None or (kind.objection is not None and kind.calls % _AGREE > 0)
        if self._is_alone and (is_settled or kind.seen is None):
            return
        device = call.tensors[0].device
        trained = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        self._compare()  # also for graphs of other kinds, before what they rely on is noted anew
        if kind.captured is None and kind.seen is not None and (where := kind.seen.difference()) is not None:
            kind.seen = kind.objection = None  # to be inspected anew
            self._note_change(where)
        if kind.captured is None and kind.seen is not None and kind.objection is None:
            kind.objection = self._not_worth_it(kind, call)
            if kind.objection is not None:
                self._explain(kind.objection, about="the host's share")  # else every long shape would have its line
            else:
                needed = kind.bytes + sum(x.numel() * x.element_size() for x in trained) * torch.is_grad_enabled()
                kind.objection = self.memory.why_too_large(max(needed, kind.took), device)
                if kind.objection is not None:
                    self._explain(kind.objection)
        can = kind.seen is not None and kind.objection is None and not self._tenancy.is_taken and not is_observed()
        if not self._all_ready(Readiness(kind.captured is not None or can, kind.objection, self._untold)):
            return
        is_new, start = kind.captured is None, time.perf_counter()
        everyone = capture_together(partial(self._attempt, kind, call, context, device), self._gather)
        failure = next((theirs.failure for theirs in everyone if theirs.failure is not None), None)
        excess = next((theirs.excess for theirs in everyone if theirs.excess is not None), None)
        if failure is not None:
            kind.captured, kind.objection = None, failure
            self._explain(failure)
            return
        if is_new:
            self.counts["captured"] += 1
            self._log(
                f"{self._name} runs by CUDA graphs for inputs {[tuple(x.shape) for x in call.tensors]}: captured in "
                f"{time.perf_counter() - start:.2f} s, {kind.took / 2**30:.2f} GiB more."
            )
        if excess is not None:
            self._make_room(kind, excess, all(theirs.has_paid for theirs in everyone))

    def _attempt(
        self, kind: Kind, call: NetworkCall, context: SequenceContext | None, device: torch.device
    ) -> Captured:
        """Captures a pass, unless only a peer has lost its graphs."""
        since, excess = self.counts - self._before, None
        if kind.captured is None:
            with self.memory.counting(device) as taken:
                self._capture(kind, call, context, device)
            kind.took = taken()
            excess = self.memory.excess(device) if kind.took else None
        return Captured(None, excess, since["replayed"] >= _WORTH * max(since["captured"], 1))

    def _make_room(self, kind: Kind, excess: str, have_paid: bool) -> None:
        """Drops all graphs as a new kind's are too many, so that those that are used are captured anew.

        Where captures have not paid yet, the new kind stays eager instead. To be called by all ranks alike.
        """
        if have_paid:
            self.drop(f"{excess}. Those of calls that come again are captured anew")
            self._begin_anew()
        else:
            kind.captured = None
            if all(known.captured is None for known in self._kinds):
                self.drop(excess)  # it alone takes it, and would leave no room for others
            kind.objection = f"CUDA graphs of its calls are too many or too large: {excess}"
            self._explain(kind.objection, about="no room")
        torch.cuda.empty_cache()  # else a pool that is gone would still take its memory

    def _all_ready(self, mine: Readiness) -> bool:
        """Whether all ranks can replay or capture a kind; says why others cannot, and what they have dropped."""
        everyone: list[Readiness] = self._gather(mine)
        self._untold = ""
        for number, theirs in enumerate(everyone):
            if theirs.dropped and theirs.dropped != mine.dropped:
                self._log(f"CUDA graphs of {self._name} are dropped on rank {number} of its group: {theirs.dropped}.")
            if theirs.objection is not None and mine.objection is None:
                self._explain(f"rank {number} of its group says: {theirs.objection}")
        return all(theirs.is_ready for theirs in everyone)

    def _capture(self, kind: Kind, call: NetworkCall, context: SequenceContext | None, device: torch.device) -> None:
        assert kind.seen is not None
        recorder = self._recorder = self._recorder or Recorder(device)
        region = nullcontext if context is None else lambda: context.randomness.held(device)

        def record(constants: HostConstants | None = None) -> CapturedPass:
            with without_traces(context, device):
                parts = self._network, self._forward, call, self._entrances, recorder, region
                captured = capture(*parts, constants, kind.draws)
                kind.record = None if context is None else replace(context.record, known={})
            captured.messages = self._lie  # also where they come to lie elsewhere before its backward
            self._passes.add(captured)
            return captured

        # Beside the mode that finds constants, what is compiled would be compiled anew.
        copies_unseen = any(map(is_compiled, self._network.modules()))
        kind.captured = record() if copies_unseen else capture_with_constants(record, device, recorder)
        self._relied_on[self._state] = kind.seen

    def _not_worth_it(self, kind: Kind, call: NetworkCall) -> str | None:
        if self._options.mode is True:
            return None
        if any(x.requires_grad for x in call.tensors):
            return "an input requires gradients, which may be differentiated again; graphs=True takes it all the same"
        assert kind.waits is not None
        seconds, begin, end = kind.waits
        end.synchronize()
        share = seconds * 1e3 / max(begin.elapsed_time(end), 1e-6)
        if share >= _LAUNCH_BOUND:
            return None
        return f"with inputs {[tuple(x.shape) for x in call.tensors]} the host takes {share:.2f} of the device's time"

    def _replayed(self, kind: Kind, call: NetworkCall, context: SequenceContext | None) -> Any:
        assert kind.captured is not None
        self.counts["replayed"] += 1
        parts = kind.captured, call.tensors, self._tenancy, self._options.gradients_are_copied
        with self._timed(kind, call):
            if context is None or kind.record is None:
                return replay(*parts)
            with context.randomness.held(call.tensors[0].device) as seed:
                result = replay(*parts)
        context.record = replace(kind.record, seed=seed or context.record.seed)
        return result

    @contextmanager
    def _timed(self, kind: Kind, call: NetworkCall) -> Iterator[None]:
        """Around a replay; says once what it gains, without waiting for the device."""
        if kind.waits is None or kind.calls == EAGER_CALLS + 1:  # told already, or the first replay, which sets up
            yield
        elif kind.replayed is None:
            kind.replayed = begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
        else:
            if kind.replayed[1].query():
                eager, by_graph = kind.waits[1:], kind.replayed
                self._log(
                    f"{self._name} with inputs {[tuple(x.shape) for x in call.tensors]}: forward takes "
                    f"{by_graph[0].elapsed_time(by_graph[1]):.1f} ms by CUDA graphs, and took "
                    f"{eager[0].elapsed_time(eager[1]):.1f} ms without."
                )
                kind.waits = None
            yield


def _alone(mine: Any) -> list[Any]:
    return [mine]
