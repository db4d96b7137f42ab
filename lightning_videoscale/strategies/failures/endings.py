"""How processes and errors end a job: what an error says of peers, and ending what does not end by itself."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Sequence


def end_by_alarm(seconds: float) -> None:
    """Has the kernel end this process if it does not end by itself: on a failed GPU, libraries may wait for ever."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(round(seconds))


def is_timeout(exception: BaseException) -> bool:
    """Whether an error says that a wait took too long."""
    return isinstance(exception, (RuntimeError, TimeoutError)) and bool(
        re.search(r"timed? ?out", str(exception), re.IGNORECASE)
    )


def is_broken_connection(exception: BaseException) -> bool:
    """Whether an error says that a peer is gone, which is never what failed first."""
    return isinstance(exception, (RuntimeError, OSError)) and bool(
        re.search(r"connection (closed|reset)|broken pipe|remote process|aborted", str(exception), re.IGNORECASE)
    )


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Ends processes, after waiting ``grace`` seconds in which they may end by themselves."""
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
