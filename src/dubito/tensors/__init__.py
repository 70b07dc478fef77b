"""Named tensors: arithmetic, randomness, files and covariances. This room knows nothing of networks.

Read in this order:

- `tree`: arithmetic on `dict[str, Tensor]`, the form in which all weights travel
- `randomness`: seeds and generators
- `checks`: checks of arguments
- `text`: tables of text, for everything that is printed
- `store`: tensors on disk, never a pickle
- `covariances`: covariance matrices over named weights, one structure a file

Imports no other room.
"""
