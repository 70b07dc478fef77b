from dubito.evaluation.metrics import *
