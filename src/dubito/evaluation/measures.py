r"""How uncertain a prediction is, as one number an input: `Predictive -> [B]`, and larger always means less certain.

Dense outputs give maps [B, *D]. Measures of classes read the class probabilities of S draws, :math:`p_s`, with weights
:math:`w_s`, and their mean :math:`\bar p = \sum_s w_s p_s`. With `Bernoulli` every label is a choice of its own,
0 or 1, and the labels' measures are summed. The variances are for regression as well, summed over its outputs.

What the split into aleatoric and epistemic can and cannot do: it is a statement about the *model*, not about the world. Epistemic
means that draws of the weights disagree, aleatoric what the likelihood would leave if one of these draws were true. Both depend on the
posterior approximation: a point has no epistemic part at all, whatever it does not know. Both are wrong where the model class
is wrong, and a network that has never seen an input may take its ignorance for noise. With more data the epistemic part goes to 0 and
the aleatoric one does not; that is the one property to rely on. Use the epistemic part to rank inputs (which to label, which are
unfamiliar) and check the ranking on held-out data. The parts do not separate causes: on CIFAR-10H, where 50 people have labelled every
image, the aleatoric and the epistemic part of the same predictions correlate alike with human disagreement (.363 and .346).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import suits
from dubito.model.likelihoods import average
from dubito.posteriors.predictive import LatentMixture, Predictive


def predictive_entropy(p: Predictive) -> Tensor:
    r"""Total uncertainty of the class in nats, :math:`H[\bar p] = -\sum_c \bar p_c \ln \bar p_c`, from 0 to ln C.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> predictive_entropy(p)
    tensor([0.6931])
    """
    return _classes(p, "predictive_entropy").uncertainty.total


def expected_entropy(p: Predictive) -> Tensor:
    r"""The aleatoric part of the entropy, :math:`\sum_s w_s H[p_s]`: what would be left if the weights were known, according to the
    model. It is the noise in the data only as far as the draws are right about it.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> expected_entropy(p)
    tensor([0.3251])
    """
    return _classes(p, "expected_entropy").uncertainty.aleatoric


def mutual_information(p: Predictive) -> Tensor:
    r"""How much the draws disagree (BALD), the epistemic part: :math:`I[y; \theta] = H[\bar p] - \sum_s w_s H[p_s]`.

    It is the information that the label would give about the weights, 0 for a point. Draws that are wrong alike have none.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> mutual_information(p)
    tensor([0.3681])
    """
    return _classes(p, "mutual_information").uncertainty.epistemic


def variation_ratio(p: Predictive) -> Tensor:
    r"""The share of draws that do not vote for the most voted class, :math:`1 - \max_c \sum_s w_s v_{sc}`.

    A draw votes for its most probable class, :math:`v_{sc} = 1`, or evenly for all that are tied.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> variation_ratio(p)
    tensor([0.5000])
    """
    mixture = _drawn(_classes(p, "variation_ratio"), "variation_ratio")
    probs = _choices(mixture, mixture.probs, 1 - mixture.probs)  # [S, B, *D, L, K]
    votes = (probs == probs.amax(-1, keepdim=True)).to(probs.dtype)
    share = average(votes / votes.sum(-1, keepdim=True), mixture.draw_weights)  # [B, *D, L, K]
    return _beside_top(share).sum((-2, -1))


def one_minus_max(p: Predictive) -> Tensor:
    r"""How probable it is that the most probable class is wrong, :math:`1 - \max_c \bar p_c`.

    For labels: how many of them are expected to be wrong.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> one_minus_max(p)
    tensor([0.5000])
    """
    return _beside_top(_choices(_classes(p, "one_minus_max"), p.mean, p.complement)).sum((-2, -1))


def margin(p: Predictive) -> Tensor:
    r"""How close the second class comes, :math:`1 - (\bar p_{(1)} - \bar p_{(2)})`.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> margin(p)
    tensor([1.])
    """
    beside = _beside_top(_choices(_classes(p, "margin"), p.mean, p.complement))
    return (beside.sum(-1) + beside.amax(-1)).sum(-1)  # 1 - p1, and p2


def total_variance(p: Predictive) -> Tensor:
    r"""Variance of the target, noise included: :math:`\sum_c \mathrm{Var}[y_c]`.

    Here y are the numbers of a regression, the labels, or the one-hot class. For classes it is
    :math:`\sum_c \bar p_c (1 - \bar p_c)`.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> total_variance(p)
    tensor([0.5000])
    """
    aleatoric, epistemic = _variances(p, "total_variance")
    return aleatoric + epistemic


def aleatoric_variance(p: Predictive) -> Tensor:
    r"""The part of `total_variance` that the model takes for noise, :math:`E_\theta \sum_c \mathrm{Var}[y_c \mid \theta]`.

    For classes that is :math:`\sum_s w_s \sum_c p_{sc} (1 - p_{sc})`.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> aleatoric_variance(p)
    tensor([0.1800])
    """
    return _variances(p, "aleatoric_variance")[0]


def epistemic_variance(p: Predictive) -> Tensor:
    r"""The part of `total_variance` by which draws of the weights differ, :math:`\sum_c \mathrm{Var}_\theta E[y_c \mid \theta]`.

    For classes that is :math:`\sum_s w_s \sum_c (p_{sc} - \bar p_c)^2`.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> epistemic_variance(p)
    tensor([0.3200])
    """
    return _variances(p, "epistemic_variance")[1]


MEASURES: dict[str, Callable[[Predictive], Tensor]] = {
    "predictive_entropy": predictive_entropy,
    "expected_entropy": expected_entropy,
    "mutual_information": mutual_information,
    "variation_ratio": variation_ratio,
    "one_minus_max": one_minus_max,
    "margin": margin,
    "total_variance": total_variance,
    "aleatoric_variance": aleatoric_variance,
    "epistemic_variance": epistemic_variance,
}


def _classes(p: Predictive, name: str) -> Predictive:
    suits(p, name, classes=True, advice=("", "use total_variance, aleatoric_variance or epistemic_variance"))
    return p


def _drawn(p: Predictive, name: str) -> LatentMixture:
    if p.mixture is None:
        raise ValueError(f"{name} needs draws of the network's output, which a {type(p).__name__} does not have")
    return p.mixture


def _choices(p: Predictive, probs: Tensor, off: Tensor) -> Tensor:
    """Probabilities [..., C] as L choices among K, [..., L, K]: one among C classes, or C labels of 0 (`off`) or 1."""
    return probs.unsqueeze(-2) if p.likelihood.indexed else torch.stack([off, probs], -1)


def _beside_top(probs: Tensor) -> Tensor:
    """All but the largest. Their sum is 1 - max without the rounding, which would tie all confident inputs at 0."""
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0)


def _variances(p: Predictive, name: str) -> tuple[Tensor, Tensor]:
    """(aleatoric, epistemic) variance of the target, summed over its entries: the law of total variance."""
    suits(p, name, classes=None)
    if not p.likelihood.discrete:
        return p.uncertainty.aleatoric.sum(-1), p.uncertainty.epistemic.sum(-1)
    mixture = _drawn(p, name)
    probs, weights = mixture.probs, mixture.draw_weights  # [S, B, *D, C], [S]
    points, likelihood = mixture.marginal_points, p.likelihood
    rest = 1 - probs if likelihood.indexed else likelihood.off(points.means, points.aligned_params)
    noise = (probs * rest).clamp_min(0)  # a probability may round to more than 1
    return average(noise.sum(-1), weights), average(((probs - mixture.mean) ** 2).sum(-1), weights)
