"""The examples on the import path, where a user's `python examples/x.py` has them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.footage import moving_square, write_video

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def footage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a landscape clip, a portrait one and a webm."""
    folder = tmp_path_factory.mktemp("footage")
    write_video(folder / "landscape.mp4", moving_square(24, 72, 128))
    write_video(folder / "portrait.mov", moving_square(20, 96, 64))
    write_video(folder / "square.webm", moving_square(18, 64, 64), codec="libvpx")
    return folder


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., str]:
    """`run_example("train.py", "fit", ...)` runs a script in an empty folder and returns what it prints."""

    def run(script: str, *arguments: str | Path) -> str:
        command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
