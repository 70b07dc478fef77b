from dubito.inference.methods import *
