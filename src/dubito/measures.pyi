from dubito.evaluation.measures import *
