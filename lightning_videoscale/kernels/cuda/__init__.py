"""CUDA kernels, compiled at first use by NVRTC from the packaged ``csrc/``: no compiler needs to be installed.

- `toolkit`: finds NVRTC, the driver and the toolkit's headers.
- `compile`: source and constants to machine code, kept in a cache on disk that all processes share.
- `launch`: machine code to a function that runs on the current stream.
- `row_variant`, `row_tuning`, `row_kernels`: constants of a variant of the row operations, how its kernels are
  launched, and the kernels; `rows`: the backend. Likewise `head_tuning`, `head_kernels` and `qk_norm_rope`; `gelu`.
"""

import torch

from lightning_videoscale.kernels.cuda import compile, toolkit

_CAPABILITY = {"rows": (8, 0), "gelu": (8, 0), "heads": (9, 0)}


def unusable(kind: str, device: int) -> str | None:
    """Returns why no kernel of this kind can be compiled and run on a device, or None if they can."""
    if device < 0:
        return "the tensors are on the cpu"
    capability, needed = torch.cuda.get_device_capability(device), _CAPABILITY[kind]
    if capability < needed:
        name = torch.cuda.get_device_name(device)
        return f"compute capability {needed[0]}.{needed[1]} or newer is needed; {name} is older"
    arch = f"sm_{capability[0]}{capability[1]}"
    try:
        toolkit.driver()
        toolkit.launch_kernel()
        toolkit.include_folder()
        toolkit.check_architecture(arch)
        compile.check_cache(arch)
    except toolkit.CudaUnavailableError as error:
        return str(error)
    return None
