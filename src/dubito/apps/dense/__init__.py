"""Dense prediction: something is said of every pixel, and how sure it is, from any posterior.

`maps` shows what is uncertain and why, `assess` tells in one pass over data how good prediction and uncertainty are, and `edges` makes
a second task of label maps. Classes and numbers are treated alike.
"""

from dubito.apps.dense.assess import Assessment as Assessment
from dubito.apps.dense.assess import Confusion as Confusion
from dubito.apps.dense.assess import Detector as Detector
from dubito.apps.dense.assess import Tally as Tally
from dubito.apps.dense.assess import assess as assess
from dubito.apps.dense.maps import Maps as Maps
from dubito.apps.dense.maps import edge_distance as edge_distance
from dubito.apps.dense.maps import edges as edges
from dubito.apps.dense.maps import maps as maps
from dubito.apps.dense.maps import maps_of as maps_of
