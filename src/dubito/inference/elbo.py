"""The evidence lower bound of a posterior, as the two parts of a description length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model import Model
from dubito.model.priors import MultivariateNormal, Prior
from dubito.model.priors.prior import prior_params, weights
from dubito.network.examples import Batch, Data, batch_size
from dubito.posteriors import Drawn, Gaussian, Posterior
from dubito.posteriors.families import Grouped
from dubito.tensors import tree
from dubito.tensors.covariances import Diagonal
from dubito.tensors.randomness import borrowed_generators, fork_rng, generator
from dubito.tensors.text import TextTable
from dubito.tensors.tree import Params

NOTHING, POINT = 0.01, 1e-3  # bits a weight below which q is the prior; sigma beside |mu| below which it is a point


@dataclass(frozen=True)
class Elbo:
    r"""What it takes to send the targets to someone who has the inputs and the prior, in bits: first the weights, as exactly as q holds
    them, then what is left of the targets given the weights (Hinton & van Camp 1993),

    .. math:: -\mathrm{ELBO} = \underbrace{-E_q[\log p(D \mid \theta)]}_{\text{error}} +
        \underbrace{\mathrm{KL}(q \,\|\, p)}_{\text{complexity}} \ge -\log p(D).
    """

    error: float  # bits
    complexity: float  # bits
    error_of: float  # standard error of the first, which is estimated from draws
    layers: dict[str, float] = field(default_factory=dict)  # bits a weight, where they can be told apart
    notes: list[str] = field(default_factory=list)  # in words: what has collapsed
    bounds: bool = True  # whether it is a bound: under an improper prior it is known up to a constant, and is none

    @property
    def nats(self) -> float:
        """The bound itself, of log p(D), given what was learned as a point."""
        return -(self.error + self.complexity) * math.log(2)

    def __str__(self) -> str:
        parts = f"error {self.error:.1f} ± {self.error_of:.1f} bits, complexity {self.complexity:.1f} bits"
        title = f"{parts}, log p(D) >= {self.nats:.2f}" if self.bounds else f"{parts} up to a constant: no bound of log p(D)"
        rows = [(name, f"{bits:.3f}", "bits a weight") for name, bits in self.layers.items()]
        return "\n".join([str(TextTable(rows, title=title, right=[1])), *self.notes])


@torch.no_grad()
def elbo(posterior: Posterior, data: Data, *, draws: int = 100, seed: int = 0, chunk: int = 1000) -> Elbo:
    """The evidence bound E_q[log p(D | theta)] - KL(q || p) of a posterior with a density, `Gaussian` or `Drawn`, by `draws` draws.

    `data` are (x, y), taken `chunk` at a time, or batches: all that the posterior was fitted to, and no more. Quantities that were
    learned as points (a noise, scales of the prior, also by the evidence) are taken as given: it is then a bound of log p(D) given
    them, and their own density has no part in it.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0), dubito.priors.Normal(scale=1.0))
    >>> q = dubito.posteriors.Gaussian.diagonal(model, {"weight": torch.zeros(1, 1)}, {"weight": torch.ones(1, 1)})
    >>> bound = elbo(q, (torch.zeros(4, 1), torch.zeros(4, 1)))     # q is the prior
    >>> round(bound.nats, 4), bound.complexity                      # and the data are all zero: 4 log N(0; 0, 1)
    (-3.6758, 0.0)
    """
    if isinstance(posterior, Gaussian):
        return _gaussian_bound(posterior, _batches(posterior.model, data, chunk), draws, seed)
    if isinstance(posterior, Drawn):
        return _drawn_bound(posterior, _batches(posterior.model, data, chunk), draws, seed)
    raise TypeError(f"a bound needs the density of the posterior, which a {type(posterior).__name__} does not have")


def _batches(model: Model, data: Data, chunk: int) -> list[Batch]:
    """The data on the model's device; one pair (x, y) is cut into chunks."""
    whole = isinstance(data, tuple)
    batches = [data] if whole else data
    with borrowed_generators(batches), fork_rng():
        batches = [tree.move(batch, model.device) for batch in batches]
    if not whole:
        return batches
    starts = range(0, batch_size(data[1]), chunk)
    return [tree.apply_leaves(lambda leaf, i=i: leaf[i : i + chunk], batches[0]) for i in starts]


def _gaussian_bound(posterior: Gaussian, batches: list[Batch], draws: int, seed: int) -> Elbo:
    """The bound of a Gaussian, whose divergence mostly has a closed form."""
    source = generator(posterior.model.device, seed, "elbo")
    scores = [_log_likelihood(posterior, tree.select(posterior.sample(1, source), 0), batches) for _ in range(draws)]
    complexity, layers = _divergence(posterior, seed, draws)
    return _bound(scores, complexity, layers, _notes(posterior, layers), improper=posterior.model.prior.improper)


def _drawn_bound(posterior: Drawn, batches: list[Batch], draws: int, seed: int) -> Elbo:
    """The bound of another family, whose divergence is estimated from the same draws."""
    source, family, divergences, scores = generator(posterior.model.device, seed, "elbo"), posterior.family, [], []
    for _ in range(draws):
        noise = family.noise(posterior.leaves, source)
        params = {**family.sample(posterior.leaves, noise), **posterior.points}
        divergences.append(_estimated(posterior, params, noise))
        scores.append(_log_likelihood(posterior, params, batches))
    improper = posterior.model.prior.improper
    if isinstance(family, Grouped):  # which has a prior of its own
        improper = family.prior == "normal_jeffreys"
    return _bound(scores, sum(divergences) / draws, {}, [], improper=improper)


def _log_likelihood(posterior: Gaussian | Drawn, params: Params, batches: list[Batch]) -> float:
    buffers = tree.clone(posterior.buffers)
    return sum(float(posterior.model.log_likelihood(params, batch, buffers)[0].double().sum()) for batch in batches)


def _bound(scores: list[float], complexity: float, layers: dict[str, float], notes: list[str], *, improper: bool) -> Elbo:
    bits = torch.tensor(scores, dtype=torch.float64) / -math.log(2)
    spread = float(bits.std() / math.sqrt(len(scores))) if len(scores) > 1 else math.nan
    return Elbo(float(bits.mean()), complexity / math.log(2), spread, layers, notes, not improper)


def _estimated(posterior: Drawn, params: Params, noise: Params) -> float:
    q, leaves, prior = posterior.family, posterior.leaves, posterior.model.prior
    hyper = {name: leaf for name, leaf in posterior.points.items() if name.startswith("prior:")}
    if (given := q.divergence(leaves, noise, prior, hyper)) is not None:
        return float(given if isinstance(q, Grouped) else given + prior.log_hyper(prior_params(params)))
    density = q.log_prob(leaves, {name: leaf for name, leaf in params.items() if ":" not in name})
    assert density is not None
    return float(density - prior.log_prob(prior_params(params)) + prior.log_hyper(prior_params(params)))


def _divergence(posterior: Gaussian, seed: int, draws: int) -> tuple[float, dict[str, float]]:
    """KL(q || p) in nats, and where weights are independent, bits a weight of every leaf."""
    prior, covariance = _prior(posterior), posterior.covariance
    names = list(covariance.shapes)
    hyper = {n: leaf for n, leaf in posterior.params.items() if n.startswith("prior:") and n not in names}
    if any(":" in name and name not in prior_params(posterior.params) for name in names):
        raise ValueError("this posterior is also over a learned noise, whose prior is flat: there is no bound")
    mean = {name: posterior.params[name].double() for name in names}
    variance = {name: leaf.double() for name, leaf in covariance.variance().items()}
    independent = covariance.independent
    entropy = 0.5 * (covariance.logdet() + covariance.moving * (1 + math.log(2 * math.pi)))
    expected = prior.expected_log_prob({**mean, **hyper}, variance, independent=independent)
    if expected is None:
        source = generator(posterior.model.device, seed, "prior")
        values = [prior.log_prob(prior_params(tree.select(posterior.sample(1, source), 0))) for _ in range(draws)]
        expected = torch.stack(values).double().mean()
    if hyper:
        expected = expected - prior.log_hyper(prior_params(posterior.params))
    layers = {}
    if independent and not prior.parameters(weights(mean)):
        layers = {name: _bits_a_weight(prior, {name: mean[name]}, {name: variance[name]}) for name in names}
    return float(-entropy - expected), {name: bits for name, bits in layers.items() if bits is not None}


def _prior(posterior: Gaussian) -> Prior:
    """The model's, with the scales that the evidence set, where it did."""
    prior = posterior.model.prior
    if posterior.fitted is None or prior.normal is None:
        return prior
    zero = {name: torch.zeros_like(posterior.params[name], dtype=torch.float64) for name in posterior.fitted.prior}
    variance = {name: (1 / leaf.double()).expand(zero[name].shape).clone() for name, leaf in posterior.fitted.prior.items()}
    return MultivariateNormal(zero, Diagonal.of(variance))


def _bits_a_weight(prior: Prior, mean: Params, variance: Params) -> float | None:
    """Bits a weight of one leaf with independent entries."""
    expected = prior.expected_log_prob(mean, variance, independent=True)
    if expected is None:
        return None
    leaf = next(iter(variance.values()))
    entropy = 0.5 * (leaf.log() + 1 + math.log(2 * math.pi)).sum()
    return float(-entropy - expected) / math.log(2) / leaf.numel()


def _notes(posterior: Gaussian, layers: dict[str, float]) -> list[str]:
    notes = [
        f"{name} has stayed at the prior ({bits:.4f} bits a weight): the data have taught it nothing, or q could not keep it"
        for name, bits in layers.items()
        if bits < NOTHING
    ]
    for name, variance in posterior.covariance.variance().items():
        size = _median(posterior.params[name].abs())
        if size > 0 and _median(variance.sqrt()) < POINT * size:
            notes.append(
                f"{name} is nearly a point: its standard deviations are less than {POINT:g} of its weights; train longer"
            )
    return notes


def _median(leaf: Tensor) -> float:
    return float(leaf.flatten().median())
