"""CUDA graphs for the networks of a strategy: `run_by_graphs`, and how often they ran, `describe_graphs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_videoscale.compat.patching import patch
from lightning_videoscale.compat.torch.allocator import refuse_registered_graphs
from lightning_videoscale.graphs import GraphedNetwork, GraphOptions
from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.blocks import find_blocks
from lightning_videoscale.undo import Undo


def run_by_graphs(
    network: nn.Module,
    mesh: SequenceMesh,
    options: GraphOptions,
    kernels: Callable[[], Hashable],
    places: Callable[[], Hashable],
) -> Undo:
    """Has a split network run by CUDA graphs where it can; returns what takes it back. See `GraphedNetwork`.

    Raises:
        ValueError: If its exchanges may hang in them, by what the environment says.
    """
    if mesh.sp.size > 1:
        refuse_registered_graphs()
    graphed = GraphedNetwork(
        network,
        network.forward,
        _entrances(network, options.segments),
        options,
        partial(gather_over_ranks, group=mesh.sp.group) if mesh.sp.size > 1 else None,
        kernels,
        places,
        mesh.ring.size == 1,  # each Ulysses group has places of its own
        rank_zero_info,
    )
    return Undo(graphed.close, patch(network, "forward", graphed))


def describe_graphs(networks: Iterable[nn.Module]) -> dict[str, int]:
    """Returns how many forward passes of some networks were replayed, eager and so on, see `GraphedNetwork.counts`.

    With them, under ``"bytes"``, the memory of their graphs; nothing where no network runs by graphs.
    """
    forwards = (network.forward for network in networks)
    graphed = [each for each in forwards if isinstance(each, GraphedNetwork)]
    if not graphed:
        return {}
    nbytes = sum(each.memory.bytes for each in graphed)
    return sum((each.counts for each in graphed), Counter[str]()) | {"bytes": nbytes}


def _entrances(network: nn.Module, segments: int) -> list[nn.Module]:
    """Blocks in front of which backward is cut into segments of about equally many; none where it has no blocks."""
    try:
        blocks = list(find_blocks(network).values())
    except ValueError:
        return []
    places = sorted({len(blocks) * number // segments for number in range(1, segments)} - {0})
    return [blocks[place] for place in places]
