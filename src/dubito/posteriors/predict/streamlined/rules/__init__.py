"""The rules that come with the library, one for each operation; importing them registers them.

`activations` (functions of single numbers), `arithmetic`, `linear` (layers and products), `norms`, `attention`, `averages` and `maxima`
(pooling, interpolation, max), `shapes` (operations that move numbers), `dropout`, `head` (the output layer, which gives covariances),
and `sampled` (any operation, by draws).
"""

from dubito.posteriors.predict.streamlined.rules import (
    activations,
    arithmetic,
    attention,
    averages,
    dropout,
    linear,
    maxima,
    norms,
    sampled,
    shapes,
)

__all__ = ["activations", "arithmetic", "attention", "averages", "dropout", "linear", "maxima", "norms", "sampled", "shapes"]
