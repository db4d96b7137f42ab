"""A lock between processes.

It is the kernel's own and ends with its process, so that a killed process leaves nobody waiting.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)


@contextmanager
def file_lock(path: Path, timeout: float, doing: str) -> Iterator[None]:
    """Holds the lock of a file, which stays when it is released.

    Args:
        path: The file, in a folder that is there.
        timeout: Seconds to wait for another process at most.
        doing: What that process does meanwhile, such as "compiling a CUDA kernel"; for messages.

    Raises:
        TimeoutError: If another process has not released it in time.
        OSError: If the file cannot be written, or its file system has no locks.
    """
    with path.open("w") as file:
        deadline, told = time.monotonic() + timeout, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Another process has held {path} for more than {timeout:.0f} s while {doing}. If none is, "
                        "remove that file, or set LIGHTNING_VIDEOSCALE_CACHE to a folder on a local disk."
                    ) from None
                if not told:
                    _log.info("Waiting for another process that holds %s while %s.", path, doing)
                    told = True
                time.sleep(0.05)
        yield
