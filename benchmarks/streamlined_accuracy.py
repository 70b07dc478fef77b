"""How close predictions in one pass come to the truth: mean KL of every output's marginal, as a Gaussian, from 200,000 draws of the
weights, KL(draws || way); the mean error of its standard deviation; and what each way costs over one plain forward pass.

"SUQ's rules" are written here from the formulas of Li et al. (2024), whose released code cannot be installed: means as in the plain
network, g'(m)^2 v for an activation, nothing but variances, and A^2 on the values of an attention; "Taylor" is this library's pass
with `rule="taylor"`. "forward" carries variances only, "rank 64" 64 directions in which units move together, "full" all.

The networks are like those of which such errors are known: trained on a smooth function, with variances by hand (a share of the
weights' own scale), or on real data with a posterior by Laplace, at a given prior or (evidence) at that which maximises the
evidence, by mean-field variational inference, or by IVON; attention, and one LeNet, have weights as torch initialises them. Random
weights in the others would flatter what carries variances only: correlations of units then cancel.

Networks that a call does not name keep what an earlier one found, and `earlier` in the settings says which call that was.
On a CPU the networks that share weights between positions get fewer draws (`draws` in the results); n draws make a KL of about 1/n.

    OMP_NUM_THREADS=1 python benchmarks/streamlined_accuracy.py                    # minutes; DUBITO_DATA for the real data sets
    python benchmarks/streamlined_accuracy.py --only ViT ResNet --device cuda
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from multiprocessing import get_context
from typing import Any, Literal

import torch
import torch.nn.functional as F
from cifar10 import normalised
from dubito.data.examples import Examples, locate
from measure import earlier, interleaved, ratio, show, write
from networks import lenet, mlp, resnet20
from safetensors.torch import load_file
from torch import Tensor, nn

import dubito
from dubito import IVON, MAP, Categorical, Laplace, Model, Variational
from dubito.data import cifar10, digits, mnist, standardize, uci
from dubito.posteriors import Gaussian
from dubito.posteriors.predict.streamlined.program import NoRule
from dubito.priors import Normal
from dubito.tensors.covariances import Blocks, Diagonal

Pair = tuple[Tensor, Tensor]  # mean and variance of every output, [B, C]
Make = Callable[[str], tuple[Gaussian, Tensor]]  # a posterior on a device, and inputs


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "ReLU": nn.ReLU, "leaky ReLU": nn.LeakyReLU, "tanh": nn.Tanh, "GELU": nn.GELU, "SiLU": nn.SiLU, "sigmoid": nn.Sigmoid, "erf": Erf,
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Tokens(nn.Module):
    """Patches [B, T, D] with a token for the class before them, and places."""

    def __init__(self, patches: int, width: int):
        super().__init__()
        self.first, self.places = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, patches + 1, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def vit(patches: int, *, size: int = 48, width: int = 64, heads: int = 4, blocks: int = 4) -> nn.Sequential:
    body = []
    for _ in range(blocks):
        body.append(Residual(nn.LayerNorm(width), Attention(width, heads)))
        body.append(Residual(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)))
    return nn.Sequential(
        nn.Linear(size, width), Tokens(patches, width), *body, First(), nn.LayerNorm(width), nn.Linear(width, 10)
    )


# -- SUQ's rules


def suq(module: nn.Module, m: Tensor, v: Tensor, spread: dict[str, Tensor], name: str = "") -> Pair:
    """Mean and variance after a module; `spread` are the variances of its weights by name."""
    if isinstance(module, nn.Sequential | Residual):
        m0, v0 = m, v
        for key, child in module.named_children():
            m, v = suq(child, m, v, spread, f"{name}{key}.")
        return (m, v) if isinstance(module, nn.Sequential) else (m0 + m, v0 + v)
    if isinstance(module, nn.Linear):
        w, zero = module.weight, torch.zeros_like
        s, sb = spread.get(f"{name}weight", zero(w)), spread.get(f"{name}bias", zero(w[:, 0]))
        return module(m), (m * m) @ s.mT + v @ (w * w + s).mT + sb
    if isinstance(module, nn.LayerNorm):
        return module(m), v * module.weight**2 / (m.var(-1, correction=0, keepdim=True) + module.eps)
    if isinstance(module, Attention):
        q, k = (module.split(layer(m)) for layer in (module.query, module.key))
        a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        m, v = (module.split(t) for t in suq(module.value, m, v, spread, f"{name}value."))
        m, v = (t.transpose(1, 2).flatten(2) for t in (a @ m, (a * a) @ v))
        return suq(module.out, m, v, spread, f"{name}out.")
    if isinstance(module, Tokens | First):
        return module(m), (F.pad(v, (0, 0, 1, 0)) if isinstance(module, Tokens) else module(v))
    if list(module.parameters()) or not isinstance(module, tuple(ACTIVATIONS.values())):
        raise NotImplementedError(type(module).__name__)
    value, slope = torch.func.jvp(module, (m,), (torch.ones_like(m),))
    return value, slope**2 * v


# -- the truth


def draw(network: nn.Module, posterior: Gaussian, x: Tensor, x_var: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
    """n draws of f(x), [n, B, C]: with n draws of the weights, or, where each is used once, of every layer's outputs given its inputs,
    which has the same marginals for every input and takes far fewer random numbers."""

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device)

    h = x.expand(n, *x.shape)
    if x_var is not None:
        h = h + x_var.sqrt() * noise(h)
    if chain(network, posterior):
        spread = posterior.covariance.variance()
        for name, layer in network.named_children():
            mean = layer(h)
            if isinstance(layer, nn.Linear):
                var = h.square() @ spread[f"{name}.weight"].mT + spread[f"{name}.bias"]
                mean = mean + var.sqrt() * noise(mean)
            h = mean
        return h
    moved = posterior.covariance.sample(n, generator)
    weights = {name: posterior.params[name] + leaf for name, leaf in moved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that vmap loops over
        return torch.func.vmap(lambda w, one: torch.func.functional_call(network, w, (one,)))(weights, h)


def chain(network: nn.Module, posterior: Gaussian) -> bool:
    """Whether it is a plain sequence of linear layers, of independent weights, and functions of single numbers."""
    kinds = (nn.Linear, *ACTIVATIONS.values())
    plain = isinstance(network, nn.Sequential) and all(isinstance(layer, kinds) for layer in network)
    return plain and independent(posterior)


def independent(posterior: Gaussian) -> bool:
    covariance = posterior.covariance
    return all(isinstance(b, Diagonal) for b in (covariance.blocks if isinstance(covariance, Blocks) else (covariance,)))


@torch.no_grad()
def monte_carlo(network: nn.Module, posterior: Gaussian, x: Tensor, x_var: Tensor | None, n: int, seed: int) -> Pair:
    """Mean and variance over n draws, in pieces, with sums in double precision."""
    generator = torch.Generator(x.device).manual_seed(seed)
    widest = max(max(p.shape) for p in network.parameters())
    size = len(x) * widest if chain(network, posterior) else sum(p.numel() for p in network.parameters()) + 40 * x.numel()
    piece = max(2, min(n, (2**23 if x.device.type == "cpu" else 2**30) // size))
    middle, done = network(x), 0
    total, square = torch.zeros_like(middle, dtype=torch.float64), torch.zeros_like(middle, dtype=torch.float64)
    while done < n:
        count = min(piece, n - done)
        away = (draw(network, posterior, x, x_var, count, generator) - middle).double()
        total, square, done = total + away.sum(0), square + away.square().sum(0), done + count
    return middle + total / n, (square - total**2 / n) / (n - 1)


# -- the ways


@torch.no_grad()
def linearized(network: nn.Module, posterior: Gaussian, x: Tensor, x_var: Tensor | None) -> Pair:
    p = posterior.predict(x, "linearized")
    if x_var is None:
        return p.f_mean, p.f_var
    slopes = torch.func.vmap(torch.func.jacrev(lambda one: network(one.unsqueeze(0)).squeeze(0)))(x)  # [B, C, D]
    return p.f_mean, p.f_var + (slopes**2 @ x_var.unsqueeze(-1)).squeeze(-1)


def ways(case: Case, network: nn.Module, posterior: Gaussian, x: Tensor, x_var: Tensor | None) -> dict[str, Callable[[], Any]]:
    """What predicts at x, each a function that gives a predictive or a pair of moments."""

    def forward(rank: int) -> Callable[[], Any]:
        return lambda: posterior.predict(x, "streamlined", rank=rank, x_var=x_var)

    spread = posterior.covariance.variance()
    found: dict[str, Callable[[], Any]] = {
        "SUQ's rules": torch.no_grad()(
            lambda: suq(network, x, torch.zeros_like(x) if x_var is None else x_var.expand_as(x), spread)
        ),
        "Taylor": lambda: posterior.streamlined.predict(x, rank=0, x_var=x_var, taylor=True),
        "forward": forward(0),
        "rank 64": forward(64),
        "full": forward(-1),
        "adjoint": lambda: posterior.predict(x, "adjoint", x_var=x_var),
        "linearised": lambda: linearized(network, posterior, x, x_var),
        "100 draws": lambda: monte_carlo(network, posterior, x, x_var, 100, 1),
    }
    if not independent(posterior):
        del found["SUQ's rules"]  # written for independent weights
    return found if case.full else {name: way for name, way in found.items() if name != "full"}


def compared(found: Any, truth: Pair) -> dict[str, float]:
    """KL(truth || found) of the marginals, and errors of the standard deviation in %."""
    mean, var = found if isinstance(found, tuple) else (found.f_mean, found.f_var)
    mean, var = mean.double(), var.double().clamp_min(1e-30)
    share = truth[1] / var
    kl = 0.5 * (share - 1 - share.log() + (truth[0] - mean) ** 2 / var)
    error = 100 * (share.rsqrt() - 1)
    return {
        "kl": float(kl.mean()),
        "worst kl": float(kl.max()),
        "sd": float(error.mean()),
        "sd rms": float(error.square().mean().sqrt()),
    }


# -- the networks


@dataclass
class Case:
    """How to make the posterior and its inputs, what is asked of it, and how much work it is."""

    make: Make
    targets: dict[str, float] = field(default_factory=dict)  # KL at most
    sd: float = 2.0  # error of the adjoint's standard deviation, % at most
    x_var: float = 0.0
    full: bool = True  # narrow enough to carry all directions
    fewer: int = 1  # by how much draws are cut on a CPU
    batch: int = 256  # of the timing


def by_hand(network: nn.Module, x: Tensor, share: float, only: str = "") -> tuple[Gaussian, Tensor]:
    """Those weights that `only` names get a standard deviation of `share` of their layer's root mean square."""
    leaves = {name: leaf.detach() for name, leaf in network.named_parameters() if re.search(only, name)}
    variance = {name: torch.full_like(leaf, share**2 * float(leaf.square().mean())) for name, leaf in leaves.items()}
    return Gaussian.diagonal(Model(network, dubito.Gaussian(scale=1.0)), {}, variance), x.to(next(network.parameters()).device)


def trained(activation: str, *hidden: int, share: float, inputs: int = 16) -> Make:
    """On a smooth function of eight inputs: random weights would make units whose correlations cancel."""

    def make(device: str) -> tuple[Gaussian, Tensor]:
        layers: list[nn.Module] = []
        for i, (fan_in, fan_out) in enumerate(pairwise((8, *hidden, 1))):
            layers += [ACTIVATIONS[activation]()] if i else []
            layers.append(nn.Linear(fan_in, fan_out))
        network, x = nn.Sequential(*layers).to(device), torch.randn(2000, 8)
        y = (x[:, :4].sum(1).sin() + x[:, 4] * x[:, 5] / 2 + (x[:, 6] - 1).abs()).unsqueeze(1)
        model = Model(network, dubito.Gaussian(scale=0.1))
        weights = dubito.fit(model, MAP(epochs=60, learning_rate=3e-3), (x, y), progress=False).sample(1)
        network.load_state_dict({name: leaf[0] for name, leaf in weights.items()})
        return by_hand(network, torch.randn(inputs, 8), share)

    return make


def classifier(device: str) -> tuple[Gaussian, Tensor]:
    x, y, x_test, _ = digits()
    network = mlp(64, 64, 64, 10).to(device)
    weights = dubito.fit(Model(network, Categorical()), MAP(epochs=30), (x.flatten(1), y), progress=False).sample(1)
    network.load_state_dict({name: leaf[0] for name, leaf in weights.items()})
    return by_hand(network, x_test[:16].flatten(1), 0.1)


def at_laplace(
    model: Model,
    data: tuple[Tensor, Tensor],
    x: Tensor,
    structure: Literal["diagonal", "kronecker"] = "diagonal",
    **training: Any,
) -> tuple[Gaussian, Tensor]:
    """A Laplace posterior around MAP."""
    size = training.pop("batch_size", 128)
    trained = dubito.fit(model, MAP(**training), data, batch_size=size, progress=False)
    posterior = dubito.fit(model, Laplace(structure), data, start=trained, progress=False)
    assert isinstance(posterior, Gaussian)
    return posterior, x.to(model.device)


def on_uci(name: str, *hidden: int, prior: float | None = None) -> Make:
    """The prior's scale is `prior`, or set by the evidence."""

    def make(device: str) -> tuple[Gaussian, Tensor]:
        x, y, x_test, *_ = standardize(uci(name, 0))
        model = Model(
            mlp(x.shape[1], *hidden, 1).to(device), dubito.Gaussian(), Normal() if prior is None else Normal(scale=prior)
        )
        return at_laplace(model, (x, y), x_test[:32], epochs=200, learning_rate=0.01, batch_size=32)

    return make


def on_digits(device: str) -> tuple[Gaussian, Tensor]:
    x, y, x_test, _ = digits()
    model = Model(mlp(64, 100, 10).to(device), Categorical(), Normal())
    return at_laplace(model, (x.flatten(1), y), x_test[:16].flatten(1), epochs=60)


def variational(method: Variational | IVON, *hidden: int, uci_set: str | None = None) -> Make:
    """By a method whose posterior is a Gaussian of independent weights, on digits or on a set of UCI."""

    def make(device: str) -> tuple[Gaussian, Tensor]:
        x, y, x_test, *_ = standardize(uci(uci_set, 0)) if uci_set else digits()
        x, x_test = x.flatten(1), x_test.flatten(1)
        likelihood = dubito.Gaussian() if uci_set else Categorical()
        network = mlp(x.shape[1], *hidden, 1 if uci_set else 10).to(device)
        model = Model(network, likelihood, Normal.fan_in(network))
        posterior = dubito.fit(model, method, (x, y), batch_size=32 if uci_set else 128, progress=False)
        assert isinstance(posterior, Gaussian)
        return posterior, x_test[: 32 if uci_set else 16].to(device)

    return make


def kronecker_on_digits(*hidden: int) -> Make:
    """The prior's precisions a hundred times those of the evidence, about where held-out images like them best."""

    def make(device: str) -> tuple[Gaussian, Tensor]:
        x, y, x_test, _ = digits()
        model = Model(mlp(64, *hidden, 10).to(device), Categorical(), Normal())
        posterior, x = at_laplace(model, (x.flatten(1), y), x_test[:8].flatten(1), "kronecker", epochs=40)
        return posterior.with_prior({name: 100 * leaf for name, leaf in posterior.prior_precision.items()}), x

    return make


def lenet_on_mnist(device: str) -> tuple[Gaussian, Tensor]:
    x, y = (part[:5000] for part in mnist("train"))
    return at_laplace(Model(lenet().to(device), Categorical(), Normal()), (x, y), mnist("test").x[:4], epochs=3)


def resnet_on_cifar(device: str) -> tuple[Gaussian, Tensor]:
    """The given weights; curvature of 500 images; the precision tuned on 200, for that of the evidence is far too small."""
    network = resnet20()
    network.load_state_dict(load_file(locate("weights", "resnet20_cifar10.safetensors")), strict=False)
    train, test = (normalised(Examples(*(t[:500] for t in cifar10(part)))) for part in ("train", "test"))
    model, method = Model(network.to(device).eval(), Categorical(), Normal()), Laplace("diagonal", "fisher", draws=1, check=False)
    posterior = dubito.fit(model, method, tuple(train), n_data=50_000, batch_size=100, progress=False)
    assert isinstance(posterior, Gaussian)
    held_out = [(x, y) for x, y in zip(test.x[200:400].split(50), test.y[200:400].split(50), strict=True)]
    return posterior.tuned(held_out), test.x[:2].to(device)


def vits(patches: int, share: float, only: str) -> Make:
    return lambda device: by_hand(vit(patches).to(device), torch.randn(4, patches, 48), share, only)


def random_lenet(device: str) -> tuple[Gaussian, Tensor]:
    return by_hand(lenet().to(device), torch.randn(4, 1, 28, 28), 0.1)


CLOSE = {"adjoint": 0.001, "full": 0.01}  # "full": forward with covariance
ONE = CLOSE | {"forward": 0.003}
REAL = {"adjoint": 0.01, "full": 0.01}
VALUES, LAST = r"value\.weight", r"^(6|8)\..*value\.weight"  # of all four blocks, of the last two
MEAN_FIELD = Variational(epochs=200, learning_rate=0.01)
BLOCKS = r"^[2-9]\..*weight"
CASES = {
    "ReLU 6-50-1, diagonal Laplace (yacht)": Case(on_uci("yacht", 50, prior=0.1), REAL | {"forward": 0.003}),
    "ReLU 13-50-1, diagonal Laplace (boston)": Case(on_uci("boston", 50, prior=0.3), REAL | {"forward": 0.003}),
    "ReLU 13-50-1, diagonal Laplace, evidence (boston)": Case(on_uci("boston", 50), REAL | {"forward": 0.003}),
    "ReLU 8-50-50-1, diagonal Laplace (concrete)": Case(on_uci("concrete", 50, 50, prior=0.1), REAL),
    "ReLU 8-50-50-1, diagonal Laplace, evidence (concrete)": Case(on_uci("concrete", 50, 50), REAL),
    "ReLU 64-100-10, diagonal Laplace, evidence (digits)": Case(on_digits, REAL | {"forward": 0.003}),
    "ReLU 64-50-10, Kronecker Laplace (digits)": Case(kronecker_on_digits(50), REAL, fewer=4),
    "ReLU 64-50-50-10, Kronecker Laplace (digits)": Case(kronecker_on_digits(50, 50), REAL, fewer=4),
    "ReLU 6-50-1, mean-field VI (yacht)": Case(variational(MEAN_FIELD, 50, uci_set="yacht"), REAL | {"forward": 0.003}),
    "ReLU 13-50-1, mean-field VI (boston)": Case(variational(MEAN_FIELD, 50, uci_set="boston"), REAL | {"forward": 0.003}),
    "ReLU 8-50-50-1, mean-field VI (concrete)": Case(variational(MEAN_FIELD, 50, 50, uci_set="concrete"), REAL),
    "ReLU 64-100-10, mean-field VI (digits)": Case(variational(MEAN_FIELD, 100), REAL | {"forward": 0.003}),
    "ReLU 64-100-10, IVON (digits)": Case(variational(IVON(epochs=100), 100), REAL | {"forward": 0.003}),
    "ReLU 64-50-50-10, IVON (digits)": Case(variational(IVON(epochs=100), 50, 50), REAL),
    **{f"{name} 8-64-1": Case(trained(name, 64, share=0.2), ONE) for name in ACTIVATIONS},
    "ReLU 8-64-64-1, small variances": Case(trained("ReLU", 64, 64, share=0.05), CLOSE),
    "tanh 8-64-64-1": Case(trained("tanh", 64, 64, share=0.1), CLOSE),
    "sigmoid 8-64-64-1": Case(trained("sigmoid", 64, 64, share=0.1), CLOSE),
    "GELU 8-64-64-64-1": Case(trained("GELU", 64, 64, 64, share=0.1), CLOSE),
    "SiLU 8-64-64-64-64-1": Case(trained("SiLU", 64, 64, 64, 64, share=0.1), CLOSE),
    "ReLU 64-64-64-10, classifier (digits)": Case(classifier, CLOSE),
    "ReLU 8-64-64-1, input variance .04": Case(trained("ReLU", 64, 64, share=0.1), CLOSE, x_var=0.04),
    "ReLU 8-256-256-1": Case(trained("ReLU", 256, 256, share=0.1, inputs=8), CLOSE),
    "LeNet": Case(random_lenet, sd=5, full=False, fewer=20, batch=16),
    "LeNet, diagonal Laplace (MNIST)": Case(lenet_on_mnist, sd=5, full=False, fewer=20, batch=16),
    "ViT, 17 tokens, values of the last 2 blocks": Case(vits(16, 0.2, LAST), sd=5, full=False, fewer=20, batch=16),
    "ViT, 17 tokens, values of all blocks": Case(vits(16, 0.2, VALUES), sd=5, full=False, fewer=20, batch=16),
    "ViT, 17 tokens, all of all blocks": Case(vits(16, 0.05, BLOCKS), sd=5, full=False, fewer=20, batch=16),
    "ViT, 65 tokens, values of the last 2 blocks": Case(vits(64, 0.2, LAST), sd=5, full=False, fewer=40, batch=8),
    "ViT, 65 tokens, values of all blocks": Case(vits(64, 0.2, VALUES), sd=5, full=False, fewer=40, batch=8),
    "ViT, 65 tokens, all of all blocks": Case(vits(64, 0.05, BLOCKS), sd=5, full=False, fewer=40, batch=8),
    "ResNet-20, diagonal Laplace (CIFAR-10)": Case(resnet_on_cifar, sd=5, full=False, fewer=200, batch=4),
}
WAYS = ("SUQ's rules", "Taylor", "forward", "rank 64", "full", "adjoint", "linearised", "100 draws")

SHOWN = ("SUQ's rules", "forward", "full", "adjoint")  # in the README


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    posterior, x = case.make(args.device)
    network = copy.deepcopy(posterior.model.network).eval().requires_grad_(False)
    network.load_state_dict({name: leaf for name, leaf in posterior.params.items() if ":" not in name}, strict=False)
    x_var = torch.full_like(x, case.x_var) if case.x_var else None
    n = max(200, args.draws // (case.fewer if args.device == "cpu" else 1))
    start = time.time()
    truth = monte_carlo(network, posterior, x, x_var, n, 0)
    results: dict[str, dict[str, Any]] = {}
    figure = {"draws": n, "seconds of them": time.time() - start, "sd of f": float(truth[1].mean().sqrt()), "ways": results}
    for name, way in ways(case, network, posterior, x, x_var).items():
        try:
            results[name] = compared(way(), truth)
        except NoRule as error:
            results[name] = {"error": "no rule", "message": str(error).split(". ")[0]}
        except NotImplementedError as error:
            results[name] = {"error": "", "message": f"not written for {error}"}
        except Exception as error:  # nothing of the rest is lost
            results[name] = {"error": "fails", "message": f"{type(error).__name__}: {error}"[:300]}
    many = x.repeat(math.ceil(case.batch / len(x)), *[1] * (x.ndim - 1))[: case.batch]
    many_var = None if x_var is None else x_var[:1].expand_as(many)
    timed = ways(case, network, posterior, many, many_var) | {"100 draws": lambda: posterior.predict(many, "sampled", draws=100)}
    timed = {"plain": torch.no_grad()(lambda: network(many))} | {
        name: way for name, way in timed.items() if "kl" in results.get(name, {})
    }
    seconds = interleaved({name: synchronised(way, args.device) for name, way in timed.items()}, args.repeats)
    for name in timed:
        if name != "plain":
            results[name]["cost"] = ratio(seconds, name, "plain")
    return figure | {"batch of the timing": case.batch, "plain, milliseconds": 1e3 * min(seconds["plain"])}


def named(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one network; None where its data is not there."""
    warnings.filterwarnings("ignore", message=".*optimum.*")  # of networks trained for a short time
    try:
        figure = run(CASES[name], args)
    except FileNotFoundError as error:
        print(f"{name}: left out, {error}")
        return None
    results = figure["ways"]
    print(f"{name}: " + "; ".join(f"{way} {cell(results[way])}" for way in WAYS if way in results), flush=True)
    for way, found in results.items():
        if found.get("error") == "fails":
            print(f"  {way} fails: {found['message']}")
    return figure


def synchronised(way: Callable[[], Any], device: str) -> Callable[[], None]:
    def once() -> None:
        way()
        if device != "cpu":
            torch.cuda.synchronize()

    return once


def missed(name: str, case: Case, results: dict[str, dict[str, Any]]) -> list[str]:
    """Which targets this network does not keep."""
    kl = {way: found["kl"] for way, found in results.items() if "kl" in found}
    found = [
        f"{name}: {way} has KL {kl[way]:.2g}, target {bound:g}" for way, bound in case.targets.items() if kl.get(way, 0) > bound
    ]
    for other in ("SUQ's rules", "Taylor"):
        if kl.get("forward", 0) > max(kl.get(other, math.inf), 1e-4):
            found.append(f"{name}: forward has KL {kl['forward']:.3g}, worse than {other}, {kl[other]:.3g}")
    if abs(results["adjoint"].get("sd", 0)) > case.sd:
        found.append(f"{name}: the adjoint's standard deviation is off by {results['adjoint']['sd']:.1f} %, target {case.sd:g} %")
    return found


def number(value: float) -> str:
    """.0012, 6e-05, 1.84."""
    text = f"{value:.2g}" if value < 1 else f"{value:.3g}"
    return text[1:] if text.startswith("0.") else text


def cell(found: dict[str, Any] | None) -> str:
    """KL and the error of the standard deviation, as people read them."""
    if found is None or "error" in found:
        return "" if found is None else found["error"]
    return f"{number(found['kl'])} ({found['sd']:+.1f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of networks")
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="networks at a time, a process each: for OMP_NUM_THREADS=1")
    parser.add_argument("--quick", action="store_true", help="only see that all runs: few draws, nothing is written")
    args, began = parser.parse_args(), time.time()
    if args.quick:
        args.draws, args.repeats = 2000, 1
    headline: dict[str, list[Any]] = {}
    misses: list[str] = []
    names = [name for name in CASES if any(part in name for part in args.only)]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        found = pool.map(named, names, repeat(args)) if args.workers > 1 else (named(name, args) for name in names)
        figures = {name: figure for name, figure in zip(names, found, strict=True) if figure is not None}
    before, commands = earlier("streamlined_accuracy", figures)
    figures = {name: figure for name in CASES if (figure := (figures | before).get(name)) is not None}
    for name, figure in figures.items():
        case = CASES[name]
        results = figure["ways"]
        misses += (lost := missed(name, case, results))
        figure["missed"] = lost
        bounds = ", ".join(f"{way} <= {number(bound)}" for way, bound in case.targets.items())
        shown = [way for way in SHOWN if "kl" in results.get(way, {})]  # of the others and of times the JSON file tells
        what = "; ".join(f"{way} {cell(results[way])}" for way in shown)
        headline[f"{name}: KL (error of the sd)"] = [what, f"{bounds}; sd +-{case.sd:g} %".removeprefix("; ")]
    rows = [[name, *(cell(figure["ways"].get(way)) for way in WAYS)] for name, figure in figures.items()]
    show("KL of the marginals from Monte Carlo (mean error of the standard deviation)", ["", *WAYS], rows)
    cost = [
        [name, *(found["cost"]["fastest"] if "cost" in (found := figure["ways"].get(way, {})) else "" for way in WAYS)]
        for name, figure in figures.items()
    ]
    show("time over a plain forward pass", ["", *WAYS], cost)
    print("\n".join(["targets missed:", *misses] if misses else ["all targets kept"]))
    if args.quick:
        return
    settings = {"draws": args.draws, "repeats": args.repeats, "device": args.device, "workers": args.workers, "earlier": commands}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("streamlined_accuracy", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
