"""Source and constants to machine code (a cubin), through NVRTC and a cache on disk.

A cubin is named by a hash of everything that goes into it: architecture, constants, the texts of the source and of all
it includes, the toolkit's headers and NVRTC's version. It appears in the cache by an atomic rename. Many processes may
ask for one cubin at once: one compiles, the others wait for it. The lock is the kernel's own and ends with its process,
so that a killed process leaves nobody waiting.

Ahead of time: `cubin` needs no GPU. Call it with the architecture of the machine to come and take the cache there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightning_videoscale.kernels.cuda import sources, toolkit

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
    texts = sources.with_includes(source)
    path = (folder or cache_folder()) / f"{source.split('.')[0]}-{arch}-{_key(texts, constants, arch)}.cubin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock"), timeout):
            if not path.exists():
                _write(path, _compile(source, texts, constants, arch))
    return path.read_bytes()


def cache_folder() -> Path:
    """``$LIGHTNING_VIDEOSCALE_CACHE``, or else ``lightning_videoscale`` in the user's cache folder."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_videoscale"


def _key(texts: Mapping[str, str], constants: Mapping[str, str | int], arch: str) -> str:
    parts = (sorted(texts.items()), sorted(constants.items()), arch, _FLAGS)
    state = repr((parts, toolkit.nvrtc_version(), toolkit.headers_digest()))
    return hashlib.sha256(state.encode()).hexdigest()[:32]


def _compile(source: str, texts: Mapping[str, str], constants: Mapping[str, str | int], arch: str) -> bytes:
    nvrtc, check = toolkit.nvrtc(), toolkit.check
    started = time.monotonic()
    includes = {name: text for name, text in texts.items() if name != source}
    created = nvrtc.nvrtcCreateProgram(
        texts[source].encode(),
        source.encode(),
        len(includes),
        [text.encode() for text in includes.values()],
        [name.encode() for name in includes],
    )
    program = check(created, f"Creating an NVRTC program of {source}")
    try:
        options = [f"--gpu-architecture={arch}", *_FLAGS, f"-I{toolkit.include_folder()}"]
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


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


@contextmanager
def _lock(path: Path, timeout: float) -> Iterator[None]:
    """Holds the lock of one cubin, having waited at most ``timeout`` seconds for it."""
    with path.open("w") as file:
        deadline, told = time.monotonic() + timeout, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Another process has held {path} for more than {timeout:.0f} s while compiling a CUDA kernel. "
                        f"If none is compiling, remove that file, or set {CACHE_VARIABLE} to a folder on a local disk."
                    ) from None
                if not told:
                    _log.info("Waiting for another process to compile %s.", path.stem)
                    told = True
                time.sleep(0.05)
        yield
