"""When a strategy lets schedules of the exchange be measured and chosen: with the kernels of attention, after those."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_videoscale.graphs import Recorder
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.strategies.chosen_attention import ChoosesAttention
from lightning_videoscale.strategies.settings import SequenceParallelSettings


class ChoosesSchedule(ChoosesAttention):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    def _init_schedule(self, settings: SequenceParallelSettings) -> None:
        self._only_serial = settings.only_serial if settings.schedule == "auto" else None
        self.schedule_choices = ScheduleChoices(
            settings.schedule if self._only_serial is None else "serial", log=rank_zero_info
        )

    def _prepare_schedule(self, *, by_graphs: bool) -> None:
        """To be called before the model is changed; steps run by CUDA graphs or may come to."""
        self.schedule_choices.recorder = Recorder if by_graphs and self.root_device.type == "cuda" else None
        if self._only_serial is not None:
            rank_zero_info(
                f"schedule='auto' is 'serial' beside {self._only_serial}, as blocks would be compiled anew for each "
                "choice. Others run there by name."
            )

    @override
    def _settle_choices(self) -> None:
        super()._settle_choices()
        self.schedule_choices.settle()

    def describe_schedules(self) -> dict[str, str]:
        """Which schedule runs each kind of layer that has run, and what it was chosen by; empty unless by "auto"."""
        return self.schedule_choices.describe()
