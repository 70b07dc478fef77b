"""`python -m dubito` is the command line, where the script `dubito` is not on the path."""

import sys

from dubito.cli import main

sys.exit(main())
