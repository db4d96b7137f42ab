"""A script catches the error of a fit, on all ranks, and fits again: what Lightning had started is gone by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.scripts import printed_in, start_forked
from tests.strategies.fsdp2.training import clips, trainer

SCRIPT = """
from tests.strategies.failures.test_ended_jobs import fit_twice

print("steps of both:", fit_twice(devices=2))
"""


class Failing(RectifiedFlow):
    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("too large a clip")


def fit_twice(**kwargs: int) -> list[int]:
    first, second = (trainer("ulysses_ddp", **kwargs) for _ in range(2))
    with pytest.raises(torch.OutOfMemoryError):
        first.fit(Failing(), clips())
    second.fit(RectifiedFlow(), clips())
    return [first.global_step, second.global_step]


def test_the_error_of_the_second_fit_names_that_of_the_first(tmp_path: Path) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(SCRIPT)
    process = start_forked(tmp_path, script)
    process.join(120)
    printed = printed_in(tmp_path)
    assert process.exitcode == 1 and "steps of both" not in printed.stdout
    last = printed.stderr.strip().splitlines()[-1]
    assert "RuntimeError" in last and "OutOfMemoryError: too large a clip" in last and "torchrun" in last


def test_ranks_that_torchrun_started_go_on(ranks: Callable[[int], ProcessPool]) -> None:
    assert ranks(2).run(fit_twice) == [[0, 2], [0, 2]]
