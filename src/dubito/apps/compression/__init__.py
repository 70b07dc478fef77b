"""A posterior as a smaller network: weights that it can do without are cut out, the others rounded and coded.

`compress` does all of it; `prune`, `cut`, `save` and `load` are its parts, and `thresholds` says by held-out data how much may go.
"""

from dubito.apps.compression.compress import Report as Report
from dubito.apps.compression.compress import compress as compress
from dubito.apps.compression.compress import prune as prune
from dubito.apps.compression.compress import thresholds as thresholds
from dubito.apps.compression.cutting import Compressed as Compressed
from dubito.apps.compression.cutting import cut as cut
from dubito.apps.compression.storage import load as load
from dubito.apps.compression.storage import save as save
