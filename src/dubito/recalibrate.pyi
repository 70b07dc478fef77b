from dubito.evaluation.recalibrate import *
