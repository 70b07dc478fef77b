"""Modules that are not plain Python of layers: each method and each way to predict has right numbers with them, or says what to do."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import dubito
from dubito import IVON, MAP, SGHMC, Categorical, Laplace, MCDropout, Model
from dubito.network.weights import copy_network
from dubito.priors import Normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
]

SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(7, 3, generator=SOURCE).double()
Y = (X.sum(1) > 0).long()


def network(first=None):
    return nn.Sequential(first or nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Frozen(nn.Module):
    """A layer of which the output has no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
        return self.b(h.tanh())


class Product(torch.autograd.Function):
    """A linear layer, in the old style."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class NewProduct(torch.autograd.Function):
    """The same, with `setup_context`."""

    @staticmethod
    def forward(x, w):
        return x @ w.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class VmapProduct(NewProduct):
    generate_vmap_rule = True


class Once(Product):
    """The same, with a backward pass that loses the way back to the gradient that it is given."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.detach() @ w, g.detach().T @ x


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w, self.head, self.function = nn.Parameter(torch.randn(4, 3) / 2), nn.Linear(4, 2), function

    def forward(self, x):
        return self.head(self.function.apply(x, self.w).tanh())


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(3, 4, dtype=torch.cdouble) / 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.head((x.to(self.w.dtype) @ self.w).abs())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()).tanh())


def pruned():
    layer = nn.Linear(3, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return network(layer)


def called(module):
    module(X.float())
    return module


NO_PLACE, PASS = "dropout cannot be put on the inputs of", {"streamlined", "adjoint"}
NETWORKS = {
    "plain": network,
    "frozen": Frozen,
    "old function": lambda: Custom(Product),
    "new function": lambda: Custom(NewProduct),
    "function with a vmap rule": lambda: Custom(VmapProduct),
    "scripted": lambda: torch.jit.script(network()),
    "traced": lambda: torch.jit.trace(network(), X[:2].float()),
    "scripted part": lambda: nn.Sequential(torch.jit.script(network()), nn.Tanh(), nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(network(), backend="eager"),
    "compiled part": lambda: nn.Sequential(torch.compile(network(), backend="eager"), nn.Tanh(), nn.Linear(2, 2)),
    "parallel": lambda: nn.DataParallel(network()),
    "weight norm": lambda: network(parametrizations.weight_norm(nn.Linear(3, 4))),
    "old weight norm": lambda: network(nn.utils.weight_norm(nn.Linear(3, 4))),
    "spectral norm": lambda: network(parametrizations.spectral_norm(nn.Linear(3, 4))),
    "old spectral norm": lambda: network(nn.utils.spectral_norm(nn.Linear(3, 4))),
    "orthogonal": lambda: network(parametrizations.orthogonal(nn.Linear(3, 4))),
    "pruned": pruned,
    "lazy, called": lambda: called(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))),
    "tied": Tied,
}
METHODS = {
    "MAP": MAP(epochs=2),
    "kronecker": Laplace(check=False, optimize_evidence=False),
    "diagonal": Laplace("diagonal", check=False, optimize_evidence=False),
    "dense": Laplace("dense", check=False, optimize_evidence=False),
    "lowrank": Laplace("lowrank", rank=3, check=False, optimize_evidence=False),
    "last layer": Laplace(subset="last_layer", check=False, optimize_evidence=False),
    "dropout": MCDropout(at="", rate=0.2, epochs=2),
    "SGHMC": SGHMC(draws=3, burn_in=3, learning_rate=0.01),
    "IVON": IVON(epochs=2),
}
REFUSED = {  # at the start of `fit`
    ("scripted", "last layer"): "name its weights with subset",
    ("traced", "last layer"): "name its weights with subset",
    ("scripted", "dropout"): "names no layer whose input can be dropped",
    ("traced", "dropout"): "names no layer whose input can be dropped",
    **{(name, "dropout"): NO_PLACE for name in NETWORKS if "norm" in name or name in ("orthogonal", "pruned")},
}
NO_PASS = {"scripted": "ScriptModule", "traced": "ScriptModule", "scripted part": "ScriptModule"} | {
    name: "there is no rule for" for name in NETWORKS if "norm" in name or name == "orthogonal"
}


def build(name):
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def jacobian(module, names):
    """Outputs [B, C] and their gradients in some weights, [B, C, P], by a backward pass each."""
    f, params = module(X), dict(module.named_parameters())
    rows = [
        torch.autograd.grad(one, [params[n] for n in names], retain_graph=True, materialize_grads=True, allow_unused=True)
        for one in f.flatten()
    ]
    return f.detach(), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(*f.shape, -1)


def with_state(name, state):
    """The network with other parameters and buffers."""
    module = build(name).eval()
    with torch.no_grad():
        for key, leaf in (*module.named_parameters(), *module.named_buffers()):
            leaf.copy_(state.get(key, leaf))
    return module


def check_numbers(posterior, name, method):
    """The ways to predict of a posterior, each against the network itself."""
    params, buffers = posterior.center or ({}, {})
    module = with_state(name, {**buffers, **params})
    if params:
        torch.testing.assert_close(posterior.predict(X, "point").means[0], module(X).detach())
    if method in ("SGHMC", "diagonal"):
        drawn = posterior.sample(3, torch.Generator().manual_seed(0))
        p = dubito.posteriors.Samples(posterior.model, drawn, posterior.model.buffers()).predict(X)
        for i in range(3):
            expected = with_state(name, {key: leaf[i] for key, leaf in drawn.items()})(X)
            torch.testing.assert_close(p.means[i], expected.detach())
    if not hasattr(posterior, "covariance"):
        return
    f, rows = jacobian(module, tuple(posterior.covariance.shapes))
    expected = torch.einsum("bcp,pq,bdq->bcd", rows, posterior.covariance.dense(), rows)
    torch.testing.assert_close(posterior.predict(X, "linearized").cov[0], expected, atol=1e-6, rtol=1e-5)
    if method in ("diagonal", "dense"):
        fisher = torch.diag_embed(f.softmax(-1)) - f.softmax(-1).unsqueeze(-1) * f.softmax(-1).unsqueeze(-2)
        precision = torch.einsum("bcp,bcd,bdq->pq", rows, fisher, rows) + torch.eye(rows.shape[-1]).double()
        inverse = torch.linalg.inv(precision) if method == "dense" else (1 / precision.diagonal()).diag()
        torch.testing.assert_close(posterior.covariance.dense(), inverse, atol=1e-8, rtol=1e-6)


def check_one_pass(posterior, name, plain):
    """Refused, or near the draws; and what the plain network has, if it has the same weights."""
    for how in sorted(PASS):
        try:
            p = posterior.predict(X, how)
        except ValueError as error:
            if NO_PASS.get(name, "no such sentence") not in str(error):
                raise
            continue
        variance = p.cov[0] if p.cov.ndim == 3 else p.cov[0].diagonal(dim1=-2, dim2=-1)
        drawn = posterior.predict(X, "sampled", draws=1000).means.var(0)
        assert 0.4 < float(variance.sum() / drawn.sum()) < 2.5
        if plain is not None:
            torch.testing.assert_close(p.cov, plain.predict(X, how).cov)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_are_right_or_a_sentence_says_what_to_do(name, method):
    model = Model(build(name), Categorical(), Normal(scale=1.0))
    if (name, method) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, method]):
            dubito.fit(model, METHODS[method], (X, Y))
        return
    before = {key: leaf.clone() for key, leaf in model.network.state_dict().items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = dubito.fit(model, METHODS[method], (X, Y))
    assert any("have no gradient there" in str(w.message) for w in told) == (name == "frozen")
    check_numbers(posterior, name, method)
    if method == "dropout":
        assert posterior.predict(X, draws=20).means.var(0).min() > 0  # masks reach it
    if method in ("diagonal", "dropout"):
        alike = name in ("compiled", "parallel")  # of the same weights as the plain network
        plain = dubito.fit(Model(build("plain"), Categorical(), Normal(scale=1.0)), METHODS[method], (X, Y)) if alike else None
        check_one_pass(posterior, name, plain)
    assert all(torch.equal(leaf, before[key]) for key, leaf in model.network.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_complex_weights_are_left_out_or_refused(method):
    torch.manual_seed(0)
    module = Complex().double()
    with pytest.raises(ValueError, match="are complex.*or leave them out by only"):
        dubito.fit(Model(module, Categorical()), METHODS[method], (X, Y))
    model = Model(module, Categorical(), Normal(scale=1.0), only="head")
    posterior = dubito.fit(model, METHODS[method], (X.numpy(), Y.numpy()))
    assert posterior.predict(X.numpy()).mean.dtype == torch.float64


def test_lazy_modules_are_called_first():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="have no shapes yet: call the network on a batch"):
        Model(module, Categorical())


def test_several_devices_of_a_parallel_network_are_refused():
    module = nn.DataParallel(network())
    module.device_ids = [0, 1]
    with pytest.raises(ValueError, match="threads of their own.*network.module"):
        dubito.fit(Model(module, Categorical()), MAP(epochs=1), (X.float(), Y))


def test_a_backward_pass_that_cannot_be_differentiated_is_told():
    torch.manual_seed(0)
    model = Model(Custom(Once).double(), Categorical(), Normal(scale=1.0))
    dubito.fit(model, METHODS["dense"], (X, Y)).predict(X, "linearized")  # one backward pass is enough
    with pytest.raises(ValueError, match="autograd.Function in the network cannot be differentiated"):
        dubito.fit(model, METHODS["lowrank"], (X, Y))


def test_scripted_dropout_is_refused():
    module = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))), nn.Dropout(0.5), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"dropout \['0.1'\] is inside a ScriptModule"):
        dubito.fit(Model(module, Categorical()), MCDropout(epochs=1), (X.float(), Y))


def test_dropout_in_a_network_that_the_default_compiler_compiles_returns():
    posterior = dubito.fit(Model(torch.compile(network()), Categorical()), MCDropout(at="", rate=0.2, epochs=1), (X.float(), Y))
    assert posterior.predict(X.float(), draws=5).means.var(0).min() > 0


class Memory(nn.Module):
    """Keeps what it has computed of its weights in eval mode, as modules of gpytorch do."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        if self.training or not hasattr(self, "_memoize_cache"):
            self._memoize_cache = {"double": 2 * self.w}
        return x @ self._memoize_cache["double"]


def test_what_gpytorch_remembers_of_other_weights_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "linear_operator", types.ModuleType("linear_operator"))
    module = Memory().double().eval()
    module(X)
    held = module._memoize_cache
    model = Model(module, Categorical(), Normal(scale=1.0))
    params = {"w": torch.full((3, 2), 3.0).double()}
    torch.testing.assert_close(model.forward(params, X, {})[0], X @ (2 * params["w"]))
    torch.testing.assert_close(copy_network(module)(X), X @ (2 * module.w))  # torch does not copy what is of a graph
    assert module._memoize_cache is held
    fresh = Model(Memory().double().eval(), Categorical())
    fresh.forward(params, X, {})
    assert not hasattr(fresh.network, "_memoize_cache")


class Writes(nn.Module):
    """Sets its weights when it is called for the first time."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("ready", torch.zeros(()))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.w.data.copy_(torch.ones(3, 2))  # which torch does not count
                self.ready.fill_(1)
        return x @ self.w


def test_a_network_that_writes_into_its_weights_is_called_first():
    module = Writes()
    with pytest.raises(ValueError, match="writes into its own weights when it is called .w.*call it on a batch before"):
        dubito.fit(Model(module, Categorical()), MAP(epochs=1), (X.float(), Y))
    module(X.float())
    dubito.fit(Model(module, Categorical()), MAP(epochs=1), (X.float(), Y))
