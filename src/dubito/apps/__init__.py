"""Applications: a measure and a decision, one file each."""
