"""Maximum a posteriori: the most probable weights."""

from __future__ import annotations

from dataclasses import dataclass

from dubito.inference.descent import Descent, DescentState
from dubito.model import Target
from dubito.posteriors import Point, Posterior
from dubito.tensors import store


@dataclass(frozen=True)
class MAP(Descent[DescentState]):
    r"""The weights that maximize the log joint, :math:`\log p(D \mid \theta) + \log p(\theta)`, by gradient descent.

    Ordinary training, with weight decay that comes from the prior: on ridge regression the optimum is the closed form. Its posterior
    is a point; other methods start from it, as `fit(model, method, data, start=posterior)`.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, MAP(epochs=10), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> posterior.predict(torch.zeros(2, 1)).mean.shape
    torch.Size([2, 1])
    """

    def posterior(self, target: Target, state: DescentState, draws: store.Draws) -> Posterior:
        """A point at the weights."""
        return Point(target.model, state.params, state.buffers)
