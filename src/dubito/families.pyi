from dubito.posteriors.families import *
