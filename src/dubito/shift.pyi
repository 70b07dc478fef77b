from dubito.evaluation.shift import *
