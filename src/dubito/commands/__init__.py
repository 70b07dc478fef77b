"""The commands of the command line, one a file: `fit`, `predict`, `evaluate` and `demo`, and what they share."""
