"""Means and variances through the network in one pass."""

from dubito.posteriors.predict.streamlined.engine import Streamlined as Streamlined
from dubito.posteriors.predict.streamlined.moments import Moments as Moments
from dubito.posteriors.predict.streamlined.moments import Weight as Weight
from dubito.posteriors.predict.streamlined.moments import rule as rule
