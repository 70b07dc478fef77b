"""Reports: tables and figures, to a terminal, to one self-contained HTML file and to JSON."""

from dubito.report.report import Column as Column
from dubito.report.report import Figure as Figure
from dubito.report.report import Picture as Picture
from dubito.report.report import Report as Report
from dubito.report.report import Section as Section
from dubito.report.report import Snippet as Snippet
from dubito.report.report import Table as Table
from dubito.report.report import check_writable as check_writable
