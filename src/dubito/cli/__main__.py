"""`python -m dubito.cli` is `python -m dubito`."""

import sys

from dubito.cli import main

sys.exit(main())
