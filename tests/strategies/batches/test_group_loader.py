"""One reader per micro-batch: what is sent, who reads, and what happens at the end, on errors and on leaving early."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.strategies.batches.group_loader import GroupLoader
from lightning_videoscale.strategies.batches.sharing import BatchSharing
from lightning_videoscale.strategies.generators import seed_generators
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
CPU = torch.device("cpu")


def sharing_of_all() -> BatchSharing:
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size(), timeout=timedelta(seconds=30))
    return BatchSharing(mesh, CPU)


def group_loader(loader: Any, sharing: BatchSharing | None = None, epoch: int = 0) -> GroupLoader:
    def seed(*place: int | str) -> None:
        seed_generators(7, epoch, *place)

    return GroupLoader(loader, sharing or sharing_of_all(), seed, to_device=True, ends_together=lambda: True)


def flat(batches: list[list[float]]) -> list[float]:
    return [value for batch in batches for value in batch]


class Numbers(Dataset[Tensor]):
    """0, 1, 2, …; remembers what was read here."""

    def __init__(self, count: int, bad: int | None = None, error: Exception | None = None) -> None:
        self.count = count
        self.bad = bad
        self.error = error
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        if index == self.bad:
            assert self.error is not None
            raise self.error
        return torch.tensor(float(index))


class Stream(IterableDataset[Tensor]):
    """Numbers of unknown number; remembers how often it was begun here."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.starts = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.starts += 1
        for i in range(self.count):
            yield torch.tensor([float(i)])


# -- what is sent -------------------------------------------------------------------------------------------------


@dataclass
class Record:
    name: str
    x: Tensor


class Meta(NamedTuple):
    frames: int
    weight: Tensor


def share_odd_things() -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.rand(3, 4, generator=generator)
    batch = {
        "meta": Meta(7, x[0, 0]),
        "b": [x.T, x > 0.5, x.bfloat16(), torch.complex(x, x)],
        "a": (None, "text", torch.empty(0, 3), (x * 100).to(torch.uint16)),
        "record": Record("clip", x.double()),
    }
    return sharing_of_all().broadcast(1, lambda: batch, to_device=False).wait()


def share_on_numbered_cpu() -> Tensor:
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size(), timeout=timedelta(seconds=30))
    x = torch.full((1000,), 1.0 + dist.get_rank())
    received: Tensor = BatchSharing(mesh, torch.device("cpu", 0)).broadcast(1, lambda: x, to_device=True).wait()
    return received


def test_a_device_that_is_called_cpu_0_is_the_host(ranks: Ranks) -> None:
    """As ZeRO's is where it computes on CPUs."""
    for received in ranks(2).run(share_on_numbered_cpu):
        assert received.device == CPU and received.eq(2).all()


def test_any_nesting_of_any_tensors_arrives_as_it_was(ranks: Ranks) -> None:
    first, second = ranks(2).run(share_odd_things)
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    for batch in (first, second):
        assert list(batch) == ["meta", "b", "a", "record"], "Lightning takes the batch size from the first tensor"
        assert type(batch["meta"]) is Meta and batch["meta"].frames == 7 and batch["meta"].weight == x[0, 0]
        transposed, mask, half, values = batch["b"]
        assert torch.equal(transposed, x.T) and torch.equal(mask, x > 0.5)
        assert torch.equal(half, x.bfloat16()) and torch.equal(values, torch.complex(x, x))
        none, text, nothing, short = batch["a"]
        assert none is None and text == "text" and nothing.shape == (0, 3)
        assert torch.equal(short, (x * 100).to(torch.uint16))
        assert batch["record"].name == "clip" and torch.equal(batch["record"].x, x.double())


def share_layouts() -> tuple[list[bool], list[bool]]:
    draw = torch.Generator().manual_seed(1)
    images, videos = torch.rand(2, 3, 4, 5, generator=draw), torch.rand(2, 3, 6, 4, 5, generator=draw)
    dense = [
        images.contiguous(memory_format=torch.channels_last),
        videos.contiguous(memory_format=torch.channels_last_3d),
        images.transpose(1, 3),
        torch.complex(images, images).conj().mT,
        images.as_strided((1, 3), (7, 1)),
    ]
    others = [
        videos.contiguous(memory_format=torch.channels_last_3d)[:, :, 1::2],
        images[:1, :, :1, 2:].expand(2, 3, 4, 3),
        images[0, 0, ::3, :1],
        images[1, 1, 1, 1:2].expand(3, 1)[1:2],
    ]
    shared = sharing_of_all()
    arrived = shared.broadcast(1, lambda: dense + others, to_device=False).wait()
    assert [x.stride() for x in arrived[: len(dense)]] == [x.stride() for x in dense]
    formats = [torch.channels_last_3d] + [torch.contiguous_format] * 3
    packed = [x.is_contiguous(memory_format=f) for x, f in zip(arrived[len(dense) :], formats, strict=True)]
    return [torch.equal(x, y) for x, y in zip(arrived, dense + others, strict=True)], packed


def test_tensors_keep_their_strides(ranks: Ranks) -> None:
    for equal, packed in ranks(2).run(share_layouts):
        assert all(equal)
        assert all(packed), "neither gaps nor repetitions are sent"


# -- who reads -----------------------------------------------------------------------------------------------------


def read_numbers() -> tuple[Any, ...]:
    dataset = Numbers(23)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=3)
    plain = DataLoader(dataset, batch_size=2, sampler=sampler)
    loader = group_loader(plain)
    assert len(loader) == 12 and loader.sampler is sampler and loader.dataset is dataset and loader.batch_size == 2
    passes, reads, expected = [], [], []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        dataset.read = []
        passes.append([batch.tolist() for batch in loader])
        reads.append(list(dataset.read))
        expected.append([batch.tolist() for batch in plain])
    return passes, reads, expected


def test_ranks_read_in_turn_where_samples_can_be_addressed(ranks: Ranks) -> None:
    first, second = ranks(2).run(read_numbers)
    assert first[0] == second[0] == first[2], "the batches, in the order of the loader"
    assert first[0][0] != first[0][1], "the sampler knows the epoch"
    for epoch, batches in enumerate(first[0]):
        compared = batches[0][:1] if epoch == 0 else []
        assert [first[1][epoch], second[1][epoch]] == [compared + flat(batches[0::2]), compared + flat(batches[1::2])]


def read_stream() -> tuple[Any, ...]:
    stream = Stream(5)
    loader = group_loader(DataLoader(stream, batch_size=2))
    with pytest.raises(TypeError):
        len(loader)
    passes = [[batch.tolist() for batch in loader] for _ in range(2)]
    listed = list(group_loader([torch.tensor(0), "anything"]))
    return passes, stream.starts, listed


def test_the_first_rank_alone_reads_a_stream_and_tells_when_it_ends(ranks: Ranks) -> None:
    first, second = ranks(2).run(read_stream)
    assert first[0] == second[0] == [[[[0.0], [1.0]], [[2.0], [3.0]], [[4.0]]]] * 2
    assert (first[1], second[1]) == (2, 1), "of its first pass all ranks read the first batch, to compare"
    assert first[2] == second[2] == [torch.tensor(0), "anything"]


class Post(DataLoader[Tensor]):
    """A subclass whose iteration is its own affair."""

    def __iter__(self) -> Any:
        return (batch + 100 for batch in super().__iter__())


def read_subclass() -> Any:
    dataset = Numbers(4)
    return [batch.tolist() for batch in group_loader(Post(dataset, batch_size=2))], dataset.read


def test_a_loader_that_iterates_in_its_own_way_is_read_by_the_first_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(read_subclass)
    assert first[0] == second[0] == [[100, 101], [102, 103]]
    assert (first[1], second[1]) == ([0, 1, 2, 3], [0, 1])


def shuffle_by_the_global_generator() -> Any:
    torch.manual_seed(dist.get_rank())
    sharing, dataset = sharing_of_all(), Numbers(9)
    unbatched = DataLoader(dataset, batch_size=None, shuffle=True)
    batched = DataLoader(dataset, batch_size=2, shuffle=True)
    return [[b.tolist() for b in group_loader(x, sharing, epoch)] for x in (batched, unbatched) for epoch in (0, 1)]


def test_samplers_that_draw_from_the_global_generators_agree(ranks: Ranks) -> None:
    first, second = ranks(2).run(shuffle_by_the_global_generator)
    assert first == second
    assert sorted(flat(first[0])) == sorted(flat(first[1])) == sorted(first[2]) == sorted(first[3])
    assert first[0] != first[1] and first[2] != first[3], "every epoch is another permutation"


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2)


class AugmentedStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(2) for _ in range(6))


def draw_while_reading() -> Any:
    sharing, batches, drawn = sharing_of_all(), [], []
    for dataset in (Augmented(), AugmentedStream()):
        for batch in group_loader(DataLoader(dataset, batch_size=1), sharing):
            batches.append(batch)
            drawn.append(torch.rand(()).item())
    return torch.cat(batches).tolist(), drawn


def test_what_a_dataset_draws_does_not_tear_the_generators_apart(ranks: Ranks) -> None:
    first, second = ranks(2).run(draw_while_reading)
    assert first == second
    samples, drawn = first
    assert samples[:6] == samples[6:], "a sample is cropped alike whoever reads it"
    assert len({x for pair in samples[:6] for x in pair}) == 12
    assert len(set(drawn[:6])) == 6


# -- errors --------------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    def __init__(self, sample: int, reason: str) -> None:
        super().__init__(f"sample {sample}: {reason}")


def read_until(dataset: Any) -> tuple[list[Any], type[Exception], str, list[str]]:
    seen = []
    try:
        for batch in group_loader(DataLoader(dataset, batch_size=1, collate_fn=lambda samples: samples[0])):
            seen.append(batch.tolist())
    except Exception as error:
        return seen, type(error), str(error), error.__notes__
    raise AssertionError("no error")


@pytest.mark.parametrize("kind", [ValueError, Unpicklable])
def test_an_error_of_the_reader_is_everyones(ranks: Ranks, kind: type[Exception]) -> None:
    first, second = ranks(2).run(run_bad_dataset, kind)
    assert first[0] == second[0] == [0.0, 1.0, 2.0], "it comes when its batch would"
    assert second[1] is kind, "the reader's own"
    assert first[1] is (ValueError if kind is ValueError else RuntimeError)
    for _, _, message, notes in (first, second):
        assert "a bad clip" in message
        assert notes == ["Rank 1 was reading micro-batch 3 for ranks [0, 1]."]


def run_bad_dataset(kind: type[Exception]) -> Any:
    error = ValueError("a bad clip") if kind is ValueError else Unpicklable(3, "a bad clip")
    return read_until(Numbers(8, bad=3, error=error))


class Functions(Numbers):
    def __getitem__(self, index: int) -> Any:
        return (lambda: index) if index == 1 else super().__getitem__(index)


def run_unpicklable_batch() -> Any:
    return read_until(Functions(4))


def test_a_batch_that_cannot_travel_is_an_error_everywhere(ranks: Ranks) -> None:
    for seen, _, message, notes in ranks(2).run(run_unpicklable_batch):
        assert seen == [0.0]
        assert "pickle" in message and "lambda" in message
        assert notes == ["Rank 1 was reading micro-batch 1 for ranks [0, 1]."]


# -- leaving early, going on ---------------------------------------------------------------------------------------


def leave_early() -> Any:
    sharing, dataset = sharing_of_all(), Numbers(8)
    loader = group_loader(DataLoader(dataset, batch_size=1), sharing)
    other = group_loader(DataLoader(Stream(3), batch_size=1), sharing)
    seen: list[Any] = []
    for _ in range(2):
        for batch in loader:
            seen.append(batch.item())
            if batch.item() == 2:
                break
            seen.append([other_batch[0, 0].item() for other_batch in other])
    return seen, list(dataset.read)


def test_a_pass_may_be_left_and_others_may_run_in_between(ranks: Ranks) -> None:
    first, second = ranks(2).run(leave_early)
    assert first[0] == second[0] == [0.0, [0.0, 1.0, 2.0], 1.0, [0.0, 1.0, 2.0], 2.0] * 2
    assert (first[1], second[1]) == ([0, *[0, 2] * 2], [0, *[1, 3] * 2]), "one micro-batch ahead, no further"


def wrap_again() -> Any:
    sharing, dataset = sharing_of_all(), Numbers(6)
    sampler = BatchSampler(SequentialSampler(dataset), 2, drop_last=False)
    once = group_loader(DataLoader(dataset, batch_sampler=sampler), sharing)
    assert not hasattr(once, "state_dict")
    return [batch.tolist() for batch in group_loader(once, sharing)], dataset.read


def test_a_loader_that_an_earlier_trainer_wrapped_is_wrapped_anew(ranks: Ranks) -> None:
    first, second = ranks(2).run(wrap_again)
    assert first[0] == second[0] == [[0, 1], [2, 3], [4, 5]]
    assert (first[1], second[1]) == ([0, 0, 1, 4, 5], [0, 2, 3])


def what_a_pass_leaves() -> int:
    batches: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        for _, batch in zip(range(6), group_loader(DataLoader(Numbers(6), batch_size=1)), strict=False):
            batches.append(weakref.ref(batch))  # and asks for no seventh, as Lightning does
        del batch
        return sum(reference() is not None for reference in batches)
    finally:
        gc.enable()


def test_the_last_batch_is_let_go_without_collecting_garbage(ranks: Ranks) -> None:
    """The workers of the next pass are forked right after, and free what garbage they find of this one."""
    assert ranks(2).run(what_a_pass_leaves) == [0, 0]


class Noted(IterableDataset[Tensor]):
    """Three numbers; remembers what it gave, and does not keep it."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(3):
            x = torch.tensor([float(i)])
            self.given.append(weakref.ref(x))
            yield x


def what_a_stream_keeps() -> list[int]:
    stream = Noted()
    kept: list[int] = []
    for _ in group_loader(DataLoader(stream, batch_size=None)):
        kept.append(sum(reference() is not None for reference in stream.given))
    return kept


def test_the_first_batch_of_a_stream_is_not_kept_over_the_pass(ranks: Ranks) -> None:
    reader, _ = ranks(2).run(what_a_stream_keeps)
    assert reader == [1, 1, 0]  # what the stream has given last
