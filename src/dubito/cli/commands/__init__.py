"""The commands, one file each: `demo`, `fit`, `predict`, `evaluate`, `diagnose`, `compare` and `label`.

`fit` reads `options` (flags), `tables` (the data), `folder` (what is written) and `notes` (on the scores). `recipe` and `fitted` are
the folder as other commands read it, `network` is the MLP or the user's factory, `scores` prints metrics, `flags` makes flags from
dataclasses, and `errors` has what the command line prints for input that cannot be used.
"""
