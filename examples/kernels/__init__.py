"""Kernels of one network, `resnet20_frn`, and of the benchmarks that sample it: too special for the library.

- `convolution`: convolutions of few channels as products of large matrices
- `frn`: filter response normalization with all that stands around it, in one pass over memory
- `recorded_target`: a target whose mini-batch gradient is recorded as a CUDA graph
"""
