"""The state of a method that estimates the curvature: sums over the data so far, and what follows from them in the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import Tensor

from dubito.curvature.evidence import Evidence
from dubito.curvature.layout import Layout
from dubito.curvature.passes import Estimate, Passes, check_memory
from dubito.curvature.setup import Setup
from dubito.model import Target
from dubito.model.likelihoods import NOISE
from dubito.network.examples import Batch, Inputs
from dubito.tensors.covariances import Covariance
from dubito.tensors.processes import Processes
from dubito.tensors.shares import sharing
from dubito.tensors.tree import Params


@dataclass
class Accumulated:
    """Sums over examples: those of the curvature, the gradient, the log likelihood and the residuals.

    On several processes each adds up its own part, with what there was before in that of the first, until `sum_` is called.
    """

    sums: Params
    layout: list  # packed
    gradient: Params  # of the log likelihood; empty if not wanted
    seen: list[int]  # examples of each pass
    gradient_seen: int
    log_likelihood: Tensor  # [], as all that follows in float64
    errors: Tensor  # [G]
    counts: Tensor  # [G]
    part: int | None = field(default=None, metadata={"transient": True})  # the pass of which these are one process's sums

    @staticmethod
    def zeros(passes: Passes, setup: Setup, x: Inputs, generator: torch.Generator, *, gradient: bool, what: str) -> Accumulated:
        """The state before any data; `x` is an example batch of inputs. What does not fit the memory is a `MemoryError`."""
        layout = setup.layout(x, anew=True)  # a flag of the network may have changed since it was last looked at
        check_memory(passes, setup, x, layout, what)
        zero = torch.zeros(setup.groups(layout), dtype=torch.float64, device=setup.model.device)
        slopes = {name: torch.zeros_like(leaf, dtype=setup.dtype) for name, leaf in setup.like.items()} if gradient else {}
        sums = passes.zeros(setup, layout, generator)
        return Accumulated(sums, layout.packed(), slopes, [0, 0], 0, zero[0].clone(), zero, zero.clone())

    def clear(self) -> None:
        """Begin anew: all sums but the gradient's are zero."""
        for leaf in (*self.sums.values(), self.log_likelihood, self.errors, self.counts):
            leaf.zero_()
        self.seen, self.part = [0, 0], None

    def sum_(self, passes: Passes, processes: Processes) -> None:
        """Add up the parts of all processes, once for all batches since the last time."""
        if self.part is None:
            return
        leaves, which, self.part = self._leaves(passes, self.part), self.part, None
        numbers = self.log_likelihood.new_tensor([self.seen[which], 0 if which else self.gradient_seen])
        processes.sum_([*leaves, numbers])
        self.seen[which] = int(numbers[0])
        self.gradient_seen = self.gradient_seen if which else int(numbers[1])

    def _begin(self, passes: Passes, which: int, processes: Processes) -> None:
        """Begin a part of one's own."""
        if self.part == which:
            return
        self.sum_(passes, processes)
        self.part = which
        if not processes.first:
            for leaf in self._leaves(passes, which):
                leaf.zero_()
            self.seen[which] = 0
            self.gradient_seen = self.gradient_seen if which else 0

    def _leaves(self, passes: Passes, which: int) -> list[Tensor]:
        """What pass `which` adds to."""
        sums = [leaf for key, leaf in self.sums.items() if passes.adds(key, which)]
        return sums if which else [*sums, *self.gradient.values(), self.log_likelihood, self.errors, self.counts]

    def add(
        self,
        target: Target,
        passes: Passes,
        setup: Setup,
        data: Iterable[Batch],
        which: int,
        generator: torch.Generator,
        *,
        gradient: bool,
    ) -> Tensor:
        """Add batches in pass `which`; returns their mean log likelihood, on all processes."""
        if target.shares is not None:
            self._begin(passes, which, target.processes)
        statistic, sums = passes.statistic(setup, self.sums, which)
        score, examples = torch.zeros((), dtype=torch.float64, device=setup.model.device), 0
        for batch, share in zip(data, target.shares or repeat(None), strict=False):
            labels = _labels(generator)
            if share is not None and share.idle:
                continue
            with nullcontext() if share is None else sharing(share):
                told = statistic.add(sums, batch, generator=labels, gradient=self.gradient if gradient else None)
            score, examples = score + told.log_likelihood, examples + told.examples
            self.seen[which] += told.examples
            self.gradient_seen += told.examples if gradient else 0
            if which == 0:
                self.log_likelihood = self.log_likelihood + told.log_likelihood
                self.errors, self.counts = self.errors + told.errors, self.counts + told.counts
        if target.shares is not None:
            target.processes.sum_([score])
            examples = target.examples(())
        return score / max(1, examples)

    # -- what follows

    def estimate(self, target: Target, params: Params, prior: Mapping[str, Tensor]) -> Estimate:
        """What makes a covariance of the sums, under prior precisions."""
        scale = (-2 * params[NOISE].double()).exp() if bool(self.counts.any()) else torch.ones_like(self.counts)
        return Estimate(
            Layout.unpacked(self.layout), self.seen, target.n_data, prior, scale, target.temperature, target.processes
        )

    def evidence(self, target: Target, params: Params, names: Sequence[str], prior: Params) -> Evidence:
        """What the evidence is made of, scaled from the examples seen to those there are."""
        factor = target.n_data / max(1, self.seen[0])
        earlier = target.model.prior.joint
        deviation = _deviation(target, params, names)
        return Evidence(
            self.log_likelihood * factor, self.errors * factor, self.counts * factor,
            {name: leaf.double() for name, leaf in prior.items()}, deviation, earlier and earlier.covariance,
        )  # fmt: skip

    def decrement(
        self, target: Target, params: Params, covariance: Covariance, prior: Params, stretch: float = 1.0
    ) -> tuple[float, float, float]:
        r""":math:`g^T \Sigma g` for the gradient g of the log joint, twice what the log joint can rise; the effective number of
        parameters :math:`\mathrm{tr}(H \Sigma)`; and what the first would be by the noise of a gradient from a part of the data."""
        factor, temperature = target.n_data / self.gradient_seen, target.temperature
        if (earlier := target.model.prior.joint) is not None:
            pull = earlier.gradient({name: params[name] for name in self.gradient})
        else:
            apart = _deviation(target, params, self.gradient)
            pull = {name: -prior[name].to(leaf) * leaf for name, leaf in apart.items()}
        slopes = {
            name: (leaf * (factor * stretch) + pull[name]).unsqueeze(0) / temperature for name, leaf in self.gradient.items()
        }
        away = covariance.product(slopes)
        rise = float(torch.stack([(slopes[n].double() * away[n].double()).sum() for n in slopes]).sum())
        if rise < 10:  # nothing to tell, and variances of a dense matrix are dear
            return rise, 1.0, 0.0
        held = sum(float((prior[n].to(v) * v).double().sum()) for n, v in covariance.variance().items()) / temperature
        effective = max(1.0, covariance.moving - held)
        return rise, effective, effective * max(0.0, factor - 1.0)


def _labels(generator: torch.Generator) -> torch.Generator:
    """A generator for the labels of one batch: how many numbers a process draws for it is of no consequence for the next."""
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return torch.Generator(generator.device).manual_seed(seed)


def _deviation(target: Target, params: Params, names: Iterable[str]) -> Params:
    """The weights less the prior's mean, which is zero where the prior names none."""
    mean = getattr(target.model.prior, "mean", {})
    return {name: params[name] - mean[name].to(params[name]) if name in mean else params[name] for name in names}
