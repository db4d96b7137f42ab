"""From shards of videos to shards of latents, on any number of ranks, in pieces that are whole or not there.

The samples of an index are cut into pieces of equally many; piece i becomes the shard ``i.tar``, whoever makes it. A
rank takes every R-th of the pieces that are missing, and a piece appears under its name when it is complete. So a run
that was stopped goes on, on as many ranks as there are then, and its result does not depend on how often that happened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm  # type: ignore[import-untyped]
from webdataset import TarWriter

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.planning.shapes import Media, ShapedClips, ShapePolicy
from lightning_videoscale.data.shards.errors import MemberError, ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader

_SETTINGS = "encoded.json"
_PIXEL_FIELDS = ("frames", "height", "width")


class Encoder(Protocol):
    """What makes latents of pixels."""

    name: str
    geometry: ModelGeometry

    def encode(self, video: Tensor) -> Tensor:
        """Encodes pixels (3, F, H, W) uint8 to latents (C, f, h, w)."""
        ...


class Refused(NamedTuple):
    """A sample that was left out."""

    sample: str
    reason: str


class EncodeReport(NamedTuple):
    """What one rank did.

    Attributes:
        written: Pieces that it made in this run.
        found: Pieces that were there already, whoever made them.
        refused: What was left out of the pieces that this run made.
    """

    written: int
    found: int
    refused: tuple[Refused, ...]


@dataclass(frozen=True)
class EncodeSettings:
    """What the result depends on, beside samples and VAE.

    Attributes:
        policy: Which part of a clip is encoded, at which size and rate.
        seed: Seed of the policy's draws.
        samples_per_shard: Samples of a piece.

    Raises:
        ValueError: If the seed is negative, or a piece would hold no sample.
    """

    policy: ShapePolicy
    seed: int = 0
    samples_per_shard: int = 128

    def __post_init__(self) -> None:
        # Before the output folder is begun, which takes no other settings afterwards.
        if self.seed < 0 or self.samples_per_shard < 1:
            raise ValueError(
                f"EncodeSettings needs seed >= 0 and samples_per_shard >= 1, got {self.seed} and "
                f"{self.samples_per_shard}."
            )


def encode_shards(
    index: ShardIndex,
    encoder: Encoder,
    output: Path,
    settings: EncodeSettings,
    *,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    progress: bool = False,
) -> EncodeReport:
    """Encodes the videos and images of an index.

    A sample of the result has ``latents.npy`` (float16), the members that the source has beside its video, and in its
    ``json`` under ``pixels`` what was encoded: frames, height, width, fps, and the second at which it starts.

    Args:
        index: The samples.
        encoder: Makes latents of them.
        output: Folder of the pieces.
        settings: Which pixels.
        rank: This rank's number.
        world_size: How many ranks there are; each calls this, none waits for another.
        workers: Processes that decode ahead; 0 decodes in this one.
        progress: Whether to show a progress bar.

    Raises:
        ShardError: If the folder holds something made of other samples or settings, with the difference, the index
            holds latents, or a shard cannot be read. The pieces that are written stay, and another run goes on.
    """
    if (index.samples.clips.media == Media.LATENTS).any():
        raise ShardError("The shards hold latents already; encode those with videos and images only.")
    _check_settings(output, index, encoder, settings)
    size = settings.samples_per_shard
    pieces = range((len(index) + size - 1) // size)
    mine = [piece for piece in pieces[rank::world_size] if not _name(output, piece).exists()]
    shaped = settings.policy.shape(index.samples.clips, encoder.geometry, settings.seed)
    numbers = [n for piece in mine for n in range(piece * size, min(len(index), (piece + 1) * size))]
    cuts = _Cuts(index, shaped, numbers, settings.policy.fps)
    loader: DataLoader[_Read] = DataLoader(cuts, batch_size=None, num_workers=workers, collate_fn=_unchanged)
    refused: list[Refused] = []
    with tqdm(desc="encoding", total=len(numbers), unit=" clips", disable=not progress) as bar:
        for piece, reads in groupby(loader, key=lambda read: read.number // size):
            refused += _write_piece(_name(output, piece), reads, index, encoder, bar)
    return EncodeReport(len(mine), len(pieces[rank::world_size]) - len(mine), tuple(refused))


class _Read(NamedTuple):
    """A sample that a worker has read, or the reason why not."""

    number: int
    cut: Cut
    video: Tensor | None
    members: dict[str, bytes]
    reason: str = ""


class _Cuts(Dataset[_Read]):
    """Samples as the encoder wants them, to be read by workers."""

    def __init__(self, index: ShardIndex, shaped: ShapedClips, numbers: Sequence[int], fps: float) -> None:
        self._reader = SampleReader(index)
        self._shaped = shaped
        self._numbers = numbers
        self._fps = fps

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> _Read:
        number = self._numbers[place]
        sample, shape_id = self._reader.index.samples[number], int(self._shaped.shape_id[number])
        fps = min(self._fps, sample.fps) if sample.media == Media.VIDEO else 0.0
        cut = Cut(self._shaped.shapes[max(shape_id, 0)], float(self._shaped.start[number]), fps)
        if shape_id < 0:
            size = f"{sample.width} x {sample.height}"
            return _Read(number, cut, None, {}, f"its {size} pixels are fewer than the model makes into one token")
        try:
            return _Read(number, cut, self._reader.pixels(number, cut), self._reader.beside(number))
        except MemberError as error:
            return _Read(number, cut, None, {}, str(error))


def _write_piece(file: Path, reads: Iterator[_Read], index: ShardIndex, encoder: Encoder, bar: tqdm) -> list[Refused]:
    for left in file.parent.glob(f".{file.name}.*"):
        left.unlink(missing_ok=True)
    draft = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    refused = []
    with draft.open("wb") as stream:
        with TarWriter(stream, mtime=0) as writer:
            for read in reads:
                key = index.sample_id(read.number)
                try:
                    writer.write({"__key__": key.lstrip("/"), **_encoded(read, encoder)})
                except _LeftOutError as error:
                    refused.append(Refused(key, str(error)))
                bar.update()
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
    return refused


class _LeftOutError(ValueError):
    pass


def _encoded(read: _Read, encoder: Encoder) -> dict[str, Any]:
    if read.video is None:
        raise _LeftOutError(read.reason)
    members = {extension: content for extension, content in read.members.items() if extension != "json"}
    frames, height, width, _ = read.cut.shape
    pixels = {"frames": frames, "height": height, "width": width, "fps": read.cut.fps, "start": read.cut.start}
    try:
        fields = json.loads(read.members.get("json", b"{}").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _LeftOutError(f"its .json cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise _LeftOutError(f"its .json holds a {type(fields).__name__}; it must hold an object")
    # In a shard of latents these names speak of the latents.
    fields = {f"source_{name}" if name in _PIXEL_FIELDS else name: value for name, value in fields.items()}
    latents = encoder.encode(read.video).half().numpy()
    if not np.isfinite(latents).all():
        raise _LeftOutError("its latents are not finite in float16")
    return {**members, "latents.npy": latents, "json": fields | {"pixels": pixels}}


def _check_settings(output: Path, index: ShardIndex, encoder: Encoder, settings: EncodeSettings) -> None:
    """Notes what the folder is made of, or compares it with what it was made of before."""
    wanted = json.loads(json.dumps({"samples": index.digest, "vae": encoder.name, **asdict(settings)}))
    file = output / _SETTINGS
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
        draft.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        draft.replace(file)
    found = json.loads(file.read_text(encoding="utf-8"))
    if different := [name for name in wanted if found.get(name) != wanted[name]]:
        was, now = ({name: of.get(name) for name in different} for of in (found, wanted))
        raise ShardError(
            f"{output} was begun with {was}, and now they are {now}: choose another folder, or the same settings."
        )


def _name(output: Path, piece: int) -> Path:
    return output / f"{piece:06}.tar"


def _unchanged(read: Any) -> Any:
    return read
