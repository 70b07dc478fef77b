"""How far a small change of the input moves a prediction: slopes, bounds, networks that are held to them, and attacks.

`stability` is the report of a posterior, `local_slopes` its steepest directions, `lipschitz_bound` the most that a network can do
anywhere, and `spectrally_normalized` a copy of a network whose layers are held to a norm. Read `bound`,
then `stability`.
"""

from dubito._moved import renamed
from dubito.apps.stability.bound import Bound as Bound
from dubito.apps.stability.bound import lipschitz_bound as lipschitz_bound
from dubito.apps.stability.bound import operator_norm as operator_norm
from dubito.apps.stability.bound import spectrally_normalized as spectrally_normalized
from dubito.apps.stability.stability import Level as Level
from dubito.apps.stability.stability import Stability as Stability
from dubito.apps.stability.stability import local_slopes as local_slopes
from dubito.apps.stability.stability import stability as stability

__getattr__ = renamed(__name__, {"spectrally_normalised": "spectrally_normalized"})
