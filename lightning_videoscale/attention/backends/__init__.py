"""The kernels of attention, one per file.

| name | what it is | comes with |
|---|---|---|
| `cudnn` | cuDNN's, which takes masks and builds a plan for every new shape | torch |
| `flash` | FlashAttention 2 as torch has it; on CPUs torch's flash kernel | torch |
| `efficient` | memory-efficient attention, which takes masks and float32 | torch |
| `math` | matrix products, a slice of the queries at a time; every dtype and head dim | this package |
| `flash_attn_2` | FlashAttention 2 | flash-attn |
| `flash_attn_3` | FlashAttention 3, on Hopper | built from source |
| `flash_attn_4` | FlashAttention 4 (CuTe DSL), on Hopper and Blackwell | flash-attn-4 |
"""

from lightning_videoscale.attention.backends import (
    cudnn,
    efficient,
    flash,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    products,
)
from lightning_videoscale.attention.kernel import AttentionKernel

KERNELS: dict[str, AttentionKernel] = {
    module.KERNEL.name: module.KERNEL
    for module in (flash_attn_4, flash_attn_3, cudnn, flash_attn_2, flash, efficient, products)
}
"""By name; those that are expected to be faster come first."""
