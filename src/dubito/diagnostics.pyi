from dubito.posteriors.diagnostics import *
