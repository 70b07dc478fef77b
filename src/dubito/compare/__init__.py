"""Methods compared: a grid of methods and seeds on a problem, kept cell by cell, and the page that shows it.

>>> import tempfile
>>> from pathlib import Path
>>> digits = problem("digits").limited(100, 50)
>>> with tempfile.TemporaryDirectory() as folder:
...     grid = Grid(digits, (entry("map,epochs=2", digits),), (0, 1), Path(folder))
...     [cell.key.seed for cell in grid.run(progress=False).cells]
[0, 1]
"""

from dubito.compare.cell import Cell as Cell
from dubito.compare.entry import Entry as Entry
from dubito.compare.entry import entry as entry
from dubito.compare.grid import Grid as Grid
from dubito.compare.grid import Outcome as Outcome
from dubito.compare.page import page as page
from dubito.compare.problem import Part as Part
from dubito.compare.problem import Problem as Problem
from dubito.compare.problem import of_table as of_table
from dubito.compare.problem import problem as problem
