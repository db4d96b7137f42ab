"""`SampleVideos` over ranks: the videos of one device, prompts shared out, training as if nothing were sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_videoscale.callbacks.sample_files import read_picture
from tests.distributed.callbacks.sampling import messages, save_parts, train_and_sample
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed

Ranks = Callable[[int], ProcessPool]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_parts(tmp_path_factory.mktemp("parts"))


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {file.name: read_picture(file).astype(int) for file in sorted(folder.glob("*.png"))}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, parts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one device samples that trains on the same clip."""
    folder = tmp_path_factory.mktemp("alone")
    assert ranks(1).run(train_and_sample, "ddp", 1, parts, folder) == [True]
    found = pictures(folder)
    names = [f"step-0000000{step}-prompt-0{prompt}.png" for step in (0, 2) for prompt in range(3)]
    assert sorted(found) == names
    assert all((found[name] != found[names[0]]).any() for name in names[1:])
    return found


@pytest.mark.parametrize(
    ("name", "sp"),
    [
        ("ddp", 1),
        pytest.param("ddp", 2, marks=pytest.mark.full),
        pytest.param("fsdp2", 1, marks=pytest.mark.full),
        pytest.param("fsdp2", 2, marks=pytest.mark.full),
        pytest.param("zero3", 1, marks=[needs_deepspeed, pytest.mark.full]),
        pytest.param("zero3", 2, marks=needs_deepspeed),
    ],
)
def test_ranks_sample_what_one_device_does(
    ranks: Ranks, parts: Path, alone: dict[str, np.ndarray], tmp_path: Path, name: str, sp: int
) -> None:
    assert ranks(2).run(train_and_sample, name, sp, parts, tmp_path) == [True, True]
    found = pictures(tmp_path)
    assert found.keys() == alone.keys()
    for file, picture in found.items():
        # Two data-parallel ranks train on other clips than one, so only what is sampled before compares.
        if sp == 2 or file.startswith("step-00000000"):
            assert np.abs(picture - alone[file]).max() <= 1


def test_a_rank_that_samples_with_others_cannot_go_on_alone(ranks: Ranks, parts: Path, tmp_path: Path) -> None:
    alone, *together = ranks(2).run(messages, parts, tmp_path)[0]
    assert alone == "no error"
    assert all('on_error="raise"' in message for message in together)
