"""Opening videos and photographs safely.

A file's name and header are hearsay. FFmpeg looks at the content to find out what it is, which a hostile file turns
against its reader: a playlist may name other files and servers. Only formats that hold their own pictures are opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, BinaryIO

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.film import Film, MediaError, StreamFilm
from lightning_videoscale.data.shards.pictures import check_colors
from lightning_videoscale.data.shards.stills import PillowFilm, check_gif, is_for_pillow

VIDEO_SUFFIXES = frozenset(
    {"mp4", "m4v", "mov", "webm", "mkv", "avi", "ts", "mts", "m2ts", "mpg", "mpeg", "flv", "ogv"}
)
"""Extensions of members that are opened as videos."""

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "avif", "tif", "tiff"})
"""Extensions of members that are opened as photographs. What a file is, its content says."""

_VIDEO_FORMATS = ("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg")
_IMAGE_FORMATS = ("jpeg_pipe", "png_pipe", "webp_pipe", "bmp_pipe", "gif")
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # FFmpeg's own decoders leave transparency out
_ERRORS = {"mjpeg": {"err_detect": "explode"}}  # else the rest of a JPEG that was cut is grey
_DEFAULT_COUNTS = 5_000_000  # pixels, in FFmpeg
_MAX_PIXELS = 2**27  # a picture of 16 384 x 8 192; a small file can claim far more and take all memory
_OPTIONS = {
    "format_whitelist": ",".join(_VIDEO_FORMATS + _IMAGE_FORMATS),
    "protocol_whitelist": "none",
}


@contextmanager
def open_media(file: BinaryIO) -> Iterator[Film]:
    """Opens a video or picture, to be decoded by one thread.

    Raises:
        MediaError: If it is no video or picture of a known format, or breaks anywhere while it is open.
        ModuleNotFoundError: If PyAV is not installed.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Reading videos and images needs PyAV: pip install 'lightning-videoscale[video]'."
        ) from error
    try:
        check_gif(file)
        if is_for_pillow(file):
            yield PillowFilm(file, _MAX_PIXELS)
            return
        # Without its name, by which FFmpeg takes a .jpg of more than 2 kB for a series of files.
        nameless = SimpleNamespace(read=file.read, seek=file.seek, tell=file.tell)
        # Titles in other encodings than UTF-8, as AVI has them, say nothing of the pictures.
        with av.open(nameless, "r", options=_OPTIONS, metadata_errors="replace") as container:
            pictures = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
            brand = container.metadata.get("major_brand")
            if not pictures:
                kinds = sorted({stream.type for stream in container.streams})
                raise MediaError(f"it has no video stream (streams: {', '.join(kinds) or 'none'})")
            if brand in ("avif", "avis"):
                # An animation has a cover beside it.
                pictures = [s for s in pictures if s.frames > 1] or pictures
                if len(pictures) > 1:
                    raise MediaError(
                        "it is an AVIF with transparency or of several tiles; save it as one opaque picture"
                    )
            stream = max(pictures, key=_appeal)
            may_be_still = brand == "avif" or container.format.name in _IMAGE_FORMATS
            yield StreamFilm(container, stream, _decoder(stream), may_be_still)
    except (MediaError, ShardError):
        raise
    # PyAV and Pillow answer some impossible sizes, rates and names with errors of Python.
    except (av.FFmpegError, ValueError, ArithmeticError, MemoryError, OSError, SyntaxError) as error:
        reason = error.strerror if isinstance(error, av.FFmpegError) else f"{type(error).__name__}: {error}"
        raise MediaError(f"it does not decode: {reason}") from error


def _appeal(stream: Any) -> int:
    """Largest for the stream that FFmpeg's command line takes: of defaults, or else of all, that of most pixels."""
    decoder = stream.codec_context
    pixels = 0 if decoder is None else decoder.width * decoder.height
    return int(pixels + _DEFAULT_COUNTS * bool(stream.disposition & type(stream.disposition).default))


def _decoder(stream: Any) -> Any:
    """What decodes a stream.

    Raises:
        MediaError: If FFmpeg has nothing that does.
    """
    from av import CodecContext
    from av.codec.context import Flags

    decoder = stream.codec_context
    if decoder is None:
        raise MediaError("it has a video stream of a codec that FFmpeg does not know")
    if decoder.width * decoder.height > _MAX_PIXELS:
        raise MediaError(f"{decoder.width} x {decoder.height} pixels are too many")
    check_colors(decoder.color_trc)  # frames of HEVC and ProRes do not tell what the container alone says
    if stream.metadata.get("alpha_mode") == "1" and decoder.name in _WITH_ALPHA:
        decoder = CodecContext.create(_WITH_ALPHA[decoder.name], "r")
    # Workers run side by side: threads of FFmpeg's own would fight over their cores.
    decoder.thread_count = 1
    # Else what a stream crops at the left is kept where it would not lie at a round address.
    decoder.flags |= Flags.copy_opaque | Flags.unaligned
    decoder.options = {"max_pixels": str(_MAX_PIXELS), **_ERRORS.get(decoder.name, {})}
    return decoder
