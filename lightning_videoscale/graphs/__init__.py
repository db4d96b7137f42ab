"""CUDA graphs of a network's forward and backward, shape by shape.

`GraphedNetwork`  runs a network by graphs where it can, and eagerly elsewhere
`GraphOptions`    when, and with how much memory
`no_graphs`       where parameters move: none, or an error
`EAGER_CALLS`     so many calls of a kind come before one is captured
"""

from lightning_videoscale.graphs.graphed_network import EAGER_CALLS, GraphedNetwork
from lightning_videoscale.graphs.options import GraphMode, GraphOptions, no_graphs

__all__ = ["EAGER_CALLS", "GraphMode", "GraphOptions", "GraphedNetwork", "no_graphs"]
