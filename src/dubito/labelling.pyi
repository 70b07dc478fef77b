from dubito.web.labelling import *
