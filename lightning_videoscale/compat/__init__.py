"""Everything private that we use of other packages: names, patched methods, switches by version.

`torch/`       PyTorch, a file for each part of it
`lightning`    Lightning's loops, hooks and strategies
`diffusers`    what diffusers' models declare about themselves
`deepspeed`    the bookkeeping of ZeRO
`torchmetrics` how metrics follow the module that they are in
`names`        how a private name is looked up, and the error if it is gone
`patching`     how a method of one object is replaced, and the undo

Each file names the versions that it was read in, and each function why there is no public way. A test of each uses the
installed package. Nothing is imported here: a file is imported by those who need its package.
"""
