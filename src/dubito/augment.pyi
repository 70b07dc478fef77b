from dubito.inference.augment import *
