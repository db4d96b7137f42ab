"""How the strategies save and load: one format for all of them, in which everything has its parameter's name.

- `folder`: the format, a folder; writing and reading it.
- `portable`: `PortableCheckpoints`, for parameters that are whole or ``DTensor`` (DDP, FSDP2).
- `zero`, `zero_partitions`: the same for ZeRO, which keeps flat pieces of float32 copies.
- `zero_weights`: those pieces as what is averaged.
- `frozen`, `fingerprints`: what is left out as the model's code brings it again, and whether it did.
- `adapters`, `networks`: what a checkpoint says of adapters and of diffusers' models.
- `gathering`, `shares`: sharded parameters made whole, and work dealt out to ranks.
- `saved_tensors`: tensors of a checkpoint by name, read when asked for.
- `optimizer_names`: an optimizer's state by parameter name.
"""
