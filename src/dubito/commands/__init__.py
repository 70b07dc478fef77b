"""The commands of the command line, one a file: `fit`, `predict`, `evaluate`, `diagnose`, `compare`, `label` and `demo`, and what they share."""
