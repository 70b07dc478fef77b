"""Inputs that are other than those a network was trained on: corrupted, turned, or attacked; and how predictions bear up."""

from dubito.shift.attack import fgsm as fgsm
from dubito.shift.attack import pgd as pgd
from dubito.shift.corruptions import COMMON as COMMON
from dubito.shift.corruptions import CORRUPTIONS as CORRUPTIONS
from dubito.shift.corruptions import EXTRA as EXTRA
from dubito.shift.corruptions import corrupt as corrupt
from dubito.shift.functions import Functions as Functions
from dubito.shift.functions import functions as functions
from dubito.shift.rotation import rotate as rotate
from dubito.shift.sweep import Attacks as Attacks
from dubito.shift.sweep import Corruptions as Corruptions
from dubito.shift.sweep import Rotations as Rotations
from dubito.shift.sweep import Shift as Shift
from dubito.shift.sweep import Sweep as Sweep
from dubito.shift.sweep import sweep as sweep
