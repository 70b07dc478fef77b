"""Inputs that are other than those a network was trained on: corrupted, turned, or attacked; and how predictions bear up."""

from dubito.evaluation.shift.attack import fgsm as fgsm
from dubito.evaluation.shift.attack import functions as functions
from dubito.evaluation.shift.attack import pgd as pgd
from dubito.evaluation.shift.corruptions import COMMON as COMMON
from dubito.evaluation.shift.corruptions import CORRUPTIONS as CORRUPTIONS
from dubito.evaluation.shift.corruptions import EXTRA as EXTRA
from dubito.evaluation.shift.corruptions import corrupt as corrupt
from dubito.evaluation.shift.corruptions import rotate as rotate
from dubito.evaluation.shift.sweep import Attacks as Attacks
from dubito.evaluation.shift.sweep import Corruptions as Corruptions
from dubito.evaluation.shift.sweep import Rotations as Rotations
from dubito.evaluation.shift.sweep import Shift as Shift
from dubito.evaluation.shift.sweep import Sweep as Sweep
from dubito.evaluation.shift.sweep import sweep as sweep
from dubito.posteriors.functions import Functions as Functions
