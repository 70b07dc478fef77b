"""The user's `nn.Module`, run with other weights and left as it was.

Read in this order:

- `weights`: put other weights in place, switch the mode, lock the network for one thread, copy it, watch its calls
- `examples`: read a batch as (inputs, targets), and what a network returns as one tensor
- `inspect`: two runs of a network before a fit, which find what would go wrong in it
- `reinitialize`: fresh weights for members and chains
- `recurrent`: `nn.LSTM`, `nn.GRU` and `nn.RNN` step by step
- `cuda_graphs`: training steps that a GPU replays
- `shared_batch`: a pass over a process's share of a batch
- `division`: which batches a process looks at

May import `tensors`.
"""
