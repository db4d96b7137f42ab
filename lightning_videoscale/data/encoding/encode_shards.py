"""From shards of videos to shards of latents, on any number of ranks, in pieces that are whole or not there.

The samples of an index are cut into pieces of equally many; piece i becomes the shard ``i.tar``, whoever makes it. A
rank takes every R-th of the pieces that are missing, and a piece appears under its name when it is complete. So a run
that was stopped goes on, on as many ranks as there are then, and its result does not depend on how often that happened.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm  # type: ignore[import-untyped]
from webdataset import TarWriter

from lightning_videoscale.data.encoding.encode_sample import (
    Encoder,
    LeftOutError,
    ReadSample,
    SampleEncoder,
    TextAdder,
    TextEncoder,
    as_safetensors,
    only_row,
)
from lightning_videoscale.data.encoding.output_folder import LATENTS, begin_output, write_whole
from lightning_videoscale.data.planning.shapes import Media, ShapedClips, ShapePolicy
from lightning_videoscale.data.shards.errors import MemberError, ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.location import ByteRange
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from lightning_videoscale.data.shards.storage import open_shard
from lightning_videoscale.data.shards.tars import own_key

EMPTY_PROMPT = "empty_prompt.safetensors"
_BEGINNING = 2**16
_Encode = Callable[[ReadSample], dict[str, Any]]


class RefusedSample(NamedTuple):
    """A sample that was left out."""

    sample: str
    reason: str


class EncodeReport(NamedTuple):
    """What one rank did: pieces that it made or found there already, and what it left out of those it made."""

    written: int
    found: int
    refused: tuple[RefusedSample, ...]


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
    encoder: Encoder | None,
    output: Path,
    settings: EncodeSettings,
    *,
    text: TextEncoder | None = None,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    progress: bool = False,
) -> EncodeReport:
    """Encodes the videos and images of an index; or only the captions, where it holds latents already.

    A sample of the result has ``latents.npy`` (float16), the members that the source has beside its video, and in its
    ``json`` under ``pixels`` what was encoded: frames, height, width, fps, and the second at which it starts. With a
    text encoder it has also ``text_embeds.safetensors``, the rows (n, D) of its caption's n tokens in the encoder's
    type, and ``text_mask.npy`` (L,), by which reading fills them up with zeros; the embeddings of the empty prompt are
    in the folder's ``empty_prompt.safetensors`` as ``text_embeds`` (L, D) and ``text_mask`` (L,). Of a sample of
    latents all members stay as they are, to the byte, but for embeddings that it had.

    Args:
        index: The samples: videos and images, or latents.
        encoder: Makes latents of videos and images; None where the samples are latents.
        output: Folder of the pieces.
        settings: Which pixels; of latents ``samples_per_shard`` alone counts.
        text: Makes embeddings of their captions; None: captions stay text.
        rank: This rank's number.
        world_size: How many ranks there are; each calls this, none waits for another.
        workers: Processes that decode ahead; 0 decodes in this one.
        progress: Whether to show a progress bar.

    Raises:
        ShardError: If the folder holds something else, or what was made of other samples or settings, with the
            difference; the encoders do not fit what the index holds; or a shard cannot be read. The pieces that are
            written stay, and another run goes on.
    """
    check_encoders(index, has_vae=encoder is not None, has_text=text is not None)
    begin_output(output, [shard.url for shard in index.shards], _made_by(index, encoder, text, settings))
    if text is not None and rank == 0 and not (output / EMPTY_PROMPT).exists():
        write_whole(output / EMPTY_PROMPT, as_safetensors(only_row(text.encode([""]))))
    size = settings.samples_per_shard
    pieces = range((len(index) + size - 1) // size)
    mine = [piece for piece in pieces[rank::world_size] if not _name(output, piece).exists()]
    numbers = [n for piece in mine for n in range(piece * size, min(len(index), (piece + 1) * size))]
    samples: Dataset[ReadSample] = _Latents(index, numbers)
    if encoder is not None:
        shaped = settings.policy.shape(index.samples.clips, encoder.geometry, settings.seed)
        samples = _EncoderSamples(index, shaped, numbers, settings.policy.fps)
    encode = _encode_with(encoder, text)
    loader: DataLoader[ReadSample] = DataLoader(samples, batch_size=None, num_workers=workers, collate_fn=_unchanged)
    refused: list[RefusedSample] = []
    with tqdm(desc="encoding", total=len(numbers), unit=" clips", disable=not progress) as bar:
        for piece, reads in groupby(loader, key=lambda read: read.number // size):
            refused += _write_piece(_name(output, piece), reads, index, encode, bar)
    return EncodeReport(len(mine), len(pieces[rank::world_size]) - len(mine), tuple(refused))


def check_encoders(index: ShardIndex, has_vae: bool, has_text: bool) -> None:
    """Raises ShardError if the encoders do not fit the samples, with those that would."""
    latents = int((index.samples.clips.media == Media.LATENTS).sum())
    if 0 < latents < len(index):
        raise ShardError(
            f"The shards hold {latents} latents already, and {len(index) - latents} videos and images: encode the "
            "shards of each on their own."
        )
    if latents and (has_vae or not has_text):
        raise ShardError(
            "The shards hold latents already, which no VAE encodes. Leave out the VAE (--vae), and name a text encoder "
            "(--text-encoder) to add embeddings of the captions."
        )
    if not latents and not has_vae:
        raise ShardError("The shards hold videos and images, which a VAE encodes: name one (--vae).")


def _encode_with(encoder: Encoder | None, text: TextEncoder | None) -> _Encode:
    if encoder is not None:
        return SampleEncoder(encoder, text)
    assert text is not None  # as was checked
    return TextAdder(text)


class _Latents(Dataset[ReadSample]):
    """Samples of latents as they are, to be read by workers."""

    def __init__(self, index: ShardIndex, numbers: Sequence[int]) -> None:
        self._reader = SampleReader(index)
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> ReadSample:
        number = self._numbers[place]
        members = self._reader.members(number)
        try:
            return ReadSample(number, None, None, members, self._reader.caption(number, members))
        except MemberError as error:
            return ReadSample(number, None, None, {}, "", str(error))


class _EncoderSamples(Dataset[ReadSample]):
    """Samples as the encoder wants them, to be read by workers."""

    def __init__(self, index: ShardIndex, shaped: ShapedClips, numbers: Sequence[int], fps: float) -> None:
        self._reader = SampleReader(index)
        self._shaped = shaped
        self._numbers = numbers
        self._fps = fps

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> ReadSample:
        number = self._numbers[place]
        sample, shape_id = self._reader.index.samples[number], int(self._shaped.shape_id[number])
        fps = min(self._fps, sample.fps) if sample.media == Media.VIDEO else 0.0
        cut = Cut(self._shaped.shapes[max(shape_id, 0)], float(self._shaped.start[number]), fps)
        if shape_id < 0:
            size = f"{sample.width} x {sample.height}"
            return ReadSample(
                number, cut, None, {}, "", f"its {size} pixels are fewer than the model makes into one token"
            )
        try:
            beside = self._reader.beside(number)
            return ReadSample(
                number, cut, self._reader.pixels(number, cut), beside, self._reader.caption(number, beside)
            )
        except MemberError as error:
            return ReadSample(number, cut, None, {}, "", str(error))


def _write_piece(
    file: Path,
    reads: Iterator[ReadSample],
    index: ShardIndex,
    encode: Callable[[ReadSample], dict[str, Any]],
    bar: tqdm,
) -> list[RefusedSample]:
    _remove_left(file)
    draft = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    refused = []
    with draft.open("wb") as stream:
        with suppress(OSError):  # where the file system has no locks
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with TarWriter(stream, mtime=0) as writer:
            for read in reads:
                key = index.sample_id(read.number)
                try:
                    writer.write({"__key__": own_key(key.lstrip("/")), **encode(read)})
                except LeftOutError as error:
                    refused.append(RefusedSample(key, str(error)))
                bar.update()
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
    return refused


def _remove_left(file: Path) -> None:
    """Removes what runs that were stopped have left of a piece, but not what another process is writing just now."""
    for left in file.parent.glob(f".{file.name}.*"):
        with suppress(OSError), left.open("r+b") as draft:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops the lock of a process that has ended
            left.unlink()


def _made_by(
    index: ShardIndex, encoder: Encoder | None, text: TextEncoder | None, settings: EncodeSettings
) -> dict[str, Any]:
    """What the result depends on."""
    made_by: dict[str, Any] = {"samples": index.digest, "captions": index.captions}
    if encoder is None:
        made_by |= {"samples_per_shard": settings.samples_per_shard, LATENTS: _digest_of_latents(index)}
    else:
        made_by |= {"vae": encoder.name}
    if text is not None:
        made_by |= {"text_encoder": text.name, "max_length": text.max_length}
    return made_by | ({} if encoder is None else asdict(settings))


def _digest_of_latents(index: ShardIndex) -> str:
    """SHA-256 of how the first latents of each shard begin: made anew by another VAE they have the sizes of before."""
    digest = hashlib.sha256()
    for shard in (shard for shard in index.shards if len(shard.samples)):
        at = next(iter(shard.samples[0].members.values()))
        digest.update(open_shard(shard.url).read(ByteRange(at.offset, min(at.size, _BEGINNING))))
    return digest.hexdigest()


def _name(output: Path, piece: int) -> Path:
    return output / f"{piece:06}.tar"


def _unchanged(read: Any) -> Any:
    return read
