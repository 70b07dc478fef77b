"""How good predictions are, and how they are made better on held-out data.

Read in this order:

- `measures`: `Predictive -> [B]`, how uncertain each prediction is
- `metrics`: `(Predictive, y) -> scalar`, how good predictions are
- `judge`: all metrics in one pass over data, in bounded memory
- `recalibrate`: temperature, conformal sets and other maps fitted on held-out data
- `shift`: corrupted, rotated and attacked inputs
- `data`, `problems`, `reservoir`: data sets; problems on which methods are compared; a random sample of a stream

May import `inference` and the rooms below it.
"""
