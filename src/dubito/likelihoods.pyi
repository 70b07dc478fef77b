from dubito.model.likelihoods import *
