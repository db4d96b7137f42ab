"""One benchmark on several numbers of ranks: the script starts itself again under torchrun, and collects what it says.

if (task := task_of_worker()) is not None:
    finish(measure(**task))                          # on every rank
else:
    rows = launch(__file__, ranks=4, steps=200)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TASK, _RESULT = "VIDEOSCALE_BENCHMARK_TASK", "VIDEOSCALE_BENCHMARK_RESULT"


def task_of_worker() -> dict[str, Any] | None:
    """The arguments that `launch` was given, in the processes that it started; None in others."""
    if _TASK not in os.environ:
        return None
    task: dict[str, Any] = json.loads(Path(os.environ[_TASK]).read_text())
    return task


def join_ranks(on_gpus: bool) -> torch.device:
    """This rank's device, under torchrun; all ranks are then one group, over NCCL or, on CPUs, over gloo."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return device


def say(text: str) -> None:
    """Prints with the time, at once: of a run that is cut off, the last line says where it was."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def finish(result: Any, any_rank: bool = False) -> None:
    """Hands a result (JSON) to the process that launched this one; the last one counts.

    Args:
        result: Of rank 0; that of others is left alone.
        any_rank: Whether it counts from whichever rank it comes, as where one fails and the others wait for it.
    """
    if any_rank or os.environ["RANK"] == "0":
        Path(os.environ[_RESULT]).write_text(json.dumps(result))


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    if not gpus:
        return {}
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(max(gpus) + 1))) if mine is None else mine.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}


def launch(
    script: str, ranks: int, gpus: Sequence[int] = (), environment: Mapping[str, str] | None = None, **task: Any
) -> Any:
    """Runs a script on ``ranks`` ranks of this machine and returns what rank 0 finished with.

    Args:
        script: Its file.
        ranks: Processes.
        gpus: Which of the GPUs that this process sees they see, from 0, as where another launch takes the others; empty
            means all.
        **task: What `task_of_worker` returns there (JSON).

    Raises:
        RuntimeError: If rank 0 did not finish with anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments, result = Path(folder) / "task.json", Path(folder) / "result.json"
        arguments.write_text(json.dumps(task))
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script],
            env=os.environ | _visible(gpus) | dict(environment or {}) | {_TASK: str(arguments), _RESULT: str(result)},
        )
        if not result.exists():
            raise RuntimeError(f"{script} with {task} on {ranks} ranks ended with {done.returncode}; see above.")
        if done.returncode:
            print(
                f"{script} with {task} on {ranks} ranks ended with {done.returncode}, after it had a result; see above."
            )
        return json.loads(result.read_text())
