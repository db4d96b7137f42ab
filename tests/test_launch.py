"""`benchmarks/launch.py`: a script that starts itself under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import launch

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from benchmarks.launch import finish, task_of_worker
task = task_of_worker()
if not task["fails"]:
    finish([os.environ["WORLD_SIZE"], os.environ["RANK"], os.environ["LETTER"], task])
"""


@pytest.mark.full
def test_the_first_rank_answers_or_the_script_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    task = {"fails": False, "steps": 3}
    assert launch(str(script), 2, environment={"LETTER": "a"}, **task) == ["2", "0", "a", task]
    with pytest.raises(RuntimeError, match=r"script\.py.* on 1 ranks ended with 0"):
        launch(str(script), 1, environment={"LETTER": "a"}, fails=True)
