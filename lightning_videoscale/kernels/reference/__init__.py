"""The fused operations in plain PyTorch: the oracles of the other backends, and what runs on CPU."""
