"""Maps: what is predicted for every pixel and how uncertain it is, and where the labels of a label map change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.judge.stream import Predictor, input_dtype, model_of, predictor
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.model.likelihoods import HeteroscedasticCategorical, HeteroscedasticGaussian, average, entropy
from dubito.network.examples import batch_size
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.posteriors.predictive.latent_mixture import NODES
from dubito.tensors import tree
from dubito.tensors.checks import at_least, require

GIGABYTE = 2**30
EVERYWHERE = ("mean", "total", "aleatoric", "epistemic", "spread")  # the maps that every predictive has
PIECE = 2**20  # numbers that are worked on at a time on a CPU, so that they stay in the cache
WORK = 12  # bytes of intermediate results for each byte of draws


@dataclass(frozen=True)
class Maps:
    """Maps over the positions *D of B inputs; classes have entropies in nats, numbers variances summed over their outputs.

    One label that is on or off (`Bernoulli`) is shown as two classes.

    `spread` is the variance of the network's output over the posterior (of logits, or of means), averaged over its channels.
    `noise` is the variance that the network itself predicts for its logits or numbers, averaged likewise; None where it does not.
    """

    mean: Tensor  # [B, *D, C]: class probabilities, or numbers
    total: Tensor  # [B, *D]
    aleatoric: Tensor
    epistemic: Tensor
    spread: Tensor
    noise: Tensor | None
    discrete: bool

    @property
    def prediction(self) -> Tensor:
        """The most probable class, [B, *D], or the mean, [B, *D, C]."""
        return self.mean.argmax(-1) if self.discrete else self.mean

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class, [B, *D]."""
        require(self.discrete, "numbers have no confidence: use total, a variance")
        return self.mean.amax(-1)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Maps:
        """The maps after a function of each."""
        noise = None if self.noise is None else function(self.noise)
        return Maps(**{name: function(getattr(self, name)) for name in EVERYWHERE}, noise=noise, discrete=self.discrete)

    def to(self, device: torch.device | str) -> Maps:
        """The same maps on another device."""
        return self.apply(lambda values: values.to(device))

    def __getitem__(self, rows: slice | Tensor | list[int]) -> Maps:
        """The maps of some of the inputs."""
        return self.apply(lambda values: values[rows])

    @staticmethod
    def joined(parts: list[Maps]) -> Maps:
        """Maps of several batches as one."""
        noise = None if parts[0].noise is None else torch.cat([maps.noise for maps in parts if maps.noise is not None])
        whole = {name: torch.cat([getattr(maps, name) for maps in parts]) for name in EVERYWHERE}
        return Maps(**whole, noise=noise, discrete=parts[0].discrete)


def maps(
    posterior: Posterior | Predictor,
    x: Any,
    *,
    task: str | None = None,
    how: str | None = None,
    draws: int | None = None,
    memory: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Maps:
    """Maps of the inputs x from any posterior, or from any function that gives a `Predictive`, on the CPU.

    Images go through the posterior a few at a time, as many as `memory` (gigabytes) allows, and of their draws only the maps are kept:
    50 draws of 200 images do not have to fit anywhere. All images are seen by the same functions. `task` names one of `MultiTask`.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Dropout2d(0.5), torch.nn.Conv2d(8, 4, 1))
    >>> model = dubito.Model(net, dubito.Categorical(dim=1))
    >>> x, y = torch.rand(5, 3, 6, 8), torch.randint(4, (5, 6, 8))
    >>> found = maps(dubito.fit(model, dubito.MCDropout(epochs=1), (x, y)), x, draws=10)
    >>> found.prediction.shape, found.aleatoric.shape, bool((found.epistemic > 0).all())
    (torch.Size([5, 6, 8]), torch.Size([5, 6, 8]), True)
    """
    predict, model = predictor(posterior, how=how, draws=draws, memory=memory, seed=seed), model_of(posterior)
    x, parts, done = tree.tensors(x, input_dtype(model)), [], 0
    with torch.no_grad(), Progress("Maps", batch_size(x), show=progress) as bar:
        for p in predictives(predict, model, x, Portions(memory), task=task):
            parts.append(maps_of(p, memory=memory).to("cpu"))
            done += len(parts[-1].total)
            bar.update(done, {"images": done})
    return Maps.joined(parts)


@torch.no_grad()
def maps_of(p: Predictive, *, memory: float = 1.0) -> Maps:
    """The maps of a predictive, a few pixels at a time.

    >>> import dubito
    >>> f = torch.tensor([[9.0, -9.0], [-9.0, 9.0]]).reshape(2, 1, 1, 1, 2)   # two draws that disagree about the only pixel
    >>> maps_of(LatentMixture(dubito.Categorical(dim=1), f)).epistemic
    tensor([[[0.6931]]])
    """
    shape = p.f_mean.shape[:-1]
    flat = Maps.joined([piece.maps for piece, _ in pieces(p, memory)])
    return flat.apply(lambda values: values.reshape(*shape, *values.shape[1:]))


@dataclass
class Portions:
    """How many inputs go through a posterior at a time, so that their draws take about a third of the memory."""

    memory: float  # gigabytes
    each: int = 0  # bytes that the draws of one input take; 0 until the first input was predicted

    @property
    def size(self) -> int:
        """How many inputs fit; 1 as long as it is not known how much one takes."""
        return max(1, int(self.memory * GIGABYTE / 3 / self.each)) if self.each else 1


def predictives(predict: Predictor, model: Model | None, x: Any, portions: Portions, *, task: str | None) -> Iterator[Predictive]:
    """The predictives of inputs, portion by portion; the very first input goes alone, to tell how much one takes."""
    x = tree.tensors(x, input_dtype(model))
    n, done = batch_size(x), 0
    require(n, "there are no inputs: x is empty")
    while done < n:
        rows = slice(done, done + portions.size)
        done += portions.size
        p = predict(tree.apply_leaves(lambda leaf, rows=rows: leaf[rows], x))
        portions.each = portions.each or max(1, p.means.nbytes)
        yield of_task(p, task)


def of_task(p: Predictive, task: str | None) -> Predictive:
    """One task of several, or the only one."""
    if names := p.likelihood.task_names:
        if task is None:
            raise ValueError(f"the likelihood has several tasks: name one, task= one of {list(names)}")
        return p.task(task)
    require(task is None, f"{type(p.likelihood).__name__} has no tasks to choose from: leave out task={task!r}")
    return p


@dataclass(frozen=True)
class Piece:
    """Some positions of a predictive."""

    p: Predictive  # of these positions, as inputs of their own where the predictive allows that
    maps: Maps  # [n] in the place of [B, *D]


def pieces(predictive: Predictive, memory: float, keep: Tensor | None = None) -> Iterator[tuple[Piece, slice]]:
    """The positions of a predictive (those of `keep` [B, *D], if given) a few at a time, with their place among all of these."""
    p = predictive.mixture
    if p is None:
        dims, discrete = predictive.f_mean.ndim, predictive.likelihood.discrete
        flat = [part.flatten(0, -2) if part.ndim == dims else part.flatten() for part in _read(predictive)]
        chosen = flat if keep is None else [part[keep.flatten()] for part in flat]
        whole = Maps(**dict(zip(EVERYWHERE, chosen, strict=True)), noise=None, discrete=discrete)
        yield Piece(predictive, whole), slice(0, len(whole.mean))
        return
    axes = p.means.ndim - 1  # S, B, *D

    def rows(values: Tensor | None) -> Tensor | None:
        """[S, B, *D, ...] to [S, n, ...]."""
        return None if values is None else values[:, keep] if keep is not None else values.flatten(1, axes - 1)

    means, cov, root = rows(p.means), rows(p.cov), rows(p.root)
    assert means is not None
    step = _step(p, means, memory)
    for start in range(0, means.shape[1], step):
        at = slice(start, min(start + step, means.shape[1]))
        some_cov, some_root = (None if part is None else part[:, at] for part in (cov, root))
        part = replace(p, means=means[:, at], cov=some_cov, root=some_root)
        read = dict(zip(EVERYWHERE, _read(part), strict=True))
        yield Piece(part, Maps(**read, noise=_noise(part), discrete=p.likelihood.discrete)), at


def _step(p: LatentMixture, means: Tensor, memory: float) -> int:
    """Positions at a time."""
    width = means.shape[0] * means.shape[-1]
    if isinstance(p.likelihood, HeteroscedasticCategorical):
        width *= p.likelihood.samples
    if not p.certain:
        width *= p.quadrature or NODES
    most = PIECE if means.device.type == "cpu" else memory * GIGABYTE / 4 / WORK
    return max(1, int(min(most, memory * GIGABYTE / 4 / WORK) // width))


def _read(p: Predictive) -> list[Tensor]:
    """Mean [..., C], and total, aleatoric, epistemic and spread [...]."""
    width = p.likelihood.width(p.f_mean)
    spread = p.f_var[..., :width].mean(-1)
    if p.likelihood.discrete and not p.likelihood.indexed:
        require(width == 1, f"pixels must have one class, and these have {width} labels, each on or off: look at them one by one")
        split = p.uncertainty
        return [torch.cat([p.complement, p.mean], -1), split.total, split.aleatoric, split.epistemic, spread]
    draws = p.mixture
    if draws is not None and p.likelihood.indexed and (draws.certain or draws.link == "mc"):
        # the same as its `uncertainty`, with the probabilities of all draws computed once
        mean, weights = p.mean, draws.draw_weights
        total = entropy(mean)
        aleatoric = torch.minimum(average(entropy(draws.probs), weights), total)
        return [mean, total, aleatoric, total - aleatoric, spread]
    split = p.uncertainty
    parts = [split.total, split.aleatoric, split.epistemic]
    return [p.mean, *(parts if p.likelihood.discrete else (values.sum(-1) for values in parts)), spread]


def _noise(p: LatentMixture) -> Tensor | None:
    """The variance that a network predicts for its own logits or numbers, averaged over channels and draws, [n]."""
    points = p if p.certain else p.points
    if isinstance(p.likelihood, HeteroscedasticGaussian):
        log_variance = p.likelihood.moments(points.means)[1]
    elif isinstance(p.likelihood, HeteroscedasticCategorical):
        log_variance = points.means.chunk(2, -1)[1]
    else:
        return None
    return average(log_variance.exp().mean(-1), points.draw_weights)


def edges(labels: Tensor, *, width: int = 1, ignore_index: int = -100) -> Tensor:
    """1 where another label lies within `width` pixels (up, down, aside or across), 0 elsewhere; [B, H, W] as the labels are.

    Pixels that are `ignore_index` stay so, and are no other label for those beside them.

    >>> edges(torch.tensor([[[0, 0, 0, 2, 2]]]))
    tensor([[[0, 0, 1, 1, 0]]])
    """
    whole = labels.ndim == 3 and not labels.is_floating_point()
    require(whole, f"label maps must be whole numbers [B, H, W]; got {list(labels.shape)} of {labels.dtype}")
    at_least(1, width=width)
    void = labels == ignore_index
    if not labels.numel() or bool(void.all()):
        return labels.clone()
    known = labels[~void]
    low, high = int(known.min()) - 1, int(known.max()) + 1
    require(low >= -(2**24) and high <= 2**24, f"labels must be below 2^24 in size; got {low + 1} to {high - 1}")
    signed = labels.long()  # bytes have no number below 0
    largest = _largest(torch.where(void, low, signed), width)
    least = -_largest(-torch.where(void, high, signed), width)
    other = (largest != signed) | (least != signed)
    return torch.where(void, labels, other.to(labels.dtype))


def edge_distance(labels: Tensor, *, cap: int = 8, ignore_index: int = -100) -> Tensor:
    """How many pixels lie between each pixel and the nearest edge, from 0 beside it to `cap` where none is near: [B, H, W], float32.

    NaN where the label is `ignore_index`: `HeteroscedasticGaussian(missing=True)` leaves those out.

    >>> edge_distance(torch.tensor([[[0, 0, 0, 2, 2]]]), cap=4)
    tensor([[[2., 1., 0., 0., 1.]]])
    """
    at_least(1, cap=cap)
    near = torch.stack([edges(labels, width=k, ignore_index=ignore_index) == 1 for k in range(1, cap + 1)])
    distance = (cap - near.sum(0)).to(torch.float32)
    return distance.masked_fill(labels == ignore_index, torch.nan)


def _largest(labels: Tensor, width: int) -> Tensor:
    """The largest label within `width` pixels."""
    return F.max_pool2d(labels.float().unsqueeze(1), 2 * width + 1, 1, width).squeeze(1).to(labels.dtype)
