from dubito.evaluation.data import *
