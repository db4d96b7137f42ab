"""The arithmetic on an allocator's statistics."""

from lightning_videoscale.callbacks.device_memory import device_memory

STATS = {
    "allocated_bytes.all.current": 500,
    "allocated_bytes.all.peak": 700,
    "reserved_bytes.all.current": 800,
    "inactive_split_bytes.all.current": 200,
    "num_ooms": 0,
}


def test_what_the_allocator_says() -> None:
    memory = device_memory(STATS, free_bytes=200)
    assert (memory.allocated, memory.reserved, memory.peak, memory.fragmented) == (500, 800, 700, 200)
    assert memory.capacity == 1000  # held already, and left for anyone
    assert memory.fragmentation == 0.25


def test_nothing_reserved_is_not_fragmented() -> None:
    assert device_memory(dict.fromkeys(STATS, 0), free_bytes=100).fragmentation == 0.0


def test_what_graphs_keep_is_no_room() -> None:
    memory = device_memory(STATS, free_bytes=200, graphs=100)
    assert (memory.allocated, memory.peak, memory.graphs, memory.capacity) == (500, 800, 100, 1000)
