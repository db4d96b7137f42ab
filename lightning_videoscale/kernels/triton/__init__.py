"""Triton kernels: what runs on GPUs where the CUDA kernels do not.

- `tiles`: a row of D channels as tiles held in registers, and what one does with such a row.
- `forward`, `backward`, `finalize`: the kernels of the row operations; `gelu_kernels`: those of `gelu`,
  `qk_norm_rope_kernels`: those of `qk_norm_rope`.
- `group_sums`: in which order the programs of a backward walk the rows, and how their sums are added.
- `rows`, `gelu`, `qk_norm_rope`: the backends, which launch them; `launch`: how large they are; `trial`: whether
  Triton works on a device.
"""

import triton

from lightning_videoscale.kernels.triton import trial


def unusable(kind: str, device: int) -> str | None:
    """Returns why Triton cannot run on a device, or None if it can."""
    if device < 0 and not triton.knobs.runtime.interpret:
        return "the tensors are on the cpu, and Triton runs on GPUs"
    return trial.failure(device) if device >= 0 else None
