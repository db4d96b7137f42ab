"""Embeddings of captions that a user's own shards hold, each of its caption's length."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, BatchMeta, MicroBatch, VideoDataModule
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.shards.indexing import index_shards
from tests.data.clips import clip, npy, write_shard


def _batch(folder: Path, *members: dict[str, Any]) -> Batch:
    """A batch of samples with these members, by the names that they have there."""
    named = [{f"{name}.npy": npy(np.asarray(value)) for name, value in each.items()} for each in members]
    shard = write_shard(folder / "000.tar", [clip(i) | each for i, each in enumerate(named)])
    meta = BatchMeta(3, 8, 8, 48, len(members), 1.0, 1.0)
    return MicroBatchReader(index_shards([str(shard)]))[MicroBatch(tuple(range(len(members))), meta)]


def _text(length: int, width: int = 4) -> Any:
    return np.full((length, width), length, np.float16)


@pytest.mark.parametrize("lengths", [(3, 1, 2), (2, 2, 2), (0, 1, 0)])
def test_embeddings_of_any_lengths_are_one_tensor(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    batch = _batch(tmp_path, *({"text_embeds": _text(length)} for length in lengths))
    assert batch["text_embeds"].shape == (3, max(lengths), 4) and batch["text_embeds"].dtype == torch.float16
    rows = [[length] * length + [0] * (max(lengths) - length) for length in lengths]
    assert batch["text_embeds"][..., 0].tolist() == rows
    assert batch["text_mask"].tolist() == [[row > 0 for row in each] for each in rows]


@pytest.mark.parametrize("kind", [bool, np.int64])  # as tokenizers have them
def test_a_mask_of_a_samples_own_says_which_rows_count(tmp_path: Path, kind: type) -> None:
    longer, shorter = ({"text_mask": np.array(mask, kind)} for mask in ([1, 1, 0], [1]))
    texts = [{"text_embeds": _text(2)} | longer, {"text_embeds": _text(2)} | shorter, {"text_embeds": _text(2)}]
    batch = _batch(tmp_path, *texts)
    assert batch["text_embeds"][..., 0].tolist() == [[2, 2, 0]] * 3
    assert batch["text_mask"].tolist() == [[True, True, False], [True, False, False], [True, True, False]]


@pytest.mark.parametrize("other", [{"text_embeds": _text(2, width=5)}, {"text_embeds": np.zeros(4, "f2")}, {}])
def test_embeddings_that_fit_no_tensor_stay_a_list(tmp_path: Path, other: dict[str, Any]) -> None:
    batch = _batch(tmp_path, {"text_embeds": _text(2)}, other)
    assert isinstance(batch["text_embeds"], list) and "text_mask" not in batch


def test_one_vector_for_a_caption_is_no_sequence(tmp_path: Path) -> None:
    batch = _batch(tmp_path, *({"text_embeds": np.ones(4)} for _ in range(2)))
    assert batch["text_embeds"].shape == (2, 4) and "text_mask" not in batch


def test_samples_without_the_embeddings_of_others_are_told_of_at_the_start(tmp_path: Path) -> None:
    embedded = {"text_embeds.npy": npy(_text(2))}
    whole = write_shard(tmp_path / "000.tar", [clip(i) | embedded for i in range(3)])
    partly = write_shard(tmp_path / "001.tar", [clip(0), clip(1) | embedded, clip(2)])

    def set_up(*shards: Path) -> None:
        data = VideoDataModule([str(shard) for shard in shards], budget=BucketBudget(160, 160 * 80))
        data.prepare_data()
        data.setup("fit")

    with pytest.warns(UserWarning, match=r"2 of 6 samples .*text_embeds.* '001\.tar/clip00000'"):
        set_up(whole, partly)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*text_embeds")
        set_up(whole)
