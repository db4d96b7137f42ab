"""Only bytes become values; nothing in a shard ever runs."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_videoscale.data.shards.decoding import decode, is_decodable, npy_header
from tests.data.clips import npy


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?", ">f4", ">i2", "c8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_keep_their_values(dtype: str, order: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype, order=order)  # type: ignore[call-overload]
    tensor = decode("mask.npy", npy(array))
    assert tensor.shape == (2, 3, 4)
    assert np.array_equal(tensor.numpy(), array)
    tensor[0] = 0  # it is writable memory of its own


@pytest.mark.parametrize("dtype", ["g", "G", "V2", "U3", "S3"])
def test_arrays_that_torch_has_no_type_for_say_what_to_write(dtype: str) -> None:
    data = npy(np.zeros((4, 1, 4, 4), dtype))
    for look in (npy_header, lambda data: decode("text_embeds.npy", data)):
        with pytest.raises(ValueError, match=r"torch has no type .* float32, or bfloat16 in a \.safetensors"):
            look(data)


def test_text_that_is_not_utf_8_says_what_to_do() -> None:
    for data in ("eine Katze".encode("utf-16"), "Käse".encode("latin-1")):
        for extension in ("txt", "json"):
            with pytest.raises(ValueError, match=r"'utf-8' codec .*; save it as UTF-8"):
                decode(extension, data)


def test_scalars_text_and_fields() -> None:
    assert decode("x.npy", npy(np.float32(3.5))).item() == 3.5
    assert decode("txt", "日本 café".encode()) == "日本 café"
    assert decode("info.json", b'{"fps": 23.976, "tags": ["a", null]}') == {"fps": 23.976, "tags": ["a", None]}
    assert [is_decodable(e) for e in ("NPY", "latents.npy", "mp4", "pkl", "npz", "pth")] == [True, True] + [False] * 4


@pytest.mark.parametrize("extension", ["pyd", "pkl", "pickle", "pth", "pt", "latents.PKL"])
def test_a_pickle_is_never_loaded(tmp_path: Path, extension: str) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    with pytest.raises(ValueError, match="are not decoded"):
        decode(extension, bomb)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_disguise_is_never_loaded(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "ran")
    saved = tmp_path / "saved.pt"
    torch.save(bomb, saved)
    disguises = [
        pickle.dumps(bomb),  # what numpy.load unpickles when it sees no .npy magic
        npy(np.array([bomb], dtype=object), allow_pickle=True),
        npy(np.array([(1, bomb)], dtype=[("a", "i4"), ("b", "O")]), allow_pickle=True),
        saved.read_bytes(),
    ]
    for disguise in disguises:
        with pytest.raises(ValueError, match=r"no \.npy header|Python objects"):
            decode("latents.npy", disguise)
        with pytest.raises(ValueError, match=r"no \.npy header|Python objects"):
            npy_header(disguise)
    assert not (tmp_path / "ran").exists()
    pickle.loads(disguises[0])
    assert (tmp_path / "ran").exists(), "the bomb is no dud"


def test_a_cut_array_is_refused() -> None:
    whole = npy(np.zeros((4, 4), dtype=np.float32))
    for cut in (whole[:-1], whole[:100], whole[:9], b"", whole + b"x"):
        with pytest.raises(ValueError, match=r"bytes and the member has|no \.npy header"):
            decode("npy", cut)


@given(st.binary(max_size=300))
@example(b"(" * 200)
@example(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3), }".ljust(117) + b"\n" + bytes(24))
@example(b"{'descr': 'O', 'fortran_order': False, 'shape': (1" + b"L" * 60)
def test_any_header_is_read_or_refused(rest: bytes) -> None:
    header = b"\x93NUMPY\x01\x00" + min(len(rest), 118).to_bytes(2, "little") + rest
    with contextlib.suppress(ValueError, TypeError):
        decode("npy", header)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1, 2, 3, 4)])
def test_headers_are_read_as_numpy_reads_them(shape: tuple[int, ...]) -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        file = io.BytesIO()
        array = np.arange(math.prod(shape), dtype="<f4").reshape(shape)
        np.lib.format.write_array(file, array, version=version)
        assert npy_header(file.getvalue()) == (shape, np.dtype("<f4"), len(file.getvalue()))
        assert np.array_equal(decode("npy", file.getvalue()).numpy(), array)


def test_headers_are_read_by_many_threads_at_once() -> None:
    header = npy(np.zeros((4, 3, 8, 8), "f2"))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(npy_header, [header] * 5000))
    assert found == {((4, 3, 8, 8), np.dtype("<f2"), len(header))}


@given(st.binary(max_size=200))
def test_any_text_is_read_or_refused(content: bytes) -> None:
    for extension in ("txt", "json"):
        with contextlib.suppress(ValueError):
            decode(extension, content)
