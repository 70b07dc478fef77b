"""Means and variances through the network in one pass."""

from dubito.predict.streamlined.engine import Streamlined as Streamlined
from dubito.predict.streamlined.moments import Moments as Moments
from dubito.predict.streamlined.moments import Weight as Weight
from dubito.predict.streamlined.registry import rule as rule
