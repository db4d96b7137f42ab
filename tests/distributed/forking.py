"""Processes that are forked from one that has all modules imported, in a moment; one such server for all tests."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Returns the context whose processes are forked; the first one starts the server, which imports for seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    return context
