"""Hooks that look at loaders while the Trainer reads one: at another of the DataModule's, or at the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.planning import BucketPlanner
from tests.data.clips import write_shards
from tests.data.loading.test_replanning import LARGE, SAMPLES, SMALL, Adopting, data
from tests.data.loading.test_resuming import SaveAfter, everything, fit, ids
from tests.data.loading.test_turns import CLIPS, OTHER, PLANNER

HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES, shards=3)


class Looking(Callback):
    """Asks for a loader in one hook."""

    def __init__(self, hook: str) -> None:
        self.lengths: set[int] = set()
        setattr(self, hook, self.look)

    def look(self, trainer: Any, *_: Any) -> None:
        self.lengths.add(len(trainer.datamodule.train_dataloader()))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_goes_on_as_if_nobody_had_looked(shards: str, tmp_path: Path, hook: str) -> None:
    plain = fit(VideoDataModule(shards, budget=SMALL))
    looking = Looking(hook)
    module = fit(VideoDataModule(shards, budget=SMALL), 1, None, looking, SaveAfter(8, tmp_path / "eight.ckpt"))
    assert module.batches == plain.batches and looking.lengths <= {len(each) for each in plain.batches.values()}
    resumed = fit(VideoDataModule(shards, budget=SMALL), 1, tmp_path / "eight.ckpt", Looking(hook))
    assert resumed.batches == {0: plain.batches[0][8:], 1: plain.batches[1]}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("settings", [{}, {"window": 30}])
def test_what_is_adopted_reaches_the_loader_that_is_read(shards: str, hook: str, settings: dict[str, Any]) -> None:
    for step in (0, 3):
        module = fit(data(shards, **settings), 2, None, Looking(hook), Adopting({step: LARGE}))
        assert all(ids(batches) == everything(SAMPLES) for batches in module.batches.values())
        sizes = [meta.samples * meta.sequence_length for meta in module.metas]
        assert max([0, *sizes[: 2 * step]]) <= 80 < max(sizes[2 * step : len(module.batches[0])])


class Reading(Looking):
    """Reads the first batches of the Trainer's own loader, as who shows some does."""

    def look(self, trainer: Any, *_: Any) -> None:
        self.first = [*islice(trainer.train_dataloader, 2)]


@pytest.mark.parametrize(
    ("hook", "settings"),
    [  # each hook with one of the settings; with all of them in `make test-full`
        pytest.param(hook, settings, marks=() if i == j else pytest.mark.full)
        for i, hook in enumerate(("on_train_batch_end", "on_train_batch_start", "on_train_epoch_start"))
        for j, settings in enumerate(({}, {"window": 30}, {"num_workers": 1}))
    ],
)
def test_batches_that_a_hook_reads_are_not_taken(
    shards: str, tmp_path: Path, hook: str, settings: dict[str, Any]
) -> None:
    file = tmp_path / "five.ckpt"
    module = fit(data(shards, **settings), 2, None, Reading(hook), Adopting({2: LARGE}), SaveAfter(5, file))
    assert all(ids(batches) == everything(SAMPLES) for batches in module.batches.values())
    resumed = fit(data(shards, **settings), 2, file, Reading(hook))
    assert ids(module.batches[0][:4] + resumed.batches[0]) == ids(resumed.batches[1]) == everything(SAMPLES)


@pytest.mark.parametrize("planner", [PLANNER, OTHER, CLIPS.planner(60)])
def test_an_epoch_that_is_read_again_beside_a_longer_one_is_whole(planner: BucketPlanner) -> None:
    began = CLIPS.planner(60) if planner.windows else PLANNER
    state = Progress.start(began, 3).state_dict(8)
    sampler = PlannedSampler(planner, 0, progress=Progress.resume(planner, state), on_begin=lambda progress: None)
    whole = [*PlannedSampler(planner, 0, epoch=3)]
    left, taken = [*sampler], sampler.taken
    assert len(left) < len(whole) and [*sampler] == [*sampler] == whole
    assert sampler.taken == taken and sampler.state_dict(taken)["is_over"]


@pytest.mark.parametrize("turn", [0, 1])
def test_it_is_whole_too_where_ranks_read_in_turn_and_stop_behind_the_last(turn: int) -> None:
    sampler = PlannedSampler(PLANNER, 0, progress=Progress.resume(PLANNER, Progress.start(PLANNER, 3).state_dict(8)))
    sampler.sharing = 2
    count = len(sampler) - sampler.taken
    own = islice(sampler, turn, None, 2)
    assert len(list(islice(own, (count + 1 - turn) // 2))) > 1
    del own
    assert [*sampler] == [*PlannedSampler(PLANNER, 0, epoch=3)]


def test_an_epoch_that_begins_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (write_shards(tmp_path / name, 20) for name in ("one", "other"))
    with caplog.at_level("INFO"):
        fit(VideoDataModule({one: 1.0, other: 1.0}, budget=SMALL), 1, None, Looking("on_train_epoch_start"))
    assert [line.split(" begins")[0] for line in caplog.messages if " begins;" in line] == ["Epoch 0", "Epoch 1"]
