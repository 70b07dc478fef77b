r"""A posterior as an `nn.Module` to deploy: no sampling, and nothing of the posterior left but tensors.

`as_module` joins the streamlined program of a posterior and the way from f to what is asked into one module. Means, variances and
second moments of the weights are its buffers, so `.to()`, `state_dict` and `load_state_dict` do what they always do, and everything in
its forward pass is a torch operation whose shape follows from that of x: `torch.compile(fullgraph=True)`, `torch.export` with any
number of examples, and ONNX take it as it is.

A set of samples, such as an ensemble, becomes its networks side by side, whose answers are averaged as `predict` does.

For a regression with Gaussian noise what comes out is exact given the moments of f. Elsewhere, as in a `LatentMixture`, the Gaussian
over f becomes deterministic nodes with its mean and covariance; the nodes are a buffer too. The root of a covariance is found by
elimination, written out, since ONNX knows neither eigenvectors nor Cholesky factors: the nodes then lie in other places than those of
`posterior.predict`, with the same moments, and probabilities differ by as much as a quadrature with so many nodes is off.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Any, TypedDict

import torch
from torch import Tensor, fx, nn

from dubito.curvature.capture import example_count
from dubito.curvature.layout import layout
from dubito.model.likelihoods import Likelihood, align, average, likelihood_params, quadrature
from dubito.network.examples import Inputs, arguments, outputs_last
from dubito.network.weights import copy_network
from dubito.posteriors import Point, Posterior, Samples
from dubito.posteriors.predict.adjoint import RULES, Means, refuse_scripted
from dubito.posteriors.predict.chain import find_chain, sweep
from dubito.posteriors.predict.linearized import Linearization
from dubito.posteriors.predict.streamlined import Moments, Streamlined, Weight
from dubito.posteriors.predict.streamlined.engine import covariance_of
from dubito.posteriors.predict.streamlined.moments import Output, mean_of
from dubito.posteriors.predict.streamlined.operations import Trace
from dubito.posteriors.predict.streamlined.rules import linear
from dubito.tensors import tree
from dubito.tensors.checks import one_of, require
from dubito.tensors.tree import Params

NODES = 128


class Prediction(TypedDict):
    """What a module gives for x, in the words of a `Predictive`, the noise inside.

    A plain dict of tensors: a class of our own would be asked for wherever an exported program is loaded.
    """

    mean: Tensor  # class probabilities, or the mean of a regression, [B, *D, C]
    total: Tensor  # uncertainty: entropies [B, *D] for classes, variances [B, *D, C] for numbers
    aleatoric: Tensor
    epistemic: Tensor
    f_mean: Tensor  # of the network's output, noise not included, [B, *D, C]
    f_cov: Tensor  # [B, *D, C], or [B, *D, C, C] where outputs move together


def as_module(
    posterior: Posterior, x: Inputs, *, how: str | None = None, rank: int | None = None, rule: str = "moments"
) -> fx.GraphModule:
    """The posterior's prediction as a module that is called as the network is and gives a `Prediction`; x is an example input.

    A set of samples (an ensemble, the draws of a sampler) or a point becomes as many networks, each with its weights, and a pass goes
    through all of them. Other posteriors become one pass of means and variances, `how="streamlined"` or `"adjoint"`.

    `rank` is as in `predict`: directions in which units move together, 0 none, -1 all; None picks. The `mean.*`, `var.*` and `second.*`
    (E[w^2]) in its `state_dict` have the network's names. `rule` is as in `predict`, too. `how="adjoint"` takes longer to make: its
    sweeps backwards become part of the graph, at the level of single torch operations, where buffers have no names, and where dtype and
    device are those of now.

    A network may decide by the values of its inputs (`if mask.all()`). Such decisions are those for the example x, and the module
    raises where other inputs ask for another (not in ONNX, which has no such checks). The network is told that it is being exported
    (`torch.compiler.is_compiling()`); many then have nothing to decide.

    >>> import dubito
    >>> model = dubito.Model(nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=0.1))
    >>> posterior = dubito.posteriors.Gaussian.diagonal(model, {"weight": torch.ones(1, 1)}, {"weight": torch.full((1, 1), 0.04)})
    >>> module = dubito.as_module(posterior, torch.zeros(1, 1))
    >>> p = module(torch.tensor([[2.0]]))
    >>> p["mean"], p["epistemic"], p["total"]                # 2^2 * 0.04, and the noise 0.1^2
    (tensor([[2.]]), tensor([[0.1600]]), tensor([[0.1700]]))
    >>> program = torch.export.export(module, (torch.zeros(2, 1),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    >>> program.module()(torch.full((5, 1), 2.0))["total"][4]
    tensor([0.1700])
    """
    if isinstance(posterior, Point):
        posterior = Samples(posterior.model, tree.repeat(posterior.params, 1), posterior.buffers)
    if isinstance(posterior, Samples):
        if how is not None or rank is not None or rule != "moments":
            raise ValueError("a module of samples runs each network as it is: leave out `how`, `rank` and `rule`")
        with torch.inference_mode(False), torch.no_grad():
            return _side_by_side(posterior, x)
    how = how or "streamlined"
    engine = getattr(posterior, "streamlined", None)
    if not isinstance(engine, Streamlined):
        raise ValueError(
            "a module is made of samples, or of a posterior whose means and variances go through the network in one pass, such as a "
            f"Gaussian; got a {type(posterior).__name__}. Of a mixture, make one of each member; of draws on disk, of posterior.load()"
        )
    if how not in ("streamlined", "adjoint"):
        raise ValueError(f"a module predicts in one pass, how='streamlined' or 'adjoint'; got {how!r}")
    if how == "adjoint" and rank is not None:
        raise ValueError("rank is for how='streamlined': the adjoint keeps all correlations")
    one_of(RULES, rule=rule)
    refuse_scripted(posterior.model)
    require(
        not posterior.model.coupled,
        "a module of one pass serves inputs of any number of rows, and the rows of this model are coupled: use posterior.predict",
    )
    taylor = rule == "taylor"
    scale = float(getattr(posterior, "variance_scale", 1.0))
    with torch.inference_mode(False), torch.no_grad():
        x = tree.apply_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, engine.prepare(x))
        found = _traced(engine, x)
        if not found.dynamic:
            raise ValueError(
                "the network computes differently for another number of examples, or decides by the values of each example, so no "
                "module serves all: use posterior.predict"
            )
        rank = engine.rank(found) if rank is None else rank
        f = engine.moments(x, rank=rank, taylor=taylor, path=found)
        readout = Readout(engine.model.likelihood, likelihood_params(engine.params), f.mean.shape[-1], scale).to(f.mean)
        return _swept(engine, found, x, readout, taylor) if how == "adjoint" else _joined(engine, found, x, readout, rank, taylor)


def _traced(engine: Streamlined, x: Inputs) -> Trace:
    """The trace that an export would take, if the network has one."""
    try:
        found = engine.trace(x, exported=True)
    except (ValueError, RuntimeError, TypeError):
        return engine.trace(x)
    return found if found.dynamic else engine.trace(x)


def _joined(engine: Streamlined, found: Trace, x: Inputs, readout: Readout, rank: int, taylor: bool) -> fx.GraphModule:
    """The program with its weights as buffers in the place of arguments, and the readout behind it."""
    if rank > 0:  # the signs by which directions are mixed
        torch.compiler.assume_constant_result(linear.mixing_signs)
    graph, root = fx.Graph(), nn.Module()
    root.add_module("readout", readout)
    inputs = [graph.placeholder(name) for name in _names(x)]
    given = zip(found.weights.values(), engine.given(found, taylor=taylor), strict=True)
    weights = [_weight(graph, root, name, weight) for name, weight in given]
    if found.checks is not None:
        means = [graph.call_function(mean_of, (weight,)) for weight in weights]
        _copied(found.checks, graph, root, [*inputs, *means])
    f = _copied(engine.lowered(found, rank=rank, taylor=taylor), graph, root, [*inputs, *weights])
    graph.output(graph.call_module("readout", (f,)))
    return fx.GraphModule(root, graph, "Streamlined")


def _copied(program: fx.GraphModule, graph: fx.Graph, root: nn.Module, given: list[fx.Node]) -> fx.Node | None:
    """What a program gives, as a part of the graph; its buffers are the root's."""
    values: dict[fx.Node, fx.Node] = {}
    *nodes, output = program.graph.nodes
    for node in nodes:
        if node.op == "placeholder":
            values[node] = given[len(values)]
        elif node.op == "get_attr":
            values[node] = _held(graph, root, node.target, program.get_buffer(node.target))
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return values.get(output.args[0])  # pyright: ignore[reportArgumentType]


def _names(x: Inputs) -> list[str]:
    """Of the arguments: as the network is called."""
    if isinstance(x, dict) and all(isinstance(leaf, Tensor) for leaf in x.values()):
        return list(x)
    count = len(list(tree.leaves(x)))
    return ["x"] if count == 1 else [f"x{i}" for i in range(count)]


def _weight(graph: fx.Graph, root: nn.Module, name: str, weight: Tensor | Weight) -> fx.Node:
    if isinstance(weight, Tensor):
        return _held(graph, root, f"mean.{name}", weight)
    parts: list[Any] = [_held(graph, root, f"{kind}.{name}", getattr(weight, kind)) for kind in ("mean", "var", "second")]
    block = weight.block
    if block is not None:
        items = [(field.name, getattr(block, field.name)) for field in fields(block)]
        held = {k: _held(graph, root, f"block.{name}.{k}", v) if isinstance(v, Tensor) else v for k, v in items}
        parts.append(graph.call_function(type(block), tuple(held.values())))
    return graph.call_function(Weight, tuple(parts))


def _held(graph: fx.Graph, root: nn.Module, name: str, tensor: Tensor) -> fx.Node:
    """A buffer of the root, and the node that reads it."""
    *path, leaf = name.split(".")
    place = root
    for part in path:
        if part not in place._modules:
            place.add_module(part, nn.Module())
        place = place.get_submodule(part)
    place.register_buffer(leaf, tensor.detach().clone())
    return graph.create_node("get_attr", name)


class Readout(nn.Module):
    """From the moments of f to what is asked."""

    def __init__(self, likelihood: Likelihood, learned: Params, width: int, scale: float):
        super().__init__()
        self.likelihood, self.scale, self.names = likelihood, scale, tuple(learned)
        for i, leaf in enumerate(learned.values()):
            self.register_buffer(f"learned{i}", leaf.detach().clone())
        zeros = torch.zeros(1, width)
        if likelihood.noise_variance(zeros, zeros, {name: leaf.detach().cpu() for name, leaf in learned.items()}) is None:
            points, weights = quadrature(NODES, torch.empty(width, dtype=torch.float64))
            self.register_buffer("nodes", points.clone())
            self.register_buffer("weights", weights)

    def forward(self, f: Any) -> Prediction:
        """The prediction that follows from an output, or from its moments."""
        f = Moments(f, torch.zeros_like(f)) if isinstance(f, Tensor) else f
        mean, cov = f.mean, covariance_of(f) * self.scale
        if mean.dtype.itemsize < 4:
            mean, cov = mean.float(), cov.float()
        kind = mean.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            return self.read(mean, cov)

    def read(self, mean: Tensor, cov: Tensor) -> Prediction:
        """In the precision of f, which probabilities and entropies need."""
        learned = {name: self.get_buffer(f"learned{i}").to(mean) for i, name in enumerate(self.names)}
        variance = cov if cov.ndim == mean.ndim else cov.diagonal(dim1=-2, dim2=-1)
        if (aleatoric := self.likelihood.noise_variance(mean, variance, learned)) is not None:
            expected, epistemic = self.likelihood.mean(mean, learned), variance[..., : aleatoric.shape[-1]]
            return _prediction(expected, aleatoric + epistemic, aleatoric, epistemic, mean, cov)
        unit, weights = self.get_buffer("nodes").to(mean), self.get_buffer("weights").to(mean)
        if cov.ndim == mean.ndim:
            spread = cov.clamp_min(0).sqrt() * unit.reshape(-1, *[1] * (mean.ndim - 1), unit.shape[-1])
        else:
            spread = torch.einsum("...cr,nr->n...c", elimination(cov), unit)
        points = mean + spread  # [n, B, *D, C]
        expected = average(self.likelihood.mean(points, learned), weights)
        expected = expected.clamp(0, 1) if self.likelihood.discrete else expected
        split = self.likelihood.uncertainty(points, weights, learned)
        return _prediction(expected, split.total, split.aleatoric, split.epistemic, mean, cov)


def _side_by_side(posterior: Samples, x: Inputs) -> fx.GraphModule:
    """The network once for every draw of the weights, and the average of what they say."""
    args, kwargs = arguments(x)
    if not all(isinstance(leaf, Tensor) for leaf in (*args, *kwargs.values())):
        raise ValueError("a module of samples takes tensors as inputs, by position or by name; nested inputs cannot be exported")
    graph, root, members = fx.Graph(), nn.Module(), nn.ModuleList()
    root.add_module("members", members)
    root.add_module("readout", Average(posterior))
    inputs = {name: graph.placeholder(name) for name in _names(x)}
    given: dict[str, Any] = {"kwargs": inputs} if kwargs else {"args": tuple(inputs.values())}
    answers = []
    for i in range(len(posterior)):
        weights = {**posterior.buffers, **tree.select({**posterior.params, **posterior.own_buffers}, i)}
        member = copy_network(posterior.model.network).eval().requires_grad_(False)
        for name, leaf in (*member.named_parameters(), *member.named_buffers()):
            if name in weights:
                leaf.copy_(weights[name])
        members.append(member)
        answers.append(graph.call_module(f"members.{i}", **given))
    graph.output(graph.call_module("readout", (answers,)))
    return fx.GraphModule(root, graph, "Samples")


class Average(nn.Module):
    """From what the members of a set of samples say to what is asked."""

    def __init__(self, posterior: Samples):
        super().__init__()
        learned, model = likelihood_params(posterior.params), posterior.model
        self.output, self.likelihood, self.names = model.output, model.likelihood, tuple(learned)
        for i, leaf in enumerate(learned.values()):
            self.register_buffer(f"learned{i}", leaf.detach().clone())
        # in float64, whatever the network: a third in float32 is wrong by a hundred millionth
        equal = torch.full((len(posterior),), 1 / len(posterior), dtype=torch.float64, device=model.device)
        self.register_buffer("weights", equal if posterior.weights is None else posterior.weights.clone())

    def forward(self, answers: list[Any]) -> Prediction:
        """The prediction that follows from the outputs of all networks."""
        points = torch.stack([outputs_last(self.output(answer), self.likelihood.dim) for answer in answers])  # [S, B, *D, C]
        points = tree.full_precision(points)
        weights = self.get_buffer("weights").to(points)
        learned = align({name: self.get_buffer(f"learned{i}").to(points) for i, name in enumerate(self.names)}, points)
        mean, split = (
            average(self.likelihood.mean(points, learned), weights),
            self.likelihood.uncertainty(points, weights, learned),
        )
        f_mean = average(points, weights)
        f_cov = average((points - f_mean).square(), weights)
        return _prediction(mean, split.total, split.aleatoric, split.epistemic, f_mean, f_cov)


def _prediction(mean: Tensor, total: Tensor, aleatoric: Tensor, epistemic: Tensor, f_mean: Tensor, f_cov: Tensor) -> Prediction:
    """Copies where one tensor would come out twice, which an exported program may not."""
    return {
        "mean": mean.clone() if mean is f_mean else mean,
        "total": total,
        "aleatoric": aleatoric.clone(),
        "epistemic": epistemic.clone(),
        "f_mean": f_mean,
        "f_cov": f_cov,
    }


def elimination(cov: Tensor) -> Tensor:
    """A root [..., C, C] of covariances, which may be singular: Cholesky's, written out.

    >>> elimination(torch.tensor([[4.0, 2.0], [2.0, 1.0]]))
    tensor([[2., 0.],
            [1., 0.]])
    """
    columns, floor = [], 4 * torch.finfo(cov.dtype).eps * cov.diagonal(dim1=-2, dim2=-1) + torch.finfo(cov.dtype).tiny
    for k in range(cov.shape[-1]):
        pivot, least = cov[..., k, k], floor[..., k]
        slope = torch.where(pivot > least, torch.maximum(pivot, least).rsqrt(), 0.0)  # what is known already adds no column
        column = cov[..., k] * slope.unsqueeze(-1)
        cov = cov - column.unsqueeze(-1) * column.unsqueeze(-2)
        columns.append(column)
    return torch.stack(columns, -1)


def _swept(engine: Streamlined, found: Trace, x: Inputs, readout: Readout, taylor: bool) -> fx.GraphModule:
    """The adjoint, forwards and backwards, as one graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    base, names = engine.model, tuple(engine.covariance.shapes)
    short = None if taylor else find_chain(engine, found)
    means = Means(
        base.network, base.likelihood, base.prior, base.only, split=base.split, output=base.output, engine=engine, path=found,
        taylor=taylor,
    )  # fmt: skip
    # a number of examples that is no other size: those that are the same would be taken to be one symbol
    sizes = {size for leaf in tree.leaves(x) for size in leaf.shape[1:]}
    count, old = next(n for n in range(11, 99, 2) if n not in sizes), example_count(x)

    def repeated(leaf: Tensor, n: int) -> Tensor:
        """Examples repeated until there are n of them."""
        return leaf[torch.arange(n, device=leaf.device) % old] if leaf.shape[:1] == (old,) else leaf

    def moments(inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the output."""
        if short is not None:
            return sweep(engine, found, short, inputs, None)
        run = Linearization(means, engine.params, engine.buffers, engine.covariance, inputs, whole, names)
        return run.f, run.covariances()[0]

    def predict(*leaves: Tensor) -> Prediction:
        """The prediction for x."""
        given = iter(leaves)
        if found.checks is not None:
            found.checks(*leaves, *(mean_of(engine.weights[name]) for name in found.weights.values()))
        mean, cov = moments(tree.apply_leaves(lambda _: next(given), x))
        return readout(Moments(mean, cov) if cov.ndim == mean.ndim else Output(mean, cov))

    some = tree.apply_leaves(lambda leaf: repeated(leaf, count), x)
    whole = layout(means, engine.params, some, engine.buffers, names)
    predict(*tree.leaves(some))  # so that what is cached on the way is no symbol
    try:
        module = make_fx(predict, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*tree.leaves(some))
        for node, name in zip(module.graph.nodes, _names(x), strict=False):
            node.target = name
        module.recompile()
        for n in (1, count - 4):  # the same function for other numbers of examples?
            fewer = [repeated(leaf, n) for leaf in tree.leaves(x)]
            torch.testing.assert_close(module(*fewer), predict(*fewer), rtol=1e-3, atol=1e-4)
    except Exception as error:
        raise ValueError(
            "the adjoint of this network cannot be written as one graph for any number of examples (an embedding and a dense "
            "covariance stand in the way, for example): use how='streamlined', or posterior.predict(x, how='adjoint')"
        ) from error
    return module
