from dubito.model.priors import *
