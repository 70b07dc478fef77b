"""Tables: calibrated predictions from one line, `fit_table(table, target)`.

Read in this order:

- `frames`, `cells`, `columns`, `targets`: from what users call a table to inputs and targets
- `network`, `training`: members that hold out different folds, trained in one batched pass
- `deadline`, `process`, `trees`, `forest`: other experts, with out-of-fold predictions too, if there is time for them
- `calibration`: maps fitted to out-of-fold predictions
- `model`, `fit`: the fitted table, and how it is made
"""

from dubito.apps.tables.fit import fit_table as fit_table
from dubito.apps.tables.model import OutOfFold as OutOfFold
from dubito.apps.tables.model import TableModel as TableModel
