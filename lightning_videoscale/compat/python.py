"""What Python has no public way for: the stack of one thread, read by another."""

from __future__ import annotations

import ctypes
import faulthandler
import platform
import sys
import tempfile
import threading

from lightning_videoscale.compat.names import MissingNameError


class ThreadStack:
    """The stack of the thread that makes this, for any thread to read.

    Each public way may end the process. Frame objects of another thread, which `sys._current_frames` returns, do so
    while `torch.compile` traces there (Python 3.11, torch 2.13). `faulthandler` walks all threads, and does so while
    native code makes one of its own known to Python 3.11. So the function behind it is called for the one thread. As of
    3.13 no library can call that, and `faulthandler` skips a thread that is not complete.

    Raises:
        MissingNameError: Under Python 3.11 or 3.12, if this build does not show that function.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        if sys.version_info < (3, 13):
            name = "_Py_DumpTraceback"
            if not hasattr(ctypes.pythonapi, name):
                raise MissingNameError(
                    f"This build of Python {platform.python_version()} does not export {name}, by which a rank tells "
                    "its peers at which line it is. It was tried with CPython 3.11.7 and 3.12.1, and 3.13 does without."
                )
            self._dump = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)((name, ctypes.pythonapi))
            self._state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))()

    def read(self) -> str:
        """Returns a line ``  File "…", line … in …`` a frame, the innermost first; none of a thread that has ended."""
        if not self._thread.is_alive():
            return ""
        with tempfile.TemporaryFile() as file:
            if sys.version_info < (3, 13):
                self._dump(file.fileno(), self._state)
            else:
                faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            threads = file.read().decode(errors="replace").split("\n\n")
        if sys.version_info < (3, 13):
            (own,) = threads
        else:
            own = next((text for text in threads if f" {self._thread.ident or 0:#018x} " in text), "")
        return own
