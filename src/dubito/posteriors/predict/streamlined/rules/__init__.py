"""The rules that come with the library, one for each operation; importing them registers them.

`activations` (functions of single numbers), `arithmetic`, `linear` (layers, products, and the output layer, which gives covariances),
`norms`, `attention`, `maxima` (pooling, max), `shapes` (operations that move or average numbers), `places` (those that put numbers
somewhere), `dropout`, and `sampled` (any operation, by draws).
"""

from dubito.posteriors.predict.streamlined.rules import (
    activations,
    arithmetic,
    attention,
    dropout,
    linear,
    maxima,
    norms,
    places,
    sampled,
    shapes,
)

__all__ = ["activations", "arithmetic", "attention", "dropout", "linear", "maxima", "norms", "places", "sampled", "shapes"]
