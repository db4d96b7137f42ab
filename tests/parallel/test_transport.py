"""The symmetric transport's protocol, on threads that stand for ranks and streams; who may use it, and what it says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_videoscale.parallel import Axis, CollectiveTransport, SequenceMesh, SplitPlan
from lightning_videoscale.parallel.transport.exchanges import PushedExchange
from lightning_videoscale.parallel.transport.peer_watchdog import Taking, missing_ranks
from lightning_videoscale.parallel.transport.rendezvous import RendezvousStore
from lightning_videoscale.parallel.transport.slots import SlotLayout
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.parallel.ranks_on_threads import PATIENCE, Point, ThreadInterconnect, World, axis_of, on_threads

Ranks = Callable[[int], ProcessPool]


def start(
    transport: SymmetricTransport, axis: Axis, tokens: Sequence[int], heads: Sequence[int], number: int
) -> Tensor:
    """Starts an exchange in which the elements from s for r are all `element(number, s, r)`."""
    send = [tokens[axis.rank] * share for share in heads]
    receive = [share * heads[axis.rank] for share in tokens]
    pieces = [torch.full((size,), element(number, axis.rank, peer)) for peer, size in enumerate(send)]
    return transport.all_to_all(torch.cat(pieces), send, receive, axis)


def element(number: int, sender: int, reader: int) -> int:
    return number * 100 + sender * 10 + reader


def expected(axis: Axis, tokens: Sequence[int], heads: Sequence[int], number: int) -> Tensor:
    senders = torch.tensor([element(number, sender, axis.rank) for sender in range(axis.size)])
    return senders.repeat_interleave(torch.tensor(tokens) * heads[axis.rank])


# -- the protocol --------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 999), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_pieces_of_a_slot_do_not_overlap(sizes: list[list[int]]) -> None:
    layout = SlotLayout(sizes)
    for holder in range(len(sizes)):
        end = 0
        for partner in range(len(sizes)):
            if partner != holder:
                start = layout.offsets[partner][holder]
                assert start >= end and start % 256 == 0
                end = start + sizes[partner][holder]
        assert end <= layout.capacity


@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_exchanges_of_uneven_sizes_with_delays(size: int) -> None:
    shapes = random.Random(size)
    cases = [
        ([shapes.randint(1, 9) for _ in range(size)], [shapes.randint(1, 5) for _ in range(size)]) for _ in range(12)
    ]
    rounds = [[shapes.choice(cases) for _ in range(shapes.randint(1, 4))] for _ in range(60)]

    def work(transport: SymmetricTransport, rank: int) -> None:
        axis, number = axis_of(rank, size), 0
        for pending in rounds:
            started = []
            for tokens, heads in pending:
                number += 1
                started.append((start(transport, axis, tokens, heads, number), tokens, heads, number))
            for token, tokens, heads, its_number in started:
                assert torch.equal(transport.wait(token), expected(axis, tokens, heads, its_number))

    on_threads(size, work)


@pytest.mark.parametrize("guard", [True, False])
def test_a_slot_is_not_reused_before_its_reader_is_done(guard: bool) -> None:
    """Rank 0 sends all it has and reads late; its peer is ready for the exchange that reuses the first slot."""
    shape, count = ([3, 2], [1, 2]), 5 if guard else 4

    def work(transport: SymmetricTransport, rank: int) -> tuple[bool, list[bool]]:
        axis = axis_of(rank, 2)
        tokens = [start(transport, axis, *shape, number) for number in (1, 2, 3, 4)]
        slot = (
            transport._slots[PushedExchange][0].memory.buffers[0][:16].view(torch.int64)
        )  # rank 0's first, of two elements
        early = False
        if rank == 0:
            deadline = time.monotonic() + 0.3
            while not (early := bool((slot == element(5, 1, 0)).all())) and time.monotonic() < deadline:
                time.sleep(0.001)
        results = [transport.wait(tokens[0])]
        if guard or rank == 1:
            tokens.append(start(transport, axis, *shape, 5))
        # Without the guard, a flag that was set twice is taken once, and the fifth message would be waited for in vain.
        results += [transport.wait(token) for token in tokens[1:count]]
        return early, [torch.equal(got, expected(axis, *shape, n)) for n, got in enumerate(results, 1)]

    (early, right), (_, of_peer) = on_threads(2, work, guard)
    assert early is not guard
    assert right == [guard, *[True] * (count - 1)]  # without it, what rank 0 reads as the first message is the fifth
    assert of_peer == [True] * count


@pytest.mark.parametrize("guard", [True, False])
def test_a_piece_is_not_computed_before_the_last_one_was_fetched(guard: bool) -> None:
    """Rank 0 fetches late; its peer, which has what it needs, goes on with the same slot."""
    world = World(2, guard)

    class Late(ThreadInterconnect):
        def _delayed(self, work: Callable[[], None]) -> None:
            time.sleep(0.2)
            work()

    def work(rank: int) -> list[list[float]]:
        axis = axis_of(rank, 2)
        transport = SymmetricTransport((Late if rank == 0 else ThreadInterconnect)(world, rank), axis, slots=1)
        results = []
        for number in (1, 2) if guard or rank == 1 else (1,):
            exchange = transport.begin(torch.empty(0), [2, 2], [2, 2], axis)
            for peer in (1 - rank, rank):
                exchange.pieces[peer].fill_(element(number, rank, peer))
                exchange.send(peer)
                if number == 2 and not guard:  # of which rank 0 knows nothing
                    return results
            results.append(transport.wait(exchange).tolist())
        return results

    with ThreadPoolExecutor(2) as pool:
        of_0, of_1 = (future.result() for future in [pool.submit(work, rank) for rank in range(2)])
    first = 1 if guard else 2  # without the guard, what rank 0 fetches as the first piece is the second
    assert of_0[0] == [element(1, 0, 0)] * 2 + [element(first, 1, 0)] * 2
    assert of_1[0] == [element(1, 0, 1)] * 2 + [element(1, 1, 1)] * 2
    assert len(of_0) == len(of_1) == (2 if guard else 1)


def test_exchanges_take_the_first_slot_that_is_free() -> None:
    """So what a graph repeats takes the same slots as what peers run eagerly."""

    def work(transport: SymmetricTransport, rank: int) -> list[int]:
        axis, shape = axis_of(rank, 2), ([3, 2], [1, 2])

        def begin() -> Any:
            return start(transport, axis, *shape, 1)

        first, second = begin(), begin()
        slots = [first._slot.number, second._slot.number]
        transport.wait(first)
        slots += [(third := begin())._slot.number, (fourth := begin())._slot.number]
        for pending in (second, third, fourth):
            transport.wait(pending)
        return [*slots, begin()._slot.number]

    assert on_threads(2, work) == [[0, 1, 0, 2, 0]] * 2


def test_pieces_are_read_where_they_lie_or_received_in_place() -> None:
    def work(transport: SymmetricTransport, rank: int) -> tuple[list[float], list[float]]:
        axis, like = axis_of(rank, 2), torch.empty(0)
        exchange = transport.begin(like, [3, 2], [3, 3] if rank == 0 else [2, 2], axis)
        for peer in (1 - rank, rank):
            exchange.pieces[peer].copy_(torch.arange(3.0 - peer) + 10 * rank)
            exchange.send(peer)
        in_place = transport.wait(exchange)
        assert exchange.pieces[rank].untyped_storage().data_ptr() == in_place.untyped_storage().data_ptr()
        pending = transport.all_to_all(torch.full((4,), float(rank)), [2, 2], [2, 2], axis)
        joined = transport.wait(pending, lambda pieces: torch.stack(list(pieces), 1).flatten())
        return in_place.tolist(), joined.tolist()

    first, second = on_threads(2, work)
    assert first == ([0.0, 1.0, 2.0, 10.0, 11.0, 12.0], [0.0, 1.0, 0.0, 1.0])
    assert second == ([0.0, 1.0, 10.0, 11.0], [0.0, 1.0, 0.0, 1.0])


def test_memory_grows_with_the_largest_message_and_keeps_what_is_pending() -> None:
    def work(transport: SymmetricTransport, rank: int) -> list[int]:
        axis = axis_of(rank, 2)
        taken = [transport.memory_bytes]
        small = start(transport, axis, [1, 1], [1, 1], 1)
        taken.append(transport.memory_bytes)
        large = start(transport, axis, [100, 300], [1, 1], 2)
        taken.append(transport.memory_bytes)
        assert torch.equal(transport.wait(small), expected(axis, [1, 1], [1, 1], 1))
        assert torch.equal(transport.wait(large), expected(axis, [100, 300], [1, 1], 2))
        transport.wait(start(transport, axis, [1, 1], [1, 1], 3))
        return [*taken, transport.memory_bytes]

    # 8 bytes from the peer lie on 256, and 300 · 8 from rank 1 on 2 560, in a slot of their own.
    assert on_threads(2, work) == [[0, 256, 256 + 2560, 256 + 2560]] * 2


def test_places_are_others_once_memory_grows_and_keep_it_as_long_as_they_are_held() -> None:
    def work(transport: SymmetricTransport, rank: int) -> list[Any]:
        axis = axis_of(rank, 2)

        def exchange(size: int) -> Any:
            transport.wait(start(transport, axis, [size, size], [1, 1], size))
            return transport.places

        first = exchange(1)
        same, other = exchange(1), exchange(100)
        with_both = transport.memory_bytes
        is_alike, is_other = first == same, first != other
        del first, same
        return [is_alike, is_other, with_both, transport.memory_bytes]

    assert on_threads(2, work) == [[True, True, 256 + 1024, 1024]] * 2


def test_pieces_are_sent_in_any_order() -> None:
    def work(transport: SymmetricTransport, rank: int) -> list[float]:
        message = torch.empty(6)
        exchange = transport.open(message, [2, 2, 2], [2, 2, 2], axis_of(rank, 3))
        for peer in {rank: None, 2: None, 1: None, 0: None}:
            message.split(2)[peer].fill_(10 * rank + peer)
            exchange.send(peer)
        return transport.wait(exchange).tolist()

    assert on_threads(3, work)[1] == [1.0, 1.0, 11.0, 11.0, 21.0, 21.0]


def test_closed_it_frees_its_memory_and_takes_some_anew() -> None:
    def work(transport: SymmetricTransport, rank: int) -> list[list[float]]:
        axis, results = axis_of(rank, 2), []
        for number in range(2):
            results.append(transport.wait(start(transport, axis, [1, 1], [1, 1], number)).tolist())
            assert transport.memory_bytes > 0
            transport.open(torch.zeros(2), [1, 1], [1, 1], axis)  # which nobody finishes
            transport.close()
            assert transport.memory_bytes == len(transport._known) == 0
        transport.close()
        return results

    expected = [[[element(number, peer, rank) for peer in range(2)] for number in range(2)] for rank in range(2)]
    assert on_threads(2, work) == expected


def test_ranks_meet_however_often_each_has_met_others() -> None:
    """Torch counts the meetings of a process over all its groups, and takes the count for a key."""
    shared = dist.HashStore()

    def work(rank: int, met_before: int) -> list[bytes]:
        mine = RendezvousStore(shared, timedelta(seconds=PATIENCE))
        store = dist.PrefixStore("torch", mine)  # calls it from C++, as torch's symmetric memory does
        brought = []
        for number in range(met_before, met_before + 3):
            keys = [f"CUDASymmetricMemory/{number}/{peer}" for peer in range(2)]
            store.set(keys[rank], bytes([0, 255, rank, number]))
            store.wait([keys[1 - rank]])
            brought.append(store.get(keys[1 - rank]))
        return brought

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, 0, 57), pool.submit(work, 1, 60)]
        results = [future.result() for future in futures]
    assert results == [[bytes([0, 255, 1, n]) for n in (60, 61, 62)], [bytes([0, 255, 0, n]) for n in (57, 58, 59)]]


# -- what it says --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    def disagree(transport: SymmetricTransport, rank: int) -> None:
        transport.open(torch.zeros(6), [2, 4], [2, 4] if rank == 0 else [4, 2], axis_of(rank, 2))

    with pytest.raises(RuntimeError, match=r"\(10, 11\) of the ulysses axis .*\(8, 8\) bytes"):
        on_threads(2, disagree)

    def send(transport: SymmetricTransport, rank: int) -> None:
        def opened(message: Tensor) -> Any:
            return transport.open(message, [2, 2], [2, 2], axis_of(rank, 2))

        with pytest.raises(ValueError, match=r"4 elements.*\(5,\)"):
            opened(torch.zeros(5))
        with pytest.raises(ValueError, match=r"contiguous .*\(4,\).* \(2,\)"):
            opened(torch.zeros(8)[::2])
        exchange = opened(torch.zeros(4))
        exchange.send(0)
        with pytest.raises(ValueError, match=r"positions \[0\] of the ulysses axis"):
            exchange.send(0)
        with pytest.raises(RuntimeError, match=r"positions \[1\]"):
            transport.wait(exchange)
        for _ in range(3):
            opened(torch.zeros(4))
        with pytest.raises(RuntimeError, match="4 exchanges of the ulysses axis"):
            opened(torch.zeros(4))

    on_threads(2, send)


def send_twice() -> list[float]:
    """By collectives, of which a second one would wait for peers that do not come."""
    transport, mesh = CollectiveTransport(), SequenceMesh.create("cpu", ulysses_size=2)
    exchange = transport.open(torch.arange(2.0) + 10 * dist.get_rank(), [1, 1], [1, 1], mesh.ulysses)
    exchange.send(0)
    with pytest.raises(ValueError, match=r"positions \[0\] of the ulysses axis"):
        exchange.send(0, 1)
    with pytest.raises(RuntimeError, match=r"positions \[1\]"):
        transport.wait(exchange)
    exchange.send(1)
    with pytest.raises(ValueError, match=r"positions \[1\] of the ulysses axis"):
        exchange.send(1)
    result: list[float] = transport.wait(exchange).tolist()
    return result


def test_collectives_refuse_a_piece_that_was_sent(ranks: Ranks) -> None:
    assert ranks(2).run(send_twice) == [[0.0, 10.0], [1.0, 11.0]]


def test_who_is_missing() -> None:
    flags = [1, 0, 0, 0]
    takings = [Taking({3: 7}, Point()), Taking({0: 4, 1: 5}, Point(False)), Taking({2: 6}, Point(False))]
    assert missing_ranks(flags, takings) == [5, 6]  # what was taken is cleared, as that of rank 7
    assert missing_ranks([1, 1, 1, 0], takings) == []


def unavailable() -> str:
    try:
        SymmetricTransport.create(SequenceMesh.create("cpu", ulysses_size=2), torch.device("cpu"), timedelta(seconds=9))
    except RuntimeError as error:
        return str(error)
    return "no error"


def fit(transport_of_rank: list[Any]) -> str:
    torch.manual_seed(0)  # the model's data are random
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    strategy = SequenceParallelDDPStrategy(modules=["layer"], plan=plan, transport=transport_of_rank[dist.get_rank()])
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, fast_dev_run=True, enable_progress_bar=False, logger=False
    )
    try:
        trainer.fit(BoringModel())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return strategy.transport.name if strategy.transport is not None else "none"


def test_asked_for_and_not_available_is_an_error_with_the_reasons(ranks: Ranks) -> None:
    for message in (*ranks(2).run(unavailable), *ranks(2).run(fit, ["symmetric"] * 2)):
        assert "one host" in message
        assert "rank 0: its device is cpu" in message and "rank 1: its device is cpu" in message
        assert "Use transport='collective'" in message


def test_ranks_agree_on_the_transport(ranks: Ranks) -> None:
    for message in ranks(2).run(fit, ["symmetric", "collective"]):
        assert "transport=" in message and "rank 0: symmetric, rank 1: collective" in message
    assert ranks(2).run(fit, ["collective"] * 2) == ["collective"] * 2


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transport='nccl' .*\('collective', 'symmetric'\)"):
        SequenceParallelDDPStrategy(transport="nccl")  # type: ignore[arg-type]


def other_axis() -> list[float]:
    mesh = SequenceMesh.create("cpu", ulysses_size=1, ring_size=2)
    transport = SymmetricTransport(ThreadInterconnect(World(1), 0), mesh.ulysses, slots=4)
    message = torch.arange(2.0) + 10 * dist.get_rank()
    result: list[float] = transport.wait(transport.all_to_all(message, [1, 1], [1, 1], mesh.ring)).tolist()
    return result


def test_other_axes_use_collectives(ranks: Ranks) -> None:
    assert ranks(2).run(other_axis) == [[0.0, 10.0], [1.0, 11.0]]
