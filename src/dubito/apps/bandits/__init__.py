"""Contextual bandits: Thompson sampling from any posterior, and regret relative to uniform choice.

An agent is asked `act(context)` and told `update(context, action, reward)`: `Thompson` (any model and method), `NeuralLinear` and
`Linear` (exact posteriors), `Uniform`. `compare` plays them on a `Bandit`: those of `PROBLEMS`, or one made of data of your own.
"""

from dubito.apps.bandits.agent import Agent as Agent
from dubito.apps.bandits.agent import Uniform as Uniform
from dubito.apps.bandits.bandit import Bandit as Bandit
from dubito.apps.bandits.neural_linear import Linear as Linear
from dubito.apps.bandits.neural_linear import NeuralLinear as NeuralLinear
from dubito.apps.bandits.problems import PROBLEMS as PROBLEMS
from dubito.apps.bandits.problems import classification as classification
from dubito.apps.bandits.problems import eating as eating
from dubito.apps.bandits.problems import linear as linear
from dubito.apps.bandits.problems import mushroom_like as mushroom_like
from dubito.apps.bandits.problems import mushrooms as mushrooms
from dubito.apps.bandits.problems import wheel as wheel
from dubito.apps.bandits.regressions import Regressions as Regressions
from dubito.apps.bandits.simulate import Run as Run
from dubito.apps.bandits.simulate import Standings as Standings
from dubito.apps.bandits.simulate import Unfinished as Unfinished
from dubito.apps.bandits.simulate import compare as compare
from dubito.apps.bandits.simulate import simulate as simulate
from dubito.apps.bandits.thompson import Thompson as Thompson
from dubito.apps.bandits.thompson import epochs as epochs
