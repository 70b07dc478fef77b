"""Contextual bandits: Thompson sampling with any posterior, and regret relative to uniform choice.

An agent has `act(context)` and `update(context, action, reward)`. The agents are `Thompson` (any model and method), `NeuralLinear` and
`Linear` (exact posteriors) and `Uniform`. `compare` plays them on a `Bandit`: one of `PROBLEMS`, or one made from your own data.

Read `problems`, and then `agents`. A part of the room `apps`: it imports from `apps.network` and from the rooms below.
"""

from dubito._moved import renamed
from dubito.apps.bandits.agents import Agent as Agent
from dubito.apps.bandits.agents import Linear as Linear
from dubito.apps.bandits.agents import NeuralLinear as NeuralLinear
from dubito.apps.bandits.agents import Regressions as Regressions
from dubito.apps.bandits.agents import Thompson as Thompson
from dubito.apps.bandits.agents import Uniform as Uniform
from dubito.apps.bandits.agents import epochs as epochs
from dubito.apps.bandits.problems import PROBLEMS as PROBLEMS
from dubito.apps.bandits.problems import Bandit as Bandit
from dubito.apps.bandits.problems import Run as Run
from dubito.apps.bandits.problems import Standings as Standings
from dubito.apps.bandits.problems import UnfinishedRun as UnfinishedRun
from dubito.apps.bandits.problems import classification as classification
from dubito.apps.bandits.problems import compare as compare
from dubito.apps.bandits.problems import eating as eating
from dubito.apps.bandits.problems import linear as linear
from dubito.apps.bandits.problems import mushroom_like as mushroom_like
from dubito.apps.bandits.problems import mushrooms as mushrooms
from dubito.apps.bandits.problems import simulate as simulate
from dubito.apps.bandits.problems import wheel as wheel

__getattr__ = renamed(__name__, {"Unfinished": "UnfinishedRun"})
