"""What is tried with every network of the zoo: each cell passes, is refused in a sentence, or raises."""

from __future__ import annotations

import dis
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Categorical
from dubito.inference.method import Method
from dubito.inference.registry import METHODS as REGISTERED
from dubito.network.examples import arguments, outputs_last
from dubito.posteriors import Gaussian, Posterior
from dubito.tensors import tree
from dubito.tensors.randomness import generator
from dubito.testing import check_same, snapshot
from zoo.networks import Entry, Problem

OK, DRAWS, LOOKS, SPREAD = "ok", 400, 40, 0.03  # rows of a Jacobian that are looked at; deviations of weights, of their own scale


def same_view(x: Any, _: torch.Generator) -> Any:
    """No augmentation."""
    return x


METHODS: dict[str, Method] = {
    "map": dubito.MAP(epochs=2),
    "mc_dropout": dubito.MCDropout(epochs=2, at="", rate=0.1, draws=4),
    "ensemble": dubito.Ensemble(dubito.MAP(epochs=2), 2),
    "laplace": dubito.Laplace(check=False),
    "online_laplace": dubito.OnlineLaplace(epochs=3, every=1),
    "neural_linear": dubito.NeuralLinear(),
    "swag": dubito.SWAG(epochs=4, draws=3),
    "variational": dubito.Variational(epochs=2),
    "ivon": dubito.IVON(epochs=2),
    "pi_model": dubito.PiModel(dubito.MAP(epochs=1), augment=same_view),
    "temporal_ensembling": dubito.TemporalEnsembling(dubito.MAP(epochs=1), augment=same_view),
    "mean_teacher": dubito.MeanTeacher(dubito.MAP(epochs=1)),
    "sgld": dubito.SGLD(burn_in=1, draws=3),
    "sghmc": dubito.SGHMC(burn_in=1, draws=3),
    "metropolis": dubito.Metropolis(chains=2, draws=2, burn_in=1),
    "ula": dubito.ULA(1e-4, chains=2, draws=2, burn_in=1),
    "mala": dubito.MALA(1e-4, chains=2, draws=2, burn_in=1),
    "hmc": dubito.HMC(1e-3, chains=2, draws=2, burn_in=1, path_length=3e-3),
    "nuts": dubito.NUTS(1e-3, chains=2, draws=2, burn_in=1, max_depth=2),
    "mclmc": dubito.MCLMC(chains=2, draws=2, burn_in=1),
    "mams": dubito.MAMS(1e-3, chains=2, draws=2, burn_in=1, path_length=3e-3),
}
assert METHODS.keys() == REGISTERED.keys(), "every registered method is tried"
STRUCTURES: dict[str, dubito.Laplace] = {
    "diagonal": dubito.Laplace("diagonal", check=False),
    "kronecker": dubito.Laplace(check=False),
    "dense": dubito.Laplace("dense", check=False),
    "lowrank": dubito.Laplace("lowrank", rank=5, check=False),
    "last layer": dubito.Laplace(subset="last_layer", check=False),
}
MOST_DENSE = 1500  # weights of a dense covariance


def cell(entry: Entry, column: str) -> str:
    """What one cell gives: `OK`, or the sentence by which it is refused. What is wrong raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            COLUMNS[column](entry)
        except (ValueError, TypeError) as error:
            if not refused(error):
                raise
            return " ".join(str(error).split())
    return OK


def refused(error: Exception) -> bool:
    """Whether dubito raised an error itself, rather than something that it called."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    code = place.tb_frame.f_code
    return "/dubito/" in code.co_filename and code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]


# Methods


def check_method(name: str) -> Callable[[Entry], None]:
    """Fit, predict, judge, save and load; nothing of the user's changes."""

    def check(entry: Entry) -> None:
        problem = entry.problem()
        if name == "neural_linear" and problem.model.likelihood.discrete:
            raise Skip("it is for numbers")
        before = snapshot(problem.model)
        posterior = fit(problem, METHODS[name])
        p = posterior.predict(problem.x)
        assert p.mean.isfinite().all()
        assert (p.uncertainty.total >= p.uncertainty.aleatoric - 1e-5).all()
        dubito.judge(posterior, [(problem.x, problem.y)], progress=False)
        same = saved_and_loaded(posterior)
        torch.testing.assert_close(same.predict(problem.x).mean, p.mean)
        check_same(before, snapshot(problem.model))
        if posterior.center is not None:
            params, buffers = posterior.center
            point = posterior.predict(problem.x, how="point")
            expected = outputs_of(problem, {**buffers, **params})
            torch.testing.assert_close(point.means[0], expected, rtol=1e-4, atol=1e-5)

    return check


def fit(problem: Problem, method: Method) -> Posterior:
    """Without a word."""
    return dubito.fit(problem.model, method, (problem.x, problem.y), batch_size=len(problem.y), seed=0, progress=False)


def saved_and_loaded(posterior: Posterior) -> Posterior:
    """By way of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/posterior.safetensors"
        dubito.save(posterior, path)
        return dubito.load(path, posterior.model)


# Numbers


def precise(entry: Entry) -> Problem:
    """The problem in float64, where the network runs in it."""
    problem = entry.problem()
    if not entry.double:
        return problem
    problem.model.network.double()
    another = problem.another
    x = tree.apply_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, problem.x)
    y = problem.y.double() if problem.y.is_floating_point() else problem.y
    return Problem(problem.model, x, y, lambda: another().double())


def tolerance(like: Tensor) -> dict[str, float]:
    """How exact numbers must be, by their precision."""
    scale = float(like.abs().max())
    return {"rtol": 1e-6, "atol": 1e-9 * scale} if like.dtype == torch.float64 else {"rtol": 2e-3, "atol": 1e-4 * scale}


def outputs_of(problem: Problem, weights: dict[str, Tensor]) -> Tensor:
    """Of another network of the kind whose weights are these, the classes last."""
    network = problem.another()
    with torch.no_grad():
        for name, leaf in (*network.named_parameters(), *network.named_buffers()):
            if name in weights:
                leaf.copy_(weights[name])
        return call(problem, network)


def call(problem: Problem, network: nn.Module) -> Tensor:
    """The outputs of a network, as its user would call it."""
    args, kwargs = arguments(problem.x)
    return outputs_last(problem.model.output(network(*args, **kwargs)), problem.model.likelihood.dim)


def by_hand(problem: Problem) -> Gaussian:
    """Independent weights around those of the network."""
    mean = {name: leaf for name, leaf in problem.model.parameters().items() if ":" not in name}
    variance = {
        name: (SPREAD * leaf.std(correction=0)).square().clamp_min(SPREAD**4).expand(leaf.shape).clone()
        for name, leaf in mean.items()
    }
    return Gaussian.diagonal(problem.model, problem.model.parameters(problem.y), variance)


def gradients(problem: Problem, posterior: Gaussian) -> tuple[list[int], Iterator[dict[str, Tensor]]]:
    """Some outputs by their place in the flat output, and the gradient of each in the weights, by torch's autograd alone."""
    network = problem.another()
    for p in network.parameters():
        p.requires_grad_(True)
    leaves = dict(network.named_parameters())
    with torch.no_grad():
        for name, leaf in leaves.items():
            if name in posterior.params:
                leaf.copy_(posterior.params[name])
    f = call(problem, network).flatten()
    places = torch.randperm(len(f), generator=torch.Generator().manual_seed(1))[:LOOKS].tolist()
    names = list(posterior.covariance.shapes)

    def each() -> Iterator[dict[str, Tensor]]:
        for i in places:
            found = torch.autograd.grad(f[i], [leaves[name] for name in names], retain_graph=True, allow_unused=True)
            yield {
                name: torch.zeros_like(leaves[name]) if leaf is None else leaf for name, leaf in zip(names, found, strict=True)
            }

    return places, each()


def check_variances(problem: Problem, posterior: Gaussian) -> None:
    """The variances of the linearized outputs are J C J^T, written out."""
    p = posterior.predict(problem.x, how="linearized")
    assert "draws" not in p.how, p.how
    variances = p.f_var.flatten()
    places, each = gradients(problem, posterior)
    expected = torch.stack(
        [sum((g[n] * v[0]).sum() for n, v in posterior.covariance.product(tree.repeat(g, 1)).items()) for g in each]  # pyright: ignore
    )
    torch.testing.assert_close(variances[places], expected, **tolerance(expected))


def check_linearized(entry: Entry) -> None:
    """Of a Gaussian by hand."""
    problem = precise(entry)
    check_variances(problem, by_hand(problem))


def check_structure(name: str) -> Callable[[Entry], None]:
    """A Laplace approximation of one structure: its curvature, where that is quick to write out, and its predictions."""

    def check(entry: Entry) -> None:
        problem = precise(entry)
        weights = sum(leaf.numel() for leaf in problem.model.parameters().values())
        if name == "dense" and weights > MOST_DENSE:
            raise Skip(f"{weights:,} weights are too many for a dense covariance")
        posterior = fit(problem, STRUCTURES[name])
        assert isinstance(posterior, Gaussian)
        check_variances(problem, posterior)
        if name == "diagonal" and type(problem.model.likelihood) is Categorical and problem.y.ndim == 1:
            check_diagonal(problem, posterior)

    return check


def check_diagonal(problem: Problem, posterior: Gaussian) -> None:
    """The generalized Gauss-Newton matrix of class probabilities, by its definition."""
    network = problem.another()
    for p in network.parameters():
        p.requires_grad_(True)
    leaves = dict(network.named_parameters())
    f = call(problem, network)
    names = list(posterior.covariance.shapes)
    diagonal = {name: torch.zeros_like(leaves[name]) for name in names}
    for row in f:
        rows = [torch.autograd.grad(k, [leaves[n] for n in names], retain_graph=True, allow_unused=True) for k in row]
        probabilities = row.detach().softmax(0)
        for place, name in enumerate(names):
            if rows[0][place] is None:
                continue
            jacobian = torch.stack([each[place] for each in rows])
            inner = torch.tensordot(probabilities, jacobian, 1)
            diagonal[name] += torch.tensordot(probabilities, (jacobian - inner) ** 2, 1)
    for name, leaf in posterior.covariance.variance().items():
        prior = posterior.prior_precision[name]
        expected = 1 / (diagonal[name] + prior).expand(leaf.shape)
        torch.testing.assert_close(leaf, expected, **tolerance(leaf))


def check_sampled(entry: Entry) -> None:
    """Draws are the outputs of the network with the weights that are drawn."""
    problem = precise(entry)
    posterior = by_hand(problem)
    p = posterior.predict(problem.x, how="sampled", draws=3, seed=5)
    drawn = posterior.sample(3, generator("cpu", 5, "weights"))
    expected = torch.stack([outputs_of(problem, tree.select(drawn, i)) for i in range(3)])
    torch.testing.assert_close(p.means, expected, **tolerance(expected))


def check_one_pass(how: str, tolerance: float) -> Callable[[Entry], None]:
    """Variances are those of many draws, on average over the outputs."""

    def check(entry: Entry) -> None:
        problem = entry.problem()
        posterior = by_hand(problem)
        p = posterior.predict(problem.x, how=how)
        q = posterior.predict(problem.x, how="sampled", draws=DRAWS)
        ratio = float(p.f_var.mean() / q.f_var.mean())
        assert 1 / tolerance < ratio < tolerance, f"variances are {ratio:.2f} of those of draws"
        drawn = re.search(r"(\d+) draws", p.how)  # of what has too many outputs for a sweep each
        share = 1 / DRAWS + (1 / int(drawn[1]) if drawn else 0)
        off = (p.f_mean - q.f_mean).abs() / (q.f_var * share).sqrt().clamp_min(1e-6)
        assert float(off.mean()) < 2.5, f"means are {off.mean():.1f} standard errors from those of draws"

    return check


def check_module(entry: Entry) -> None:
    """`as_module` says what `predict` says."""
    problem = entry.problem()
    posterior = by_hand(problem)
    module = dubito.as_module(posterior, problem.x)
    found = called(module, problem.x)
    p = posterior.predict(problem.x, how="streamlined")
    torch.testing.assert_close(found["f_mean"], p.f_mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["mean"], p.mean, rtol=2e-2, atol=5e-3)


def check_onnx(entry: Entry) -> None:
    """The module in ONNX says the same, for as many examples."""
    import onnxruntime

    problem = entry.problem()
    module = dubito.as_module(by_hand(problem), problem.x)
    expected = called(module, problem.x)
    args, kwargs = arguments(problem.x)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/module.onnx"
        torch.onnx.export(module, args, path, kwargs=kwargs or None, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path)
        given = {slot.name: leaf.numpy() for slot, leaf in zip(session.get_inputs(), (*args, *kwargs.values()), strict=True)}
        found = dict(zip((slot.name for slot in session.get_outputs()), session.run(None, given), strict=True))
    by_shape = [value for value in found.values() if value.shape == tuple(expected["f_mean"].shape)]
    assert any(torch.allclose(torch.from_numpy(value), expected["f_mean"], rtol=1e-3, atol=1e-4) for value in by_shape)


def called(module: nn.Module, x: Any) -> dict[str, Tensor]:
    """The answers of a module."""
    args, kwargs = arguments(x)
    with torch.no_grad():
        return module(*args, **kwargs)


class Skip(Exception):
    """What is too large to be tried here."""


COLUMNS: dict[str, Callable[[Entry], None]] = {
    **{name: check_method(name) for name in METHODS},
    **{f"Laplace, {name}": check_structure(name) for name in STRUCTURES},
    "linearized": check_linearized,
    "sampled": check_sampled,
    "streamlined": check_one_pass("streamlined", 2.0),
    "adjoint": check_one_pass("adjoint", 1.3),
    "as_module": check_module,
    "ONNX": check_onnx,
}
