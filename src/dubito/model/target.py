r"""The target of inference: the (tempered) posterior that a model and its data define, up to a constant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from dubito.model.likelihoods import likelihood_params
from dubito.model.model import Model
from dubito.model.priors import prior_params
from dubito.network.examples import Batch, Inputs, Targets, batch_size
from dubito.network.shared_batch import SharedBatch
from dubito.network.weights import in_mode
from dubito.tensors.checks import at_least, positive
from dubito.tensors.processes import ALONE, Processes
from dubito.tensors.shares import Share
from dubito.tensors.tree import Buffers, Params


class Evaluation(NamedTuple):
    """The gradient of the log joint at some weights, with the buffers and the log likelihood of the same pass."""

    gradient: Params
    buffers: Buffers
    log_likelihood: Tensor  # [] or [S]: mean per example


@dataclass(frozen=True)
class Target:
    r"""What a method samples, maximizes or approximates: :math:`(p(D \mid \theta)\, p(\theta))^{1/T}`.

    The scaling of a batch to the whole data, N / B, and the temperature live here and nowhere else. `data` is an iterable of
    batches: one for a mini-batch step, several to accumulate, all of them for a full-batch method, for which N / B is 1.

    The other fields are for combinators, which change the data or the network under a method that does not know of it. `members`:
    leaves are stacked [S, ...] and all S are evaluated in one batched pass. `around`: a context for every forward pass, given its
    weights. `weights`: how often each example of each batch counts, [B] or [S, B]. `targets`: what takes the place of each batch's
    targets, with a leading axis [S] for members. `adversary`: a step for every input element; each example is averaged with its
    adversarial neighbour x + step sign(d loss / dx) (fast gradient sign).

    Where several `processes` fit together, a step's data are this one's part of batches that all have in common; `shares` says which
    part, one for each batch, and gradients are those of all processes. Without `shares` (before the first step, say) nothing is shared.
    Over the processes of `spread` the chains of a method are divided, which see the same data.
    """

    model: Model
    n_data: int
    temperature: float = 1.0
    precision: torch.dtype | None = None
    members: int | None = None
    around: Callable[[Params], AbstractContextManager] | None = None
    weights: tuple[Tensor, ...] | None = None
    adversary: Tensor | None = None
    targets: tuple[Tensor, ...] | None = None
    processes: Processes = ALONE
    spread: Processes = ALONE
    shares: tuple[Share, ...] | None = None

    def __post_init__(self):
        at_least(1, n_data=self.n_data)
        positive(temperature=self.temperature)

    def log_prior(self, params: Params) -> Tensor:
        """log p(theta), the prior of the weights, of its own hyperparameters and of what the likelihood learns; [S] if stacked."""

        def one(params: Params) -> Tensor:
            """The log prior at one setting of the weights."""
            noise = self.model.likelihood.log_prior(likelihood_params(params)).to(self.model.device)
            return self.model.prior.log_prob(prior_params(params)) + noise

        return one(params) if self.members is None else vmap(one)(params)

    def log_joint(self, params: Params, data: Iterable[Batch], buffers: Buffers | None = None) -> Tensor:
        """(N/B sum log p(y | x, theta) + log p(theta)) / T, without gradients; [] or [S], in float64."""
        buffers = self.model.buffers() if buffers is None else buffers
        total, seen = torch.zeros((), dtype=torch.float64, device=self.model.device), 0
        with torch.no_grad():
            for i, batch in enumerate(data):
                value, _ = self.sum_scores(params, i, batch, buffers, train=False)
                total, seen = total + value.double(), seen + self.count(batch)
            return (self.n_data / seen * total + self.log_prior(params)) / self.temperature

    def gradient(
        self,
        params: Params,
        data: Iterable[Batch],
        buffers: Buffers,
        *,
        train: bool = False,
        factor: float = 1.0,
        apart: bool = False,
    ) -> Evaluation:
        """Gradient of `factor` times the log joint. The prior's gradient is analytic; autograd sees the likelihood only. `apart` leaves
        it, on several processes, at this one's part of the likelihood's gradient: to be added up by the caller."""
        live = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        leaves, factor = list(live.values()), factor / self.temperature
        total, seen, first = None, 0, 1
        common = None if self.shares is None else self.examples(())
        for i, batch in enumerate(data):
            size = self.count(batch)
            first = (common or size) if total is None else first
            with torch.enable_grad():
                value, buffers = self.sum_scores(live, i, batch, buffers, train=train)
            # The scale enters at the top of the backward pass, where it costs nothing, as if the first batch were all the data. The
            # sum builds up in `leaf.grad`, of which torch makes sure that nothing else shares it: it may be changed in place.
            torch.autograd.backward(value, torch.full_like(value, factor * self.n_data / first), inputs=leaves)
            total, seen = value.detach() if total is None else total + value.detach(), seen + size
        if total is None:
            raise ValueError("there is no data: the loader gave no batch")
        gradient = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in live.items()}
        if common is not None:
            seen = common
        if common is not None and not apart:
            self.processes.sum_gradient_(gradient.values(), total)
        with torch.no_grad():
            if seen != first:
                torch._foreach_mul_(list(gradient.values()), first / seen)
            self._add_prior(gradient, params, factor / self.processes.size if apart else factor)
        buffers = {name: leaf.detach() for name, leaf in buffers.items()}
        return Evaluation(gradient, buffers, total / seen)

    def count(self, batch: Batch) -> int:
        """The number of examples in a batch."""
        return batch_size(self.model.split(batch)[1])

    def examples(self, data: Iterable[Batch]) -> int:
        """The number of examples in the batches of a step, on all processes."""
        return sum(map(self.count, data)) if self.shares is None else sum(share.total for share in self.shares)

    def as_shared(self, index: int) -> AbstractContextManager:
        """A context for training passes over a batch: what depends on all of it is as if all of it were on this process."""
        return nullcontext() if self.shares is None else SharedBatch(self.shares[index], self.processes)

    def _add_prior(self, gradient: Params, params: Params, factor: float) -> None:
        """Add the gradient of `factor` times the log prior: of weights, hyperparameters, and what the likelihood learns."""
        prior, believed = self.model.prior, prior_params(params)
        if self.members is None or prior.stacks:
            prior.add_gradient(gradient, believed, factor)
        else:
            for name, slope in vmap(prior.gradient)(believed).items():
                gradient[name].add_(slope, alpha=factor)
        learned = {name: leaf.detach().requires_grad_() for name, leaf in likelihood_params(params).items()}
        if learned:
            with torch.enable_grad():
                value = self.model.likelihood.log_prior(learned)
                if value.requires_grad:
                    slopes = torch.autograd.grad(value, list(learned.values()), allow_unused=True, materialize_grads=True)
                    for name, slope in zip(learned, slopes, strict=True):
                        gradient[name].add_(slope, alpha=factor)

    def sum_scores(self, params: Params, index: int, batch: Batch, buffers: Buffers, *, train: bool) -> tuple[Tensor, Buffers]:
        """Sum of log likelihoods over a batch, [] or [S], and the buffers after it."""
        x, y = self.model.split(batch)
        weights = None if self.weights is None else self.weights[index]
        y = y if self.targets is None else self.targets[index]

        def score(params: Params, x: Inputs, y: Targets, buffers: Buffers) -> tuple[Tensor, Buffers]:
            """Log likelihoods of the examples, and the buffers after the pass."""
            with nullcontext() if self.around is None else self.around({**buffers, **params}):
                f, buffers = self.model.call(params, x, buffers)
            return self.model.score(f, y, params), buffers

        def one(params: Params, buffers: Buffers, weights: Tensor | None, y: Targets) -> tuple[Tensor, Buffers]:
            """The weighted sum for one setting of the weights."""
            scores, after = score(params, x, y, buffers)
            if self.adversary is not None:
                # running statistics follow the real examples only
                frozen = {name: leaf.detach() for name, leaf in params.items()}
                slope = grad(lambda x: -score(frozen, x, y, {n: b.clone() for n, b in after.items()})[0].sum())(x)
                near = x + self.adversary * slope.sign()
                scores = 0.5 * (scores + score(params, near, y, {n: b.clone() for n, b in after.items()})[0])
            scores = scores if weights is None else scores * weights
            return (scores if self.shares is None else scores[self.shares[index].idle :]).sum(), after

        kind = self.model.device.type
        autocast = torch.autocast(kind, self.precision) if self.precision else nullcontext()
        with in_mode(self.model.network, train), autocast, self.as_shared(index):
            if self.members is None:
                return one(params, buffers, weights, y)
            # Parameters that are not Bayesian are the same for all members: they are neither stacked nor returned.
            fixed = {name: leaf for name, leaf in self.model.network.named_parameters() if name in buffers}
            shared = {name: leaf for name, leaf in buffers.items() if name in fixed}
            stacked = {name: leaf for name, leaf in buffers.items() if name not in fixed}

            def member(params: Params, stacked: Buffers, weights: Tensor | None, y: Targets) -> tuple[Tensor, Buffers]:
                """The weighted sum of one member, and its buffers without those that all members share."""
                value, after = one(params, {**shared, **stacked}, weights, y)
                return value, {name: after[name] for name in stacked}

            in_dims = (0, 0, None if weights is None else 0, None if self.targets is None else 0)
            value, after = vmap(member, in_dims=in_dims, randomness="different")(params, stacked, weights, y)
            return value, {**shared, **after}
