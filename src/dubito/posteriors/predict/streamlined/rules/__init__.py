"""The rules that come with the library; importing them registers them."""

from dubito.posteriors.predict.streamlined.rules import (
    activations,
    arithmetic,
    attention,
    dropout,
    linear,
    norms,
    pooling,
    sampled,
    shapes,
)

__all__ = ["activations", "arithmetic", "attention", "dropout", "linear", "norms", "pooling", "sampled", "shapes"]
