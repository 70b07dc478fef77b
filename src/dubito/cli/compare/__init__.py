"""Methods compared: a grid of methods and seeds on a problem, saved result by result, and a page that shows it.

Read in this order: `spec` (a row as the user asks for it, and the published settings of the UCI experiments), `result` (one method
with one seed, and its files), `grid` (makes what is missing, with `stacked` for many small fits at once, and `scoring`), `summary`
(means and standard errors) and `page`.

>>> import tempfile
>>> from pathlib import Path
>>> digits = problem("digits").limited(100, 50)
>>> with tempfile.TemporaryDirectory() as folder:
...     grid = Grid(digits, (parse_spec("map,epochs=2", digits),), (0, 1), Path(folder))
...     [result.key.seed for result in grid.run(progress=False).results]
[0, 1]
"""

from dubito._moved import renamed
from dubito.cli.compare.grid import Grid as Grid
from dubito.cli.compare.grid import Outcome as Outcome
from dubito.cli.compare.page import page as page
from dubito.cli.compare.result import Result as Result
from dubito.cli.compare.spec import Spec as Spec
from dubito.cli.compare.spec import parse_spec as parse_spec
from dubito.evaluation.problems import Problem as Problem
from dubito.evaluation.problems import Split as Split
from dubito.evaluation.problems import of_table as of_table
from dubito.evaluation.problems import problem as problem

__getattr__ = renamed(__name__, {"Cell": "Result", "Entry": "Spec", "entry": "parse_spec", "Part": "Split"})
