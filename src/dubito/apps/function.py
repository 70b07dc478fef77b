"""One function of a posterior, drawn at random: what Thompson sampling acts by."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dubito.evaluation.shift.functions import Functions, functions
from dubito.posteriors import Mixture, Posterior, Samples, Stored
from dubito.posteriors.predict.dropout import Masks
from dubito.posteriors.stored import BUFFER
from dubito.tensors import tree
from dubito.tensors.tree import Buffers


def one_function(posterior: Posterior, generator: torch.Generator) -> Functions:
    """A function drawn from any posterior: a member of an ensemble, a dropout mask, weights, or a linear function of a Laplace.

    It is the same function for all inputs it is then asked for, as often as it is asked, and has a graph back to x.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> wide = dubito.posteriors.Gaussian.diagonal(model, model.parameters(), {"bias": torch.ones(1)})
    >>> f = one_function(wide, torch.Generator().manual_seed(0))
    >>> torch.equal(f(torch.zeros(1, 1)).means, f(torch.zeros(1, 1)).means)
    True
    """
    if isinstance(posterior, Mixture):
        which = int(torch.multinomial(torch.tensor(posterior.weights), 1, generator=_cpu(generator)))
        return one_function(posterior.members[which], generator)
    if isinstance(posterior, Stored):  # one is read, and not all: it is kept on disk since all of them are too many
        which = torch.randint(len(posterior), (1,), generator=_cpu(generator))
        own = {name.removeprefix(BUFFER): leaf for name, leaf in tree.select(posterior.select(which), 0).items()}
        return Functions(posterior.model, {**posterior.buffers, **own}, {})
    if isinstance(posterior, Samples):
        shares = torch.ones(len(posterior)) if posterior.weights is None else posterior.weights.cpu()
        which = int(torch.multinomial(shares, 1, generator=_cpu(generator)))
        own = {**tree.select(posterior.params, which), **tree.select(posterior.own_buffers, which)}
        return Functions(posterior.model, {**posterior.buffers, **own}, {})
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    drawn = functions(posterior, draws=1, seed=seed)
    assert isinstance(drawn, Functions)
    if drawn.dropout is not None:
        # one mask for all inputs, whatever the posterior predicts with: otherwise every input would have a function of its own
        return Masked(drawn.model, drawn.shared, {}, dropout=drawn.dropout, seeds=drawn.seeds)
    if drawn.tangent or not drawn.stacked:
        return drawn
    return replace(drawn, shared={**drawn.shared, **tree.select(drawn.stacked, 0)}, stacked={})


class Masked(Functions):
    """One function with one consistent mask: nothing to batch over, and no generator to lend."""

    def _masked(self, x: Tensor, shared: Buffers) -> Tensor:
        assert self.dropout is not None
        assert self.seeds is not None
        with Masks(self.dropout, shared, seed=self.seeds[0]):
            return self._once({}, x, shared).unsqueeze(0)


def _cpu(generator: torch.Generator) -> torch.Generator:
    """Choices among a few are made on the CPU, so that they are the same on every device."""
    if generator.device.type == "cpu":
        return generator
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))
