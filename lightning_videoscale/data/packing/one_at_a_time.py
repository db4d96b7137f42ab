"""One process packs a folder while others wait: other nodes of a job, or another command.

The file that is locked lies beside the output. The kernel drops the lock of a process that has ended, also by a kill.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from lightning_videoscale.data.shards.errors import ShardError

_log = logging.getLogger(__name__)
_PATIENCE = 1800.0
"""Seconds without a new byte in the output: as long as the files of a very large folder may take to be listed."""
_INTERVAL = 0.5


@contextmanager
def one_at_a_time(output: Path, patience: float = _PATIENCE, is_needed: bool = True) -> Iterator[None]:
    """Holds the lock of an output folder; waits for it, with a message, while another process has it.

    Args:
        output: The folder, which need not be there.
        patience: Seconds to wait while the other process writes nothing.
        is_needed: Whether it is an error if there can be no lock. Else nobody is waited for then.

    Raises:
        TimeoutError: If it has written nothing for as long.
        ShardError: If the file system has no locks.
        PermissionError: If nothing can be written beside the output.
    """
    with ExitStack() as held:
        try:
            held.enter_context(_lock(output, patience))
        except (ShardError, PermissionError) as error:
            if is_needed:
                raise
            _log.warning("No other process may pack into %s meanwhile, as it cannot be waited for: %s", output, error)
        yield


@contextmanager
def _lock(output: Path, patience: float) -> Iterator[None]:
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f".{output.name}.lock").open("a+", encoding="utf-8") as lock:
        _acquire(lock, output, patience)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def _acquire(lock: TextIO, output: Path, patience: float) -> None:
    last, since, has_said = _state(output), time.monotonic(), False
    while not _try(lock, output):
        lock.seek(0)
        other = lock.read() or "another process"
        if not has_said:
            _log.warning("%s packs %s just now; waiting for it.", other, output)
            has_said = True
        if (now := _state(output)) != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > patience:
            raise TimeoutError(
                f"{other} holds the lock of {output} and has written nothing for {patience:.0f} seconds: end it, and "
                "start again. To pack before the job starts: videoscale pack FOLDER OUTPUT."
            )
        time.sleep(_INTERVAL)


def _try(lock: TextIO, output: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ShardError(
            f"The file system of {output} has no locks ({error}), so that several processes could pack at a time. Pack "
            "beforehand, and give the shards: videoscale pack FOLDER OUTPUT"
        ) from error
    return True


def _state(output: Path) -> list[tuple[str, int, int]]:
    """What changes when something is written."""
    found = []
    for file in output.iterdir() if output.is_dir() else ():
        try:
            state = file.stat()
        except FileNotFoundError:  # renamed just now
            continue
        found.append((file.name, state.st_size, state.st_mtime_ns))
    return sorted(found)
