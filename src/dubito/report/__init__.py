"""Reports: tables and figures for a terminal, for one self-contained HTML file, and as JSON.

- `content`: what a report holds: `Section`, `Table`, `Figure`, `Picture`; read it first
- `report`: `Report`, which prints and writes it
- `html` with the folder `assets`, and `terminal`: how it is shown
- `canvas`: drawing with matplotlib; one module per kind of picture draws on it: `calibration`, `comparison`, `functions`, `images`,
  `dense`, `shift`, `stability`
- `diagnosis`: the report on the chains of a sampler

May import `apps` and the rooms below it.
"""

from dubito.report.content import Column as Column
from dubito.report.content import Figure as Figure
from dubito.report.content import Picture as Picture
from dubito.report.content import Section as Section
from dubito.report.content import Snippet as Snippet
from dubito.report.content import Table as Table
from dubito.report.report import Report as Report
from dubito.report.report import check_writable as check_writable
