"""Named tensors: arithmetic, randomness, files and covariances. This room knows nothing of networks.

Read in this order:

- `tree`: arithmetic on `dict[str, Tensor]`, the form in which all weights travel
- `randomness`: seeds and generators
- `checks`: checks of arguments
- `processes`: several processes on one fit, as PyTorch's process group has them; `shares`: what each has of a batch
- `text`: tables of text, for everything that is printed
- `store`: everything on disk in one namespace, never a pickle, from `files` (safe files, one run a folder), `packing` (states
  as tensors and JSON), `archive` and `draws` (append-only draws)
- `covariances`: covariance matrices over named weights

Imports no other room.
"""
