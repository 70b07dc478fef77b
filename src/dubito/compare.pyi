from dubito.cli.compare import *
