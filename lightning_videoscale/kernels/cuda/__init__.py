"""CUDA kernels, compiled at first use by NVRTC from the packaged ``csrc/``: no compiler needs to be installed.

- `toolkit`: finds NVRTC, the driver and the toolkit's headers.
- `compile`: source and constants to machine code, kept in a cache on disk that all processes share.
- `launch`: machine code to a function that runs on the current stream.
"""
