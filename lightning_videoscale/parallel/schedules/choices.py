"""Which schedule runs each kind of layer: `ScheduleChoices`, the one place that all layers of a run ask.

A layer is answered at once, from a table (`table`) that all ranks have alike. What was asked for and is not known is
measured by `settle`, which all ranks call together between two steps; then there is a new table. So no rank changes
a schedule within a step, and ranks that exchange run the same one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.case import device_name
from lightning_videoscale.attention.trial import wait_for
from lightning_videoscale.parallel.layout.machines import Host, Machine, machine_of
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.schedules import ScheduleName, ScheduleSetting
from lightning_videoscale.parallel.schedules.records import ScheduleFile, ScheduleRecord
from lightning_videoscale.parallel.schedules.table import (
    LayerPlacement,
    LayerShape,
    ScheduleKey,
    ScheduleTable,
    schedules_of,
)
from lightning_videoscale.parallel.schedules.trial import Alone, RecordsCalls, time_in_turns
from lightning_videoscale.parallel.schedules.trial_layer import TrialGroup, TrialLayer
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.ranks import gather_over_ranks, of_first_rank, rank_in_world

_SECONDS_OF_KEY = 6.0
_SECONDS_OF_RUN = 60.0

_log = logging.getLogger(__name__)


class ScheduleChoices:
    """Chooses the schedule of every layer in a run.

    Args:
        schedule: ``"auto"`` chooses; a schedule by name runs everywhere.
        folder: Where measurements are kept; by default the package's cache folder.
        machine: Whose speeds a prediction takes; that of the device's name if left out.
        clock: Tells this rank's time in seconds.
        seconds: That measuring may take for a kind of layer, and in a run.
        recorder: Returns what records calls as CUDA graphs on a device, where steps run by those; None elsewhere.
        log: Is told, on rank 0, what was chosen.

    Attributes:
        schedule: As it was asked for.
        recorder: As given; what is set before `prepare` counts.
        table: What is chosen now.
        version: Counts the tables by which a layer that has run, runs another schedule.

    Raises:
        ValueError: If there is no schedule of that name.
    """

    def __init__(
        self,
        schedule: ScheduleSetting = "auto",
        *,
        folder: Path | None = None,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.perf_counter,
        seconds: tuple[float, float] = (_SECONDS_OF_KEY, _SECONDS_OF_RUN),
        recorder: Callable[[torch.device], RecordsCalls] | None = None,
        log: Callable[[str], None] = _log.info,
    ) -> None:
        if schedule not in get_args(ScheduleSetting):
            raise ValueError(f"schedule={schedule!r} is not one of {get_args(ScheduleSetting)}.")
        self.schedule: ScheduleSetting = schedule
        self.recorder = recorder
        self.table = ScheduleTable({}, {}, None, None)
        self.version = 0
        self._folder, self._machine, self._clock, self._log = folder, machine, clock, log
        self._seconds_of_key, self._seconds_left = seconds
        self._seconds_of_run = self._seconds_left
        self._group: TrialGroup | None = None
        self._place: LayerPlacement | None = None
        self._keys: dict[LayerShape, ScheduleKey] = {}
        self._asked: set[ScheduleKey] = set()  # by this rank since the last settling
        self._met: set[ScheduleKey] = set()  # by any rank, before
        self._unmeasured: set[ScheduleKey] = set()  # whose turn has not come
        self._records: dict[ScheduleKey, ScheduleRecord] = {}
        self._before: dict[str, ScheduleName] = {}
        self._compared: set[ScheduleKey] = set()  # with what was before the checkpoint
        self._objections: list[Callable[[], str | None]] = []

    # -- asking --------------------------------------------------------------------------------------------------

    def choose(self, shape: LayerShape, table: ScheduleTable) -> ScheduleName:
        """Returns the schedule of a layer by a table, and notes that it was asked for.

        Args:
            shape: Of the layer; equal on all ranks that share the sequence.
            table: That was current when the forward pass began.
        """
        if self.schedule != "auto":
            return self.schedule
        if self._place is None:
            return "serial"
        key = self._keys.get(shape)
        if key is None:
            key = self._keys[shape] = ScheduleKey.of(shape, self._place)
            self._asked.add(key)
        return table.choose(key)

    def watch(self, objection: Callable[[], str | None]) -> Callable[[], None]:
        """Asks, whenever ranks decide, what stands against any schedule but "serial"; returns the undo.

        Args:
            objection: Returns a reason, as the hook of a module that only "serial" calls, or None. A reason on one rank
                holds for all.
        """
        self._objections.append(objection)
        return partial(self._objections.remove, objection)

    # -- deciding ------------------------------------------------------------------------------------------------

    def prepare(self, mesh: SequenceMesh, transport: Transport, attention: AttentionChoices) -> None:
        """Says by what layers exchange, and reads what earlier runs have measured; collective over all ranks.

        Does nothing for a schedule by name. The second time for the same mesh and transport, as for a second network,
        it only asks what stands against schedules.

        Args:
            mesh: Open and divided.
            transport: Of the exchange.
            attention: What chooses the kernel of attention.
        """
        if self.schedule != "auto":
            return
        if self._group is None or (self._group.mesh, self._group.transport) != (mesh, transport):
            device = torch.device(mesh.device_type)
            device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
            self._group = TrialGroup(mesh, transport, attention, device)
            self._place, self._keys = _place_of(self._group), {}
            if self._machine is None:
                self._machine = machine_of(self._place.device)
            if self.recorder is not None:  # what graphs launch waits for no host
                self._machine = replace(self._machine, alone=Host(0.0, 0.0, 0.0))
            if rank_in_world() == 0:
                self._records |= self._file.read()
            self._records = of_first_rank(self._records)
        self._renew(self._common_objection())

    def settle(self) -> None:
        """Measures what was asked for since the last time; collective over all ranks, between two steps.

        It takes at most 6 s for a kind of layer, beside what kernels need to compile, and 60 s in a run. What is left
        then, or hardly differs in size, goes by the nearest that was measured, or by the prediction. Where a trial
        fails on one rank, all run "serial". Nothing of it is done where all is known.
        """
        if self._group is None:
            return
        asked = {key for keys in gather_over_ranks(self._asked) for key in keys} - self._met
        self._asked.clear()
        objection = self._common_objection()
        wanted = self._unlike_any(asked | self._unmeasured)
        if objection is None:
            measured, self._unmeasured = self._measure_all(wanted)
        else:
            measured, self._unmeasured = {}, set(wanted)
        self._met |= asked
        self._records |= measured
        self._renew(objection)
        for key in sorted(asked | measured.keys()):
            self._say(f"Schedule of {key}: {self._describe(key)}.")
        if rank_in_world() == 0 and (kept := {k: record for k, record in measured.items() if record.reason is None}):
            self._file.add(kept)

    def _unlike_any(self, keys: set[ScheduleKey]) -> list[ScheduleKey]:
        """Those of which one is to be measured: no measurement, and no other among them, stands for it."""
        wanted: list[ScheduleKey] = []
        for key in sorted(keys):
            if len(schedules_of(key)) > 1 and not any(map(key.is_like, [*self._records, *wanted])):
                wanted.append(key)
        return wanted

    @property
    def _file(self) -> ScheduleFile:
        assert self._place is not None
        return ScheduleFile(self._place.device, self._folder, by_graphs=self.recorder is not None)

    def _measure_all(self, keys: Sequence[ScheduleKey]) -> tuple[dict[ScheduleKey, ScheduleRecord], set[ScheduleKey]]:
        """Measures kinds of layers one by one, as long as there is time; also returns those to be tried again."""
        found: dict[ScheduleKey, ScheduleRecord] = {}
        late: set[ScheduleKey] = set()
        for number, key in enumerate(keys):
            if self._seconds_left <= 0:
                self._say(
                    f"Schedules: {len(keys) - number} kinds of layers go by the nearest that was measured, or by "
                    f"prediction, since measuring has taken the {self._seconds_of_run:.0f} s that it may take in a run."
                )
                break
            begin = self._clock()
            with torch.inference_mode(False):  # a user may settle after a validation
                record = self._measure(key, begin)
            self._seconds_left -= max(gather_over_ranks(self._clock() - begin))
            if record is None:  # what is compiled and started the first time, is so the next time
                late.add(key)
            else:
                found[key] = record
        return found, late

    def _measure(self, key: ScheduleKey, begin: float) -> ScheduleRecord | None:
        """The same record on all ranks; None if there was too little time."""
        assert self._group is not None
        layer, reason = _rehearsed(key, self._group)
        reasons = {rank: each for rank, each in enumerate(gather_over_ranks(reason)) if each is not None}
        if reasons or layer is None:
            return ScheduleRecord({}, {}, "; ".join(f"rank {rank}: {each}" for rank, each in reasons.items()))
        if self._group.attention.is_prepared:
            self._group.attention.settle()  # the rehearsal has asked for its kernels
        transport, device = self._group.transport, self._group.device
        passes: Mapping[ScheduleName, Callable[[], object]]
        passes = {name: partial(run, transport) for name, run in layer.runs().items()}
        if self.recorder is not None:
            passes = self._by_graphs(key, passes, self.recorder)

        def repeated(run: Callable[[], object], times: int) -> None:
            for _ in range(times):
                run()
            wait_for(device)

        runs = {name: partial(repeated, run) for name, run in passes.items()}
        left = self._seconds_of_key - max(gather_over_ranks(self._clock() - begin))
        turns = time_in_turns(runs, left, self._clock, _slowest)
        return None if turns is None else ScheduleRecord.of_turns(turns)

    def _by_graphs(
        self,
        key: ScheduleKey,
        passes: Mapping[ScheduleName, Callable[[], object]],
        recorder_on: Callable[[torch.device], RecordsCalls],
    ) -> Mapping[ScheduleName, Callable[[], object]]:
        """The same as CUDA graphs, which launch nothing, as steps by graphs do; as they are where a rank cannot."""
        assert self._group is not None
        for run in passes.values():  # what it needs for the first time, it does not meet in a capture
            run()
        wait_for(self._group.device)
        recorded, reason = {}, None
        try:
            recorder = recorder_on(self._group.device)
            recorded = {name: recorder.repeat(run) for name, run in passes.items()}
        except Exception as error:  # peers must not wait for this rank
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        reasons = [f"rank {rank}: {each}" for rank, each in enumerate(gather_over_ranks(reason)) if each is not None]
        if reasons:
            self._say(f"Schedule of {key}: it is measured without CUDA graphs ({'; '.join(reasons)}).")
        return passes if reasons else recorded

    def _common_objection(self) -> str | None:
        """What stands against other schedules on some rank; None if nothing does on any. Collective."""
        mine = next((reason for each in self._objections if (reason := each()) is not None), None)
        return next((reason for reason in gather_over_ranks(mine) if reason is not None), None)

    def _renew(self, objection: str | None) -> None:
        if objection is not None and objection != self.table.objection:
            self._say(f"Schedules: all layers run serial, as {objection}.")
        measured = {key: record.gains for key, record in self._records.items()}
        before, self.table = self.chosen, ScheduleTable(measured, self._before, self._machine, objection)
        self.version += self.chosen != before
        self._report_changes()

    def _say(self, line: str) -> None:
        if rank_in_world() == 0:
            self._log(line)

    # -- reports and checkpoints ---------------------------------------------------------------------------------

    def _describe(self, key: ScheduleKey) -> str:
        name, why = self.table.explain(key)
        return str(self._records[key]) if why == "measured" else f"{name} ({why})"

    def describe(self) -> dict[str, str]:
        """What was chosen and by what, of the kinds of layers that have run."""
        return {str(key): self._describe(key) for key in sorted(self._met | self._asked)}

    @property
    def chosen(self) -> dict[str, ScheduleName]:
        """What was chosen, of the kinds of layers that have run."""
        return {str(key): self.table.choose(key) for key in sorted(self._met | self._asked)}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: what was asked for, and what was chosen."""
        known = {str(key): self.table.choose(key) for key in self._records if str(key) in self._before}
        return {"schedule": self.schedule, "chosen": self._before | known | self.chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ran before a checkpoint, until it is measured; says where that changes it.

        To be called by all ranks with the same state, between two steps.
        """
        if state["schedule"] != self.schedule:
            self._say(f"Schedules: schedule={self.schedule!r}; it was {state['schedule']!r} in the checkpoint.")
        names = get_args(ScheduleName)
        self._before = {kind: name for kind, name in state["chosen"].items() if name in names}
        self._compared = set()
        self._renew(self.table.objection)

    def _report_changes(self) -> None:
        for key in sorted(self._records.keys() - self._compared):
            before, now = self._before.get(str(key)), self.table.choose(key)
            if before not in (None, now):
                self._say(f"Schedule of {key}: {self._describe(key)}; it was {before} before the checkpoint.")
        self._compared = {*self._records}


def as_schedules(schedule: ScheduleSetting | ScheduleChoices, log: Callable[[str], None]) -> ScheduleChoices:
    """Returns choices as they are, and for a name new ones."""
    return schedule if isinstance(schedule, ScheduleChoices) else ScheduleChoices(schedule, log=log)


def _place_of(group: TrialGroup) -> LayerPlacement:
    """Where layers run; collective over all ranks, so that all say the same."""
    names = gather_over_ranks(socket.gethostname())
    hosts = max(gather_over_ranks(len({names[rank] for rank in group.mesh.ulysses.ranks})))
    sizes = group.mesh.ulysses.size, group.mesh.ring.size
    return of_first_rank(LayerPlacement(device_name(group.device), group.transport.name, *sizes, hosts))


def _rehearsed(key: ScheduleKey, group: TrialGroup) -> tuple[TrialLayer | None, str | None]:
    """A layer that this rank has run under each schedule, without its peers; or why it cannot."""
    try:
        layer = TrialLayer(key, group)
        for run in layer.runs().values():
            run(Alone())
        wait_for(group.device)
    except Exception as error:  # out of memory, or a kernel that does not run here: peers must not wait for it
        return None, f"{type(error).__name__}: {error}"
    return layer, None


def _slowest(mine: Sequence[float]) -> list[float]:
    return [max(each) for each in zip(*gather_over_ranks(list(mine)), strict=True)]
