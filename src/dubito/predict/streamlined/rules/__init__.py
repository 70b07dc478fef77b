"""The rules that come with the library; importing them registers them."""

from dubito.predict.streamlined.rules import activations, arithmetic, linear, shapes

__all__ = ["activations", "arithmetic", "linear", "shapes"]
