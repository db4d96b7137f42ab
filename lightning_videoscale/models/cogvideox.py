"""CogVideoX: its sizes."""

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry

GEOMETRIES = {"cogvideox": ModelGeometry(text_tokens=226)}  # text as long as its pipeline's default
TRANSFORMERS = {"cogvideox-5b": TransformerFlops(42, 3072, 12288, cross_attention=False)}
