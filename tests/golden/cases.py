"""The models, methods and data behind the golden files, written with public names only.

Every number here is a multiple of a power of two, so that data have the same bits, and therefore the same checksum, on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dubito
from dubito import (
    HMC,
    IVON,
    MALA,
    MAMS,
    MAP,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    ULA,
    Bernoulli,
    Categorical,
    Ensemble,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    Laplace,
    MCDropout,
    MeanTeacher,
    Metropolis,
    Model,
    MultiTask,
    NeuralLinear,
    OnlineLaplace,
    PiModel,
    TemporalEnsembling,
    Variational,
    families,
    posteriors,
    priors,
)
from dubito.augment import Compose, Noise

N = 24


def lattice(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that look random, between -2 and 2."""
    i = torch.arange(seed * 1009 + 1, seed * 1009 + 1 + torch.Size(shape).numel(), dtype=torch.int64)
    return (((i * i * 37 + i * 101) % 257 - 128).to(dtype) / 64).reshape(shape)


def fill(network: nn.Module) -> nn.Module:
    """Put fixed weights into a network."""
    with torch.no_grad():
        for k, p in enumerate(network.parameters()):
            p.copy_(lattice(*p.shape, seed=k + 3, dtype=p.dtype) / 4 + (1.0 if p.ndim == 1 and k == 2 else 0.0))
    return network


X, FRESH, UNLABELED = lattice(N, 3), lattice(5, 3, seed=1), lattice(30, 3, seed=2)
NUMBERS = torch.stack([X[:, 0] - X[:, 1] / 2, X[:, 2] / 2 + X[:, 0] / 4], 1) + lattice(N, 2, seed=4) / 16
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] + X[:, 2] > 0.5).long()
BINARY = (X[:, :2] > 0).float()
IMAGES = lattice(8, 1, 3, 3, seed=5)
SEQUENCES = lattice(8, 4, 2, seed=6)


def mlp(outputs: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    """An MLP with 4 hidden units."""
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype))


def deep(outputs: int = 2) -> nn.Module:
    """Three linear layers, so that there are six tensors to give priors to."""
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)))


def normed(outputs: int = 2) -> nn.Module:
    """An MLP with BatchNorm, whose buffers move."""
    return fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, outputs)))


def dropping(outputs: int = 2) -> nn.Module:
    """An MLP with a dropout layer of its own."""
    return fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.25), nn.Linear(4, outputs)))


def convolution(outputs: int = 2) -> nn.Module:
    """Outputs for every pixel, along the second axis."""
    return fill(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, outputs, 1)))


class Recurrent(nn.Module):
    """The last output of an LSTM."""

    def __init__(self, outputs: int = 2):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def recurrent(outputs: int = 2) -> nn.Module:
    """An LSTM with fixed weights."""
    return fill(Recurrent(outputs))


# Posteriors, saved by `dubito.save`: name -> (model, inputs to predict at, targets there)


class Saved(NamedTuple):
    """A posterior in a file: the model it belongs to and where to compare its predictions."""

    model: Callable[[], Model]
    x: Tensor = FRESH
    y: Any = NUMBERS[:5]
    make: Callable[[Model], Any] | None = None


def fitted(method: Any, x: Any = X, y: Any = NUMBERS, **options: Any) -> Callable[[Model], Any]:
    """A function that fits a model to the data of the golden files."""
    return lambda model: dubito.fit(model, method, (x, y), batch_size=8, progress=False, **options)


def after_map(method: Any, x: Any = X, y: Any = NUMBERS, **options: Any) -> Callable[[Model], Any]:
    """The same for methods that expect a trained network."""
    trained = fitted(MAP(epochs=20, learning_rate=0.02), x, y)
    return lambda model: fitted(method, x, y, start=trained(model), **options)(model)


def regression(likelihood: Any = None, prior: Any = None, network: Callable[..., nn.Module] = mlp, **options: Any):
    """A function that makes a model of the two targets."""
    return lambda: Model(network(), likelihood or Gaussian(), prior or priors.Normal(scale=1.0), **options)


def classification(likelihood: Any = None, prior: Any = None, network: Callable[..., nn.Module] = mlp, outputs: int = 3):
    """A function that makes a model of the three classes."""
    return lambda: Model(network(outputs), likelihood or Categorical(), prior or priors.Normal(scale=1.0))


SHORT, FAMILY = MAP(epochs=2), {"epochs": 3, "learning_rate": 0.02, "draws": 6}
TASKS = MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(scale=None), 3)})
BOTH = {"depth": NUMBERS[:, :1], "label": CLASSES}
LIKELIHOODS: dict[str, tuple[Any, int, Any]] = {  # likelihood, outputs of the network, targets
    "gaussian": (Gaussian(), 2, NUMBERS),
    "gaussian, known noise": (Gaussian(scale=0.25), 2, NUMBERS),
    "gaussian, two known noises": (Gaussian(scale=(0.25, 0.5)), 2, NUMBERS),
    "gaussian, two noises": (Gaussian(outputs=2), 2, NUMBERS),
    "gaussian, prior of the noise": (Gaussian(prior=torch.distributions.Gamma(2.0, 4.0)), 2, NUMBERS),
    "heteroscedastic gaussian": (HeteroscedasticGaussian(), 4, NUMBERS),
    "heteroscedastic gaussian, missing": (HeteroscedasticGaussian(missing=True), 4, NUMBERS),
    "bernoulli": (Bernoulli(), 2, BINARY),
    "bernoulli, learned scale": (Bernoulli(scale=None), 2, BINARY),
    "categorical": (Categorical(), 3, CLASSES),
    "categorical, learned scale": (Categorical(scale=None), 3, CLASSES),
    "categorical, ignore index": (Categorical(ignore_index=7), 3, CLASSES),
    "heteroscedastic categorical": (HeteroscedasticCategorical(samples=8), 6, CLASSES),
    "multi-task": (TASKS, 4, BOTH),
}
FAMILIES: dict[str, Any] = {
    "mean field": families.MeanField(),
    "factorized": families.Factorized("laplace"),
    "low rank": families.LowRank(2),
    "layerwise": families.Layerwise(),
    "full": families.Full(),
    "matrix normal": families.MatrixNormal(2),
    "flow": families.Flow(steps=1, hidden=3),
    "grouped": families.Grouped(),
    "grouped, horseshoe": families.Grouped("horseshoe", limit=0.5),
    "binary": families.Binary((-1.0, 1.0), temperature=0.75),
}
FAMILY_PRIORS = {"binary": priors.Bernoulli(0.25, values=(-1.0, 1.0))}
COVARIANCES: dict[str, Laplace] = {
    "kronecker": Laplace(check=False),
    "corrected": Laplace(corrected=True, check=False),
    "diagonal": Laplace("diagonal", check=False),
    "dense": Laplace("dense", check=False),
    "lowrank": Laplace("lowrank", rank=4, check=False),
    "subnetwork": Laplace("dense", subnetwork=5, check=False),
    "last layer": Laplace(subset="last_layer", check=False),
    "precision for each tensor": Laplace(prior_groups="parameter", check=False),
    "noise by evidence": Laplace("dense", optimize_noise=True, check=False),
    "hessian": Laplace("dense", "hessian", clip=True, check=False),
    "two noises": Laplace(check=False),
}
CHAINS: dict[str, Any] = {"chains": 2, "draws": 3, "burn_in": 2}


def _posteriors() -> Iterator[tuple[str, Saved]]:
    for name, (likelihood, outputs, y) in LIKELIHOODS.items():
        few = {key: leaf[:5] for key, leaf in y.items()} if isinstance(y, dict) else y[:5]
        yield f"point/{name}", Saved(classification(likelihood, outputs=outputs), FRESH, few, fitted(SHORT, y=y))
    for name, family in FAMILIES.items():
        prior = FAMILY_PRIORS.get(name)
        yield f"variational/{name}", Saved(regression(prior=prior), make=fitted(Variational(family, **FAMILY)))
    for name, method in COVARIANCES.items():
        likelihood = Gaussian(outputs=2) if name == "two noises" else Gaussian()
        yield f"laplace/{name}", Saved(regression(likelihood, priors.Normal()), make=after_map(method, temperature=0.5))
    yield "laplace/classes", Saved(classification(), FRESH, CLASSES[:5], after_map(COVARIANCES["kronecker"], y=CLASSES))
    yield "laplace/only the head", Saved(regression(only="^2"), make=fitted(COVARIANCES["dense"]))
    yield "online laplace", Saved(regression(prior=priors.Normal()), make=fitted(OnlineLaplace(epochs=3, every=1)))
    yield "samples/sgld", Saved(regression(network=normed), make=fitted(SGLD(burn_in=1, draws=3, chains=2)))
    yield "samples/sghmc", Saved(classification(), FRESH, CLASSES[:5], fitted(SGHMC(burn_in=1, draws=3), y=CLASSES))
    yield (
        "samples/hmc, learned scales",
        Saved(regression(prior=priors.Horseshoe(0.5, groups="row")), make=fitted(HMC(0.01, **CHAINS))),
    )
    yield "samples/mclmc, double", Saved(
        lambda: Model(mlp(dtype=torch.float64), Gaussian(), priors.Hierarchical(groups="layer")),
        FRESH.double(), NUMBERS[:5].double(), fitted(MCLMC(**CHAINS, thin=2), X.double(), NUMBERS.double()),
    )  # fmt: skip
    yield "gaussian/swag", Saved(regression(), make=fitted(SWAG(epochs=4, rank=3, draws=5)))
    yield "gaussian/swag, diagonal", Saved(regression(), make=fitted(SWAG(epochs=4, rank=0, draws=5)))
    yield "samples/swag", Saved(regression(network=normed), make=fitted(SWAG(epochs=4, rank=3, draws=5)))
    yield "gaussian/ivon", Saved(regression(), make=fitted(IVON(epochs=3)))
    yield "stochastic/own dropout", Saved(regression(network=dropping), make=fitted(MCDropout(epochs=3, draws=6)))
    yield (
        "stochastic/learned rates",
        Saved(regression(), make=fitted(MCDropout(epochs=3, at="", rate=0.25, learn_rates=True, draws=6))),
    )
    yield "stochastic/recurrent", Saved(
        regression(network=recurrent), SEQUENCES[:5], NUMBERS[:5],
        fitted(MCDropout(epochs=2, at="", rate=0.25, recurrent="batch", draws=6), SEQUENCES, NUMBERS[:8]),
    )  # fmt: skip
    yield "stochastic/images", Saved(
        classification(Categorical(dim=1), network=convolution), IMAGES[:2], (IMAGES[:2, 0] > 0).long(),
        fitted(MCDropout(epochs=2, at="^2", rate=0.25, draws=6), IMAGES, (IMAGES[:, 0] > 0).long()),
    )  # fmt: skip
    yield "conjugate/learned noise", Saved(regression(), make=after_map(NeuralLinear()))
    yield "conjugate/two noises", Saved(regression(Gaussian(outputs=2)), make=after_map(NeuralLinear()))
    yield "conjugate/known noise", Saved(regression(Gaussian(scale=0.25)), make=after_map(NeuralLinear()))
    yield "mixture/points", Saved(regression(), make=fitted(Ensemble(SHORT, 2)))
    yield "mixture/laplace", Saved(regression(), make=fitted(Ensemble(COVARIANCES["kronecker"], 2, start=SHORT)))
    yield "mixture/dropout", Saved(regression(), make=fitted(Ensemble(MCDropout(epochs=2, at="", draws=3), 2)))
    yield "point/mean teacher", Saved(regression(), make=fitted(MeanTeacher(SHORT, unlabelled=UNLABELED, unlabelled_size=10)))
    yield "stored/sghmc", Saved(regression(network=normed), make=None)
    yield "stored/nuts", Saved(regression(), make=None)
    yield "stored/bfloat16", Saved(regression(), make=None)


POSTERIORS: dict[str, Saved] = dict(_posteriors())
STORED: dict[str, tuple[Any, dict[str, Any]]] = {  # the runs behind the draws that stay on disk
    "stored/sghmc": (SGHMC(burn_in=1, draws=4, chains=2), {}),
    "stored/nuts": (NUTS(0.01, max_depth=2, **CHAINS), {}),
    "stored/bfloat16": (SGLD(burn_in=1, draws=3), {"store_dtype": "bfloat16"}),
}


# Checkpoints of runs that were stopped after some steps


class Stopped(NamedTuple):
    """A run that was stopped: it is to go on, with the same arguments, to the same predictions."""

    model: Callable[[], Model]
    method: Any
    after: int  # steps
    y: Any = NUMBERS
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    double: bool = False

    def run(self, **more: Any) -> Any:
        """Fit, with further arguments."""
        model, x, y = self.model(), X, self.y
        if self.double:
            x, y = x.double(), y.double() if isinstance(y, Tensor) and y.is_floating_point() else y
            model.network.double()
        return dubito.fit(model, self.method, (x, y), batch_size=8, seed=3, progress=False, **self.options, **more)

    @property
    def fresh(self) -> Tensor:
        """Where predictions are compared."""
        return FRESH.double() if self.double else FRESH


def _perceptron_priors(*each: Any) -> Callable[[], Model]:
    """Six priors, one for each tensor of the deep network."""
    names = ["^0.weight", "^0.bias", "^2.weight", "^2.bias", "^4.weight", "^4.bias"]
    return regression(prior=priors.ByName(dict(zip(names, each, strict=True))), network=deep)


def _earlier() -> Any:
    """A posterior as a prior: a Normal with a mean and a variance for every weight."""
    model = regression(Gaussian(scale=0.5))()
    centre = {name: leaf.detach().clone() for name, leaf in model.parameters().items()}
    return posteriors.Gaussian.diagonal(model, centre, {n: torch.full_like(leaf, 0.25) for n, leaf in centre.items()}).as_prior()


SEMI: dict[str, Any] = {"unlabelled": UNLABELED, "unlabelled_size": 10}
VALIDATION = {"validation": (UNLABELED, torch.stack([UNLABELED[:, 0], UNLABELED[:, 1] / 2], 1)), "patience": 3}
STEPS: dict[str, Any] = {"chains": 2, "draws": 4, "burn_in": 2}
CHECKPOINTS: dict[str, Stopped] = {
    "map": Stopped(classification(prior=priors.Normal.fan_in(mlp(3))), MAP(epochs=3), 5, CLASSES),
    "map, validation": Stopped(
        regression(network=normed), MAP(epochs=5, learning_rate=0.01, warmup=0.25, clip=1.0), 7, options=VALIDATION
    ),
    "map, sgd": Stopped(classification(TASKS, outputs=4), MAP(epochs=3, optimizer="sgd", schedule="constant"), 5, BOTH),
    "map, accumulated": Stopped(
        regression(HeteroscedasticGaussian(), network=lambda: mlp(4)),
        MAP(epochs=4),
        5,
        options={"accumulate": 2, "temperature": 0.5},
    ),
    "mc_dropout": Stopped(classification(network=dropping), MCDropout(epochs=3, draws=6), 5, CLASSES),
    "mc_dropout, learned rates": Stopped(regression(), MCDropout(epochs=3, at="", rate=0.25, draws=6, learn_rates=True), 5),
    "ensemble": Stopped(regression(network=normed), Ensemble(MAP(epochs=3), 2), 5),
    "ensemble, one after another": Stopped(
        regression(), Ensemble(MAP(epochs=3), 2, vectorize=False, bagging=True, adversarial=0.01), 5
    ),
    "ensemble, of laplace": Stopped(regression(), Ensemble(Laplace(check=False), 2, start=MAP(epochs=2)), 7),
    "laplace": Stopped(regression(prior=priors.Normal(), network=normed), Laplace(check=False), 2),
    "laplace, corrected": Stopped(regression(), Laplace(corrected=True, check=False), 4),
    "laplace, dense": Stopped(classification(), Laplace("dense", check=False), 2, CLASSES),
    "laplace, lowrank": Stopped(regression(), Laplace("lowrank", rank=4, check=False), 3),
    "online_laplace": Stopped(regression(prior=priors.Normal()), OnlineLaplace(epochs=4, every=1), 8),
    "neural_linear": Stopped(regression(), NeuralLinear(), 2),
    "swag": Stopped(regression(network=normed), SWAG(epochs=4, draws=5, rank=3), 8),
    "variational": Stopped(regression(), Variational(epochs=3, draws=6), 5),
    "variational, flow": Stopped(regression(), Variational(families.Flow(steps=1, hidden=3), epochs=3, draws=6), 5),
    "variational, grouped": Stopped(regression(), Variational(families.Grouped(), epochs=3, draws=6), 5),
    "ivon": Stopped(regression(), IVON(epochs=3, draws=6), 5),
    "pi_model": Stopped(regression(), PiModel(MAP(epochs=2), augment=Compose((Noise(0.125),)), **SEMI), 4),
    "temporal_ensembling": Stopped(regression(), TemporalEnsembling(MCDropout(epochs=2, at="", rate=0.25, draws=4), **SEMI), 4),
    "mean_teacher": Stopped(regression(network=normed), MeanTeacher(MAP(epochs=2), augment=Noise(0.125), **SEMI), 4),
    "sgld": Stopped(regression(network=normed), SGLD(burn_in=1, draws=3, chains=2), 8),
    "sgld, preconditioned": Stopped(
        regression(), SGLD(burn_in=1, draws=3, preconditioner="rmsprop"), 7, options={"store_dtype": "bfloat16"}
    ),
    "sghmc": Stopped(regression(), SGHMC(burn_in=2, draws=4, cycles=2, chains=2), 10),
    "metropolis": Stopped(regression(), Metropolis(**STEPS, thin=2), 4, double=True),
    "ula": Stopped(regression(), ULA(0.01, **STEPS, thin=2), 4, double=True),
    "mala": Stopped(regression(), MALA(**STEPS, thin=2), 1, double=True),
    "hmc": Stopped(regression(), HMC(0.01, **STEPS, path_length=0.05), 4, double=True),
    "hmc, in single precision": Stopped(classification(), HMC(0.01, **STEPS, path_length=0.05, tune=False), 4, CLASSES),
    "nuts": Stopped(regression(), NUTS(0.01, **STEPS, max_depth=3), 4, double=True),
    "mclmc": Stopped(regression(), MCLMC(**STEPS, thin=2), 4, double=True),
    "mams": Stopped(regression(), MAMS(0.01, **STEPS, path_length=0.05), 4, double=True),
    # the description of every prior is part of what a checkpoint knows its run by
    "priors, scales learned": Stopped(
        _perceptron_priors(
            priors.ARD(),
            priors.Hierarchical(priors.Gamma(2.0, 4.0)),
            priors.Horseshoe(0.5, groups="row"),
            priors.Jeffreys((0.25, 4.0)),
            priors.Hierarchical(priors.InverseGamma(2.0, 2.0), groups="column"),
            priors.Hierarchical(priors.HalfCauchy(0.5), groups=priors.Groups("layer")),
        ),
        MAP(epochs=2),
        4,
    ),
    "priors, factorized": Stopped(
        _perceptron_priors(
            priors.Laplace(0.5),
            priors.StudentT(0.5, df=4.0),
            priors.ScaleMixture(0.25, scales=(1.0, 0.25)),
            priors.LogUniform((0.125, 8.0)),
            priors.SpikeAndSlab((2.0, 4.0), spike=0.125),
            priors.Normal({"4.bias": 0.5}),
        ),
        MAP(epochs=2),
        4,
    ),
    "priors, correlated": Stopped(
        _perceptron_priors(
            priors.MatrixNormal(torch.eye(4) + 0.5, columns=torch.eye(3) * 2),
            priors.Normal(scale=0.5),
            priors.Centered({"2.weight": lattice(3, 4) / 4}, priors.Laplace(0.5)),
            priors.SpikeAndSlab(0.25),
            priors.ConvCorrelated(0.5, length=2.0),
            priors.Normal(),
        ),
        MAP(epochs=2),
        4,
    ),
    "priors, an earlier posterior": Stopped(lambda: regression(prior=_earlier())(), MAP(epochs=2), 4),
    "priors, binary": Stopped(
        regression(prior=priors.Bernoulli(0.25, values=(-1.0, 1.0))),
        Variational(families.Binary((-1.0, 1.0), learn_scale=False), epochs=2, draws=4),
        4,
    ),
}


def numbers(predictive: Any, y: Any = None) -> dict[str, list[float]]:
    """What is compared of a predictive: the mean, the parts of the uncertainty and, given targets, the log density."""
    u = predictive.uncertainty
    found = {"mean": predictive.mean, "total": u.total, "aleatoric": u.aleatoric, "epistemic": u.epistemic}
    found |= {} if y is None else {"log_prob": predictive.log_prob(y)}
    flat: dict[str, Tensor] = {}
    for name, value in found.items():
        flat |= {f"{name} of {task}": leaf for task, leaf in value.items()} if isinstance(value, dict) else {name: value}
    return {name: leaf.detach().double().flatten().tolist() for name, leaf in flat.items()}
