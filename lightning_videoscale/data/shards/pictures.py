"""What a frame looks like when it is shown: upright, its pixels square, in RGB."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.shards.film import MediaError

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_HDR = {16: "PQ", 18: "HLG"}  # ITU-T H.273, transfer characteristics
_MAX_ASPECT = 8  # more is no picture, and would take much memory
_UNKNOWN_TO_PYAV = range(28, 32)  # FFmpeg's enum AVFrameSideDataType: LCEVC, view, 3D displays, EXIF


def check_colors(curve: int) -> None:
    """Raises MediaError if a transfer characteristic of ITU-T H.273 is one of HDR."""
    if curve in _HDR:
        raise MediaError(
            f"its colours are HDR ({_HDR[curve]}), which looks wrong without tone mapping; convert it to SDR first, "
            "for example by FFmpeg's filters zscale and tonemap"
        )


def shown_size(frame: VideoFrame, aspect: Fraction) -> tuple[int, int]:
    """Height and width of a frame as it is shown: its rows as wide as makes pixels of this aspect square, and upright.

    Raises:
        MediaError: If it cannot be shown as it is meant: its colours are HDR, it is turned by an odd angle, or its
            pixels are far from square.
    """
    check_colors(frame.color_trc)
    if not 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT:
        raise MediaError(f"its pixels are {aspect} times as wide as they are high, by its header")
    size = frame.height, max(1, int(frame.width * aspect))  # cut off as FFmpeg's scale=iw*sar:ih does
    return size[::-1] if _turn(frame)[0] else size


def shown(frame: VideoFrame, aspect: Fraction, height: int, width: int) -> NDArray[np.uint8]:
    """Returns a frame as (height, width, 3) in RGB: upright, scaled to cover this size, cropped around its centre.

    Raises:
        MediaError: As `shown_size` does.
    """
    transposed, mirrored, upside_down = _turn(frame)
    if transposed:
        height, width = width, height
    stretched = shown_size(frame, aspect)[0 if transposed else 1]
    scale = max(height / frame.height, width / stretched)
    rows, columns = max(height, round(frame.height * scale)), max(width, round(stretched * scale))
    # The colours of a palette may be transparent, which its format does not say.
    has_alpha = frame.format.name == "pal8" or any(component.is_alpha for component in frame.format.components)
    picture = frame.reformat(columns, rows, "rgba" if has_alpha else "rgb24", threads=1)
    top, left = (rows - height) // 2, (columns - width) // 2
    pixels: Any = picture.to_ndarray()[top : top + height, left : left + width]
    if has_alpha:
        # Over black, as players show it: what lies under transparent pixels was never meant to be seen.
        pixels = (pixels[..., :3].astype(np.uint16) * pixels[..., 3:] // 255).astype(np.uint8)
    if transposed:
        pixels = pixels.swapaxes(0, 1)
    upright: NDArray[np.uint8] = pixels[:: -1 if upside_down else 1, :: -1 if mirrored else 1]
    return upright


def _turn(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """How a frame is set upright, by its display matrix or EXIF tag: transposed, then mirrored, then upside down.

    The matrix sends column p and row q to column a p + c q and row b p + d q.
    """
    matrix = _side_data(frame).get("DISPLAYMATRIX")
    if matrix is None:
        return False, False, False
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    straight, across = max(abs(a), abs(d)), max(abs(b), abs(c))
    if min(straight, across) > 0.02 * max(straight, across):
        raise MediaError(f"its display matrix ({a}, {b}, {c}, {d}) / 65536 turns it by no quarter of a circle")
    return (True, c < 0, b < 0) if across > straight else (False, a < 0, d < 0)


def _side_data(frame: VideoFrame) -> Any:
    try:
        return frame.side_data
    except ValueError:
        # PyAV 18 reads none if there is one of a kind that it does not know, such as EXIF: they are filtered out.
        import av

        graph = av.filter.Graph()
        source = graph.add_buffer(
            width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or Fraction(1)
        )
        unknown = [graph.add("sidedata", f"mode=delete:type={number}") for number in _UNKNOWN_TO_PYAV]
        graph.link_nodes(source, *unknown, graph.add("buffersink")).configure()
        graph.vpush(frame)
        return graph.vpull().side_data
