"""Exploration in environments: Q-learning with Thompson sampling from a posterior over value functions, or epsilon-greedy.

`QLearning` learns in any environment with the interface of gymnasium; `Maze` is a small one. Read maze, q_learning.
A part of the room `apps`: it imports from `apps.network` and `apps.action_values`, and from the rooms below.
"""

from dubito.apps.exploration.maze import Maze as Maze
from dubito.apps.exploration.q_learning import EpsilonGreedy as EpsilonGreedy
from dubito.apps.exploration.q_learning import History as History
from dubito.apps.exploration.q_learning import QLearning as QLearning
from dubito.apps.exploration.q_learning import Replay as Replay
from dubito.apps.exploration.q_learning import Thompson as Thompson
from dubito.apps.exploration.q_learning import Transitions as Transitions
