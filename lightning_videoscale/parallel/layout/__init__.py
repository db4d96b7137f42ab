"""How a sequence-parallel size divides into ulysses × ring: predicted for every way, and chosen.

- `sizes`: what a user names of the sizes, and what is left open.
- `machines`: speeds of GPUs, links and hosts, measured or guessed.
- `latency`: the time of one layer under one layout, from these speeds.
- `choice`: the layouts there are, and the one that is taken.
- `heads`: the heads of a network. Not imported here, as it knows models, which know the mesh.
- `divide`: chooses for a network on a mesh that is not divided yet. Likewise.

Everything but the last two is plain arithmetic, without torch and ranks, so that it runs on any machine.
"""

from lightning_videoscale.parallel.layout.choice import DEFAULT_TOKENS, LayoutChoice, choose_layout
from lightning_videoscale.parallel.layout.latency import Layer, LayerTime, Layout, predict
from lightning_videoscale.parallel.layout.machines import MACHINES, Host, Machine, machine_of, read_machine
from lightning_videoscale.parallel.layout.sizes import SequenceSizes, Size, SizeOfGroup, resolve_sizes

__all__ = [
    "DEFAULT_TOKENS",
    "MACHINES",
    "Host",
    "Layer",
    "LayerTime",
    "Layout",
    "LayoutChoice",
    "Machine",
    "SequenceSizes",
    "Size",
    "SizeOfGroup",
    "choose_layout",
    "machine_of",
    "predict",
    "read_machine",
    "resolve_sizes",
]
