"""CUDA graphs of a network's forward and backward, shape by shape.

`GraphedNetwork`  runs a network by graphs where it can, and eagerly elsewhere
`GraphOptions`    when, and with how much memory
"""

from lightning_videoscale.graphs.graphed_network import GraphedNetwork
from lightning_videoscale.graphs.options import GraphMode, GraphOptions

__all__ = ["GraphMode", "GraphOptions", "GraphedNetwork"]
