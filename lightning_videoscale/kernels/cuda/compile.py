"""Source and constants to machine code (a cubin), through NVRTC and a cache on disk.

A cubin is named by a hash of everything that goes into it: architecture, constants, the texts of all sources, the
toolkit's headers and NVRTC's version. It appears in the cache by an atomic rename. Many processes may
ask for one cubin at once: one compiles, the others wait for it.

Ahead of time: `cubin` needs no GPU. Call it with the architecture of the machine to come and take the cache there.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.resources
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.file_lock import file_lock

CACHE_VARIABLE = "LIGHTNING_VIDEOSCALE_CACHE"
_FLAGS = ("--std=c++17", "--extra-device-vectorization")
_log = logging.getLogger(__name__)


class CompilationError(RuntimeError):
    """NVRTC rejected a source; the message holds its log."""


def cubin(
    source: str, constants: Mapping[str, str | int], arch: str, *, folder: Path | None = None, timeout: float = 600.0
) -> bytes:
    """Machine code of one source, from the cache or compiled now.

    Args:
        source: A file of ``csrc``, such as "rows_forward.cuh".
        constants: Macros, name to value.
        arch: Such as "sm_90".
        folder: Of the cache; by default `cache_folder`.
        timeout: Seconds to wait for another process that compiles the same.

    Returns:
        The cubin.

    Raises:
        CudaUnavailableError: If NVRTC or the toolkit's headers are missing.
        CompilationError: If the source does not compile.
        TimeoutError: If another process did not finish compiling in time.
    """
    path = (folder or cache_folder()) / f"{source.split('.')[0]}-{arch}-{_key(source, constants, arch)}.cubin"
    return cached(path, lambda: _compile(source, constants, arch), timeout)


def cached(path: Path, make: Callable[[], bytes], timeout: float) -> bytes:
    """What a file holds; where there is none, one process makes it while all others wait.

    Where the file can be neither kept nor read (a folder that others may only read, a full disk), each process makes
    its own, and the log says so.

    Raises:
        TimeoutError: If another process did not finish within ``timeout`` seconds.
    """
    made = None
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(path.with_suffix(".lock"), timeout, "compiling a CUDA kernel"):
                if not path.exists():
                    made = make()
                    write_whole(path, made)
        return path.read_bytes()
    except TimeoutError:
        raise
    except OSError as error:
        _log.warning(
            "A compiled kernel cannot be kept or read (%s), so that each process compiles its own. Set %s to a folder "
            "on a local disk.", error, CACHE_VARIABLE,
        )  # fmt: skip
        return make() if made is None else made


def check_cache(arch: str, folder: Path | None = None) -> None:
    """Checks that the cache can be written and locked, or holds what was compiled ahead of time for an architecture.

    Raises:
        CudaUnavailableError: If not; the message says what failed.
    """
    try:
        folder = folder or cache_folder()
        if any(folder.glob(f"*-{arch}-*.cubin")) and not os.access(folder, os.W_OK):
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="probe") as probe:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, RuntimeError) as error:  # the latter where a user has no home
        raise toolkit.CudaUnavailableError(
            f"The cache folder of compiled kernels cannot be written or locked ({error}). "
            f"Set {CACHE_VARIABLE} to a folder on a local disk."
        ) from error


def cache_folder() -> Path:
    """``$LIGHTNING_VIDEOSCALE_CACHE``, or else ``lightning_videoscale`` in the user's cache folder."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_videoscale"


def sources() -> Path:
    """The folder ``csrc``."""
    return Path(str(importlib.resources.files("lightning_videoscale") / "csrc"))


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(sources().glob("*.cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _key(source: str, constants: Mapping[str, str | int], arch: str) -> str:
    state = (source, sorted(constants.items()), arch, _FLAGS, _sources_digest())
    state_of_toolkit = (toolkit.nvrtc_version(), toolkit.headers_digest())
    return hashlib.sha256(repr((state, state_of_toolkit)).encode()).hexdigest()[:32]


def _compile(source: str, constants: Mapping[str, str | int], arch: str) -> bytes:
    nvrtc, check = toolkit.nvrtc(), toolkit.check
    started = time.monotonic()
    text = (sources() / source).read_bytes()
    created = nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], [])
    program = check(created, f"Creating an NVRTC program of {source}")
    try:
        options = [f"--gpu-architecture={arch}", *_FLAGS, f"-I{sources()}", f"-I{toolkit.include_folder()}"]
        options += [f"-D{name}={value}" for name, value in constants.items()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program), "Asking for the size of NVRTC's log"))
            check(nvrtc.nvrtcGetProgramLog(program, log), "Reading NVRTC's log")
            raise CompilationError(
                f"NVRTC {toolkit.nvrtc_version()} could not compile csrc/{source} for {arch} with {dict(constants)}:\n"
                f"{log.rstrip(bytes(1)).decode(errors='replace')}"
            )
        code = bytearray(check(nvrtc.nvrtcGetCUBINSize(program), "Asking for the size of a cubin"))
        check(nvrtc.nvrtcGetCUBIN(program, code), "Reading a cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    _log.info("Compiled csrc/%s for %s in %.1f s.", source, arch, time.monotonic() - started)
    return bytes(code)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that others find whole or not at all; what fails leaves nothing behind."""
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
