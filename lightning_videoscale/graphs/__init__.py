"""CUDA graphs of a network's forward and backward, shape by shape.

`GraphedNetwork`  runs a network by graphs where it can, and eagerly elsewhere
`GraphOptions`    when, and with how much memory
`Recorder`        records graphs one behind the other
`no_graphs`       where parameters move: none, or an error
`EAGER_CALLS`     so many calls of a kind come before one is captured
"""

from lightning_videoscale.graphs.graphed_network import EAGER_CALLS, GraphedNetwork
from lightning_videoscale.graphs.options import GraphMode, GraphOptions, no_graphs
from lightning_videoscale.graphs.recorder import Recorder

__all__ = ["EAGER_CALLS", "GraphMode", "GraphOptions", "GraphedNetwork", "Recorder", "no_graphs"]
