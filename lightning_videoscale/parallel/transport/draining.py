"""Brings a device to rest whose streams wait for flags that no peer will set any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta


def drain(synchronize: Callable[[], None], release: Callable[[], None], timeout: timedelta) -> str | None:
    """Waits until a device has done all it was given, and releases its streams meanwhile.

    Streams may be any that have used the device, and one that is released may come to another wait. So a thread waits
    for the device as a whole, and flags are set again and again.

    Args:
        synchronize: Waits for the device.
        release: Sets the flags that its streams wait for in vain; does not wait.
        timeout: How long to try.

    Returns:
        Why the device did not come to rest; None if it did.
    """
    ended: Future[None] = Future()

    def wait_for_device() -> None:
        try:
            synchronize()
            ended.set_result(None)
        except RuntimeError as error:
            ended.set_exception(error)

    threading.Thread(target=wait_for_device, name="transport-drain", daemon=True).start()
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        while not ended.done():
            if time.monotonic() > deadline:
                return (
                    f"its device is still at work after {timeout}, and waits for no message of this transport; a "
                    "collective that only some ranks began would keep it"
                )
            release()
            wait([ended], 0.001)
        ended.result()
        synchronize()  # for the flags that were set last
    except RuntimeError as error:
        return f"its device has failed ({error})"
    return None
