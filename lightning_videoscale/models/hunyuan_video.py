"""HunyuanVideo: its sizes."""

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry

GEOMETRIES = {"hunyuanvideo": ModelGeometry(text_tokens=256)}  # text as long as its pipeline's default
TRANSFORMERS = {"hunyuanvideo": TransformerFlops(60, 3072, 12288, cross_attention=False)}
