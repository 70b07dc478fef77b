r"""One pass through the network with means and variances in the place of numbers.

The network is traced once (`trace`), its operations are replaced by rules (`program`), and from then on a prediction costs two or three
matrix products where the plain network has one. `forward` carries variances only, or covariances as well: `rank` directions
in which units move together, or all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from dubito.curvature.capture import example_count
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Inputs, check_outputs
from dubito.posteriors.predict.dropout import Dropout
from dubito.posteriors.predict.sampled import read_examples
from dubito.posteriors.predict.streamlined.moments import Moments, Output, Weight, block_of, is_weight, mean_of
from dubito.posteriors.predict.streamlined.operations import Trace
from dubito.posteriors.predict.streamlined.program import WIDE, OtherWay, lower
from dubito.posteriors.predict.streamlined.prune import pool_first, prune
from dubito.posteriors.predict.streamlined.trace import DECIDES, trace
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance
from dubito.tensors.tree import Buffers, Params

KEPT = 32  # traces: of inputs of several shapes, and of several decisions by their values
NARROW = 512  # units of a network, all operations together, up to which all directions are carried


class Streamlined:
    """The streamlined network of a posterior: traces and programs, made once for each shape of input, and moments of the weights."""

    def __init__(
        self,
        model: Model,
        params: Params,
        buffers: Buffers,
        covariance: Covariance | None = None,
        *,
        dropout: Dropout | None = None,
    ):
        covariance = Blocks(()) if covariance is None else covariance
        self.model, self.params, self.buffers, self.covariance = model, params, buffers, covariance
        self.dropout = dropout
        self.traces: list[tuple[tuple, Trace]] = []  # with the kinds of input they are for; the latest first
        self.programs: dict[tuple, fx.GraphModule] = {}
        self.squares: dict[str, Tensor] = {}
        self.chains: dict[Trace, Any] = {}  # of `predict.chain`
        self.blocks = covariance.independent_blocks
        self.correlated = {name for block in self.blocks if not block.independent for name in block.shapes}
        kernels = {block.layer[0]: block.noise(*block.layer) for block in self.blocks if block.layer is not None}
        fixed = {**buffers, **{name: leaf for name, leaf in params.items() if ":" not in name}}
        variances = {name: leaf for name, leaf in covariance.variance().items() if ":" not in name}
        self.random = tuple(variances)
        self.weights: dict[str, Tensor | Weight] = {**fixed}
        for name, var in variances.items():
            self.weights[name] = Weight.of(fixed[name], var.to(fixed[name].dtype), kernels.get(name))

    def prepare(self, x: Inputs) -> Inputs:
        """x as tensors of the network's type, on its device."""
        return read_examples(self.model, x, self.params, self.buffers)

    def trace(self, x: Inputs, *, exported: bool = False) -> Trace:
        """The trace of the network for inputs like x, by whose values it decides as it did; made once.

        `exported`: the network is asked to do without shortcuts for some inputs, so that the trace is for more of them."""
        first = int(not self.model.coupled)  # of the axes whose sizes a trace is for
        kind: tuple = tuple((tuple(leaf.shape[first:]), leaf.dtype) for leaf in tree.leaves(x))
        kind = ("exported", *kind) if exported else kind
        alone = (example_count(x), kind)
        for place, (known, made) in enumerate(self.traces):
            if known in (kind, alone) and self._decides_alike(made, x):
                self.traces.insert(0, self.traces.pop(place))
                return made
        plain = self._plain()
        with torch.inference_mode(False):
            params = {name: plain[name] for name in self.params if ":" not in name}
            buffers = {name: plain[name] for name in self.buffers}
            made = trace(self.model, params, x, buffers, self.dropout, self.random, exported)
            made = pool_first(prune(made))
        self._keep(kind if made.dynamic else alone, made)
        for step in made.steps:
            if step.name == "linear":
                self._pair(made.weight_name(step.argument(1, "weight")), made.weight_name(step.argument(2, "bias")))
        return made

    def _plain(self) -> dict[str, Tensor]:
        return {name: mean_of(weight) for name, weight in self.weights.items()}

    def _decides_alike(self, made: Trace, x: Inputs) -> bool:
        """Whether the network decides by the values of x as it did in the trace."""
        if made.checks is None:
            return True
        plain = self._plain()
        try:
            with torch.no_grad():
                made.checks(*tree.leaves(x), *(plain[name] for name in made.weights.values()))
        except OtherWay:
            return False
        return True

    def _keep(self, kind: tuple, made: Trace) -> None:
        """Keep a trace, and forget those that were not used for longest."""
        self.traces.insert(0, (kind, made))
        for _, old in self.traces[KEPT:]:
            self.programs = {key: program for key, program in self.programs.items() if key[0] is not old}
            self.chains.pop(old, None)
        del self.traces[KEPT:]

    def _pair(self, name: str | None, bias: str | None) -> None:
        """Give a layer's matrix the noise that it makes together with its bias, and a bias apart from it its own."""
        weight, shift = self.weights.get(name or ""), self.weights.get(bias or "")
        if name is not None and is_weight(weight) and weight.block is None:
            block = self._block(name)
            weight = weight._replace(block=block.noise(name, bias if bias in block.shapes else None))
            self.weights[name] = weight
        noise = block_of(weight)
        inside = noise is not None and noise.biased
        if bias is not None and bias in self.correlated and is_weight(shift) and not inside and shift.mean.ndim == 1:
            self.weights[bias] = shift._replace(block=self._block(bias).shift(bias))

    def _block(self, name: str) -> Covariance:
        return next(block for block in self.blocks if name in block.shapes)

    def _neglected(self, trace: Trace, rank: int) -> list[str]:
        """Dependencies that a forward pass leaves out, in words; `adjoint` keeps them."""
        rows = ["rows alike" if rank else "rows apart"] * self.model.coupled
        uses = Counter(trace.weights.get(slot) for step in trace.steps for slot in step.inputs)
        again = any(uses[name] > 1 for name in self.random)
        wide = (block for block in self.blocks if not block.independent)
        across = any(len({name.rpartition(".")[0] for name in block.shapes}) > 1 for block in wide)
        return rows + ["uses of a weight apart"] * again + ["layers apart"] * across

    def prefix(self, trace: Trace, slot: int, x: Inputs) -> Tensor:
        """The value of a slot that nothing random comes before."""
        leaves = list(tree.leaves(x))
        if slot in trace.inputs:
            return leaves[trace.inputs.index(slot)]
        key = (trace, slot)
        if key not in self.programs:
            self.programs[key] = lower(replace(trace, output=slot), ())
        return self.programs[key](*leaves, *(mean_of(self.weights[name]) for name in trace.weights.values()))

    def independent(self, name: str) -> bool:
        """Whether the weights of a leaf are certain, or independent of each other and of all others."""
        return name not in self.correlated

    def square(self, name: str) -> Tensor:
        """The squared mean of a weight, formed once."""
        if name not in self.squares:
            self.squares[name] = mean_of(self.weights[name]).square()
        return self.squares[name]

    def program(
        self, x: Inputs, *, adjoint: bool = False, rank: int = 0, noisy: bool = False, taylor: bool = False, fallback: int = 0
    ) -> fx.GraphModule:
        """The program for inputs like x; made once. Operations without a rule are drawn `fallback` times, if that is not 0."""
        return self.lowered(self.trace(x), adjoint=adjoint, rank=rank, noisy=noisy, taylor=taylor, fallback=fallback)

    def lowered(
        self,
        trace: Trace,
        *,
        adjoint: bool = False,
        rank: int = 0,
        noisy: bool = False,
        taylor: bool = False,
        fallback: int = 0,
    ) -> fx.GraphModule:
        """The program of a trace, see `program`."""
        key = (trace, adjoint, rank, noisy, taylor, fallback)
        if key not in self.programs:
            options = {"adjoint": adjoint, "rank": rank, "noisy": noisy, "taylor": taylor, "fallback": fallback}
            self.programs[key] = lower(trace, self.random, square=self.square, **options)
        return self.programs[key]

    def given(
        self, trace: Trace, *, taylor: bool = False, weights: Mapping[str, Tensor | Weight] | None = None
    ) -> list[Tensor | Weight]:
        """What a program takes after the inputs: `weights`, or else the engine's own; to first order E[w^2] is the mean's square."""
        new, given = weights or {}, []
        for name in trace.weights.values():
            weight = new.get(name, self.weights[name])
            if taylor and is_weight(weight):
                weight = weight._replace(second=weight.mean.square() if name in new else self.square(name))
            given.append(weight)
        return given

    def refuse_decisions(self, trace: Trace) -> None:
        """Raise where the network decides by the first of its inputs, which is uncertain."""
        for guard in trace.guards:
            if trace.inputs[0] in trace.behind({guard.slot}):
                raise ValueError(DECIDES.format(guard.where or "the network"))

    def moments(
        self,
        x: Inputs,
        *,
        rank: int = 0,
        x_var: Tensor | None = None,
        taylor: bool = False,
        fallback: int = 0,
        weights: Mapping[str, Tensor | Weight] | None = None,
        path: Trace | None = None,
    ) -> Moments | Output:
        """Mean [B, *D, C] of f with its variances or, after an output layer, covariances; `x_var` are variances of the input.

        `weights`, such as `Weight.of(mean, var)` with gradients, stand in the places of the engine's own: to train through it. `path`:
        a trace that is known to be for x.
        """
        trace = self.trace(x) if path is None else path
        program = self.lowered(trace, rank=rank, noisy=x_var is not None, taylor=taylor, fallback=fallback)
        leaves: list[Any] = list(tree.leaves(x))
        if x_var is not None:
            self.refuse_decisions(trace)
            leaves[0] = Moments(leaves[0], x_var)
        f = program(*leaves, *self.given(trace, taylor=taylor, weights=weights))
        return Moments(f, torch.zeros_like(f)) if isinstance(f, Tensor) else f

    def rank(self, trace: Trace) -> int:
        """All directions where the network is narrow, none where it is wide."""
        units = sum(math.prod(trace.shapes[step.result][1:]) for step in trace.steps if step.result is not None)
        return -1 if units <= NARROW else 0

    def predict(
        self, x: Inputs, *, rank: int | None = None, x_var: Tensor | None = None, taylor: bool = False, fallback: int = 0
    ) -> LatentMixture:
        """The predictive at x."""
        x = self.prepare(x)
        with torch.no_grad():
            trace = self.trace(x)
            rank = self.rank(trace) if rank is None else rank
            if x_var is not None:
                x_var = x_var.to(x).expand_as(x)
            f = self.moments(x, rank=rank, x_var=x_var, taylor=taylor, fallback=fallback, path=trace)
            carried = {0: "variances only", -1: "full covariance"}.get(rank, f"{rank} directions")
            how = ", ".join([*(["streamlined", "Taylor"] if taylor else ["streamlined"]), carried, *self._neglected(trace, rank)])
            mean, cov = f.mean.unsqueeze(0), covariance_of(f).unsqueeze(0)
            check_outputs(x, mean, coupled=self.model.coupled)
            mean, cov = (tree.full_precision(t) for t in (mean, cov))
            return LatentMixture(self.model.likelihood, mean, cov, params=likelihood_params(self.params), how=how)


def covariance_of(f: Moments | Output) -> Tensor:
    """[B, *D, C], or [B, *D, C, C] where outputs move together."""
    if isinstance(f, Output):
        return f.cov
    if f.factor is None or f.mean.shape[-1] > WIDE:
        return f.var
    together = torch.einsum("r...c,r...d->...cd", f.factor, f.factor)
    return together + torch.diag_embed((f.var - together.diagonal(dim1=-2, dim2=-1)).clamp_min(0))
