"""Private names of PyTorch, read in 2.11 and 2.13, a file for each part of it.

`allocator`       how CUDA's memory is allocated
`attention`       the kernels of scaled dot product attention, which return the log-sum-exp
`autograd`        the dispatcher and the autograd engine
`cuda`            streams and assertions on a device
`compilation`     what compiled code takes for constant
`checkpoint`      what the metadata of a distributed checkpoint consists of
`data_parallel`   where DDP and FSDP2 wait, and what FSDP2 is doing
`distributed`     process groups, functional collectives, symmetric memory
`graphs`          the memory of CUDA graphs
`loaders`         a DataLoader's workers and sampler
`modules`         what a module is made of: hooks, buffers, children
`trees`           nested structures of tensors, and tensors that wrap others
`versions`        what differs between versions
"""

from lightning_videoscale.compat.names import Package

TORCH = Package("torch", "2.11 and 2.13")
