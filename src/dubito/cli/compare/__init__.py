"""Methods compared: a grid of methods and seeds on a problem, kept cell by cell, and the page that shows it.

>>> import tempfile
>>> from pathlib import Path
>>> digits = problem("digits").limited(100, 50)
>>> with tempfile.TemporaryDirectory() as folder:
...     grid = Grid(digits, (entry("map,epochs=2", digits),), (0, 1), Path(folder))
...     [cell.key.seed for cell in grid.run(progress=False).cells]
[0, 1]
"""

from dubito.cli.compare.grid import Grid as Grid
from dubito.cli.compare.grid import Outcome as Outcome
from dubito.cli.compare.page import page as page
from dubito.cli.compare.result import Cell as Cell
from dubito.cli.compare.spec import Entry as Entry
from dubito.cli.compare.spec import entry as entry
from dubito.evaluation.problems import Part as Part
from dubito.evaluation.problems import Problem as Problem
from dubito.evaluation.problems import of_table as of_table
from dubito.evaluation.problems import problem as problem
