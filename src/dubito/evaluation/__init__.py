"""How good predictions are, and how they are made better on held-out data.

Read in this order:

- `measures`: `Predictive -> [B]`, how uncertain each prediction is
- `metrics`: `(Predictive, y) -> scalar`, how good predictions are
- `judge`: the one scorer: `judge` for data that come in batches, `score` for predictions in memory; means have standard errors
- `recalibrate`: temperature, conformal sets and other maps fitted on held-out data
- `shift`: corrupted, rotated and attacked inputs
- `data`, `problems`, `reservoir`: data sets; problems on which methods are compared; a random sample of a stream

May import `inference` and the rooms below it.
"""
