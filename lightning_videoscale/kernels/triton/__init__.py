"""Triton kernels of the row operations: what runs on GPUs where the CUDA kernels do not.

- `tiles`: a row of D channels as tiles held in registers, and what one does with such a row.
- `forward`, `backward`, `finalize`: the kernels.
- `rows`: the backend, which launches them; `launch`: how large they are.
"""
