"""Influence of training examples: how a prediction would change if an example had more weight, were left out, or were different.

`Influence(solver=...).fit(posterior, data)` gives `Influences`; `inspection` tells how well a score finds labels that are wrong. Read
`influence` first, then `gradients` (one by one, of data in their order).
"""

from dubito.apps.influence.influence import Influence as Influence
from dubito.apps.influence.influence import Influences as Influences
from dubito.apps.influence.influence import inspection as inspection
