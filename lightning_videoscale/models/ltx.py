"""LTX-Video: its sizes."""

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry

GEOMETRIES = {"ltx-video": ModelGeometry(temporal_stride=8, spatial_stride=32, patch_size=(1, 1, 1))}
TRANSFORMERS = {"ltx-video": TransformerFlops(28, 2048, 8192)}
