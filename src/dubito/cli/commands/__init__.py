"""The commands of the command line, one a file (`fit`, `predict`, `compare`, `label` ...), and what they share."""
