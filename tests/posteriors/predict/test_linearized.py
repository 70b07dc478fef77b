"""The linearised predictive against Jacobians written out: J Sigma J^T for every network and structure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dubito
from curvature.networks import DOUBLE, NETWORKS, Net, build, jacobian, merged, numbers, output, part, size, targets
from dubito import Categorical, Gaussian, Laplace, Model
from dubito.curvature import Spec, curvature
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.linearized import joint, linearized
from dubito.posteriors.predict.tangents import functions
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Dense, Kronecker, LowRank
from dubito.tensors.covariances.propagation import in_parts

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # torch, of its own accord
STRUCTURES = ["dense", "diagonal", "kronecker", "corrected", "lowrank", "subnetwork"]


def covariance_of(model: Model, params, x, structure: str) -> Covariance:
    """Some covariance of this structure over all weights of a network."""
    weights = {name: leaf for name, leaf in params.items() if ":" not in name}
    prior = {name: torch.tensor(0.6, dtype=DOUBLE) for name in weights}
    n = tree.size(weights)
    if structure == "lowrank":
        rows = torch.linalg.qr(numbers(n, min(n, 4)))[0].mT
        values = torch.tensor([30.0, 2.0, 0.1, 0.0], dtype=DOUBLE)[: len(rows)]
        return LowRank.precision(tree.unflatten(rows, weights), values, prior, scale=torch.ones(1, dtype=DOUBLE))
    if structure == "subnetwork":
        index, root = torch.arange(n)[:: max(1, n // 5)], numbers(len(torch.arange(n)[:: max(1, n // 5)]), 9)
        leaves = {name: list(leaf.shape) for name, leaf in weights.items()}
        return Dense(leaves, (root @ root.mT).unsqueeze(0), prior, torch.ones(1, dtype=DOUBLE), 1.0, index)
    y = targets(model, params, x)
    plain = "kronecker" if structure == "corrected" else structure
    found = curvature(model, params, [(x, y)], model.buffers(), spec=Spec(plain), prior=0.6)
    if structure == "corrected":
        found = Blocks(tuple(
            replace(b, values=torch.rand(b.left.shape[0], b.right.shape[0], dtype=DOUBLE)) if isinstance(b, Kronecker) else b
            for b in found.blocks
        ))  # fmt: skip
    return found


def exact(model: Model, params, x, covariance: Covariance) -> torch.Tensor:
    """[B, *D, C, C]."""
    rows = jacobian(model, params, x, covariance.shapes)
    return torch.einsum("...cp,pq,...dq->...cd", rows, covariance.dense(), rows)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_covariance_of_every_network_in_every_structure(name):
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params, buffers = model.parameters(), model.buffers()
    for structure in STRUCTURES:
        covariance = covariance_of(model, params, x, structure)
        p = linearized(model, x, params=params, buffers=buffers, covariance=covariance)
        torch.testing.assert_close(p.means[0], output(model, params, x))
        torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(p.f_var, p.cov[0].diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("name", NETWORKS)
def test_functions_and_the_joint_covariance_of_every_network(name):
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params, buffers = model.parameters(), model.buffers()
    f, rows = output(model, params, x), jacobian(model, params, x)
    if name != "embedding bag":  # of which torch has no forward derivative, nor a second one
        deltas = {n: numbers(3, *leaf.shape) for n, leaf in params.items()}
        found = functions(model, x, params=params, buffers=buffers, deltas=deltas)
        torch.testing.assert_close(found, f + torch.einsum("...p,sp->s...", rows, tree.flatten(deltas, stacked=True)))
    if f.ndim > 2:
        with pytest.raises(ValueError, match="one output vector an input"):
            joint(model, x, params=params, buffers=buffers, covariance=covariance_of(model, params, x, "diagonal"))
        return
    for structure in ("kronecker", "lowrank"):
        covariance = covariance_of(model, params, x, structure)
        rows = jacobian(model, params, x, covariance.shapes)
        mean, cov = joint(model, x, params=params, buffers=buffers, covariance=covariance)
        torch.testing.assert_close(mean, f)
        torch.testing.assert_close(cov, torch.einsum("acp,pq,bdq->acbd", rows, covariance.dense(), rows), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_output_layer_alone(structure, bias):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=bias)).double()
    model, x = Model(net, Categorical(), only="^2"), numbers(6, 3)
    params = model.parameters()
    covariance = covariance_of(model, params, x, structure)
    p = linearized(model, x, params=params, buffers=model.buffers(), covariance=covariance)
    torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance))


class Reversed(nn.Module):
    """An output layer whose bias is named first."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2))
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_bias_that_is_named_before_its_weight(structure):
    model, x = Model(Reversed().double(), Categorical()), numbers(6, 3)
    params = model.parameters()
    assert list(params) == ["bias", "weight"]
    covariance = covariance_of(model, params, x, structure)
    p = linearized(model, x, params=params, buffers={}, covariance=covariance)
    torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance))
    _, cov = joint(model, x, params=params, buffers={}, covariance=covariance)
    torch.testing.assert_close(torch.stack([cov[i, :, i] for i in range(6)]), p.cov[0])


@pytest.mark.parametrize("only", ["", "bias", "weight$", "^0"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_some_of_the_weights(structure, only):
    net = nn.Sequential(nn.Conv1d(2, 2, 2, padding=1), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)).double()
    model, x = Model(net, Categorical(), only=only), numbers(4, 2, 3)
    params = model.parameters()
    covariance = covariance_of(model, params, x, structure)
    p = linearized(model, x, params=params, buffers=model.buffers(), covariance=covariance)
    torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["conv2d", "embedding", "attention", "lstm", "sequences", "rows of times", "named inputs"])
def test_pieces_give_the_whole(name, monkeypatch):
    """A small budget means batches of one example, and small pieces mean one example's gradients at a time."""
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params, buffers = model.parameters(), model.buffers()
    for structure in STRUCTURES:
        covariance = covariance_of(model, params, x, structure)
        whole = linearized(model, x, params=params, buffers=buffers, covariance=covariance)
        small = linearized(model, x, params=params, buffers=buffers, covariance=covariance, memory=1e-9)
        torch.testing.assert_close(small.cov, whole.cov)
        torch.testing.assert_close(small.means, whole.means)
        with monkeypatch.context() as patch:
            patch.setattr("dubito.tensors.covariances.propagation.CHUNK", 1)
            patch.setattr("dubito.tensors.covariances.propagation.CACHE", 1)
            pieces = linearized(model, x, params=params, buffers=buffers, covariance=covariance)
        torch.testing.assert_close(pieces.cov, whole.cov)


@pytest.mark.parametrize(
    "name",
    [
        "perceptron",
        "conv2d",
        "embedding, padding",
        "positions",
        "attention",
        "encoder, norm first",
        "gru",
        "twice",
        "time major, as long as wide",
        "rows of examples",
        "rows of times",
        "rows of times, all alike",
        "films",
        "named inputs",
    ],
)
def test_inputs_one_at_a_time_give_what_they_give_together(name):
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params, buffers = model.parameters(), model.buffers()
    covariance = covariance_of(model, params, x, "kronecker")
    whole = linearized(model, x, params=params, buffers=buffers, covariance=covariance)
    one = [
        linearized(model, part(x, slice(i, i + 1)), params=params, buffers=buffers, covariance=covariance) for i in range(size(x))
    ]
    torch.testing.assert_close(torch.cat([p.cov for p in one], 1), whole.cov)


def test_inputs_that_are_all_alike_do_not_lose_a_kronecker_layer():
    """For such inputs the layer's rows cannot be told apart, and the general way must serve its block as well."""
    model, x = Model(merged(False).double(), Gaussian(scale=0.5)), numbers(4, 4, 3)
    params, buffers = model.parameters(), model.buffers()
    covariance = covariance_of(model, params, x, "kronecker")
    assert isinstance(covariance.blocks[0], Kronecker)
    alike = torch.ones(3, 3, 3, dtype=DOUBLE)
    apart = [b.with_prior({n: torch.tensor(0.2 + i) for i, n in enumerate(b.shapes)}) for b in covariance.blocks]
    for cov in (covariance, Blocks(tuple(apart))):
        p = linearized(model, alike, params=params, buffers=buffers, covariance=cov)
        torch.testing.assert_close(p.cov[0], exact(model, params, alike, cov), rtol=1e-6, atol=1e-8)


# --- many outputs ----------------------------------------------------------------------------------------------------


def test_many_classes_keep_a_root_of_their_covariance():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 120)).double()
    model, x = Model(net, Categorical(), only="^2"), numbers(5, 3)
    params = model.parameters()
    covariance = covariance_of(model, params, x, "kronecker")
    p = linearized(model, x, params=params, buffers=model.buffers(), covariance=covariance)
    assert p.cov is None
    assert p.root.shape == (1, 5, 120, 120)
    dense = exact(model, params, x, covariance)
    torch.testing.assert_close(p.covariances[0], dense)
    torch.testing.assert_close(p.f_var, dense.diagonal(dim1=-2, dim2=-1))
    same = replace(p, root=None, cov=dense.unsqueeze(0), quadrature=2048)
    torch.testing.assert_close(replace(p, quadrature=2048).mean, same.mean, rtol=0.05, atol=3e-3)
    assert torch.isfinite(p.log_prob(torch.arange(5))).all()
    few = linearized(model, x, params=params, buffers=model.buffers(), covariance=covariance_of(model, params, x, "diagonal"))
    assert few.root is None


def test_images_are_drawn_as_functions_where_they_are_large(monkeypatch):
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 1)).double()
    model, x = Model(net, Categorical(dim=1)), numbers(2, 1, 12, 12)
    params = model.parameters()
    covariance = covariance_of(model, params, x[..., :3, :3], "kronecker")
    generator = torch.Generator().manual_seed(0)
    inner = exact(model, params, x, covariance)
    whole = linearized(model, x, params=params, buffers={}, covariance=covariance)
    torch.testing.assert_close(whole.cov[0], inner, rtol=1e-7, atol=1e-9)
    inner = inner.diagonal(dim1=-2, dim2=-1)
    monkeypatch.setattr("dubito.posteriors.predict.linearized.SWEPT", 0)
    none = linearized(model, x, params=params, buffers={}, covariance=covariance, draws=0)
    torch.testing.assert_close(none.cov, whole.cov)
    p = linearized(model, x, params=params, buffers={}, covariance=covariance, generator=generator)
    assert p.how == "linearized, 30 draws"
    assert p.means.shape == (30, 2, 12, 12, 2)
    assert p.certain
    many = linearized(model, x, params=params, buffers={}, covariance=covariance, draws=500, generator=generator)
    small = linearized(model, x[:, :, :8, :8], params=params, buffers={}, covariance=covariance)
    assert small.cov.shape == (1, 2, 8, 8, 2, 2)
    torch.testing.assert_close(many.f_var, inner, rtol=0.4, atol=0)
    torch.testing.assert_close(many.f_var.mean(), inner.mean(), rtol=0.1, atol=0)
    torch.testing.assert_close(small.f_var[:, :7, :7], inner[:, :7, :7], rtol=1e-7, atol=1e-9)


def test_draws_stay_within_the_memory(monkeypatch):
    """All 30 draws of the weights were made at once, whatever `memory` said."""
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 3, padding=1))
    model = Model(network, Categorical(dim=1))
    mean = model.parameters()
    posterior = Posterior.diagonal(model, mean, {name: torch.full_like(leaf, 0.01) for name, leaf in mean.items()})
    x, made, kind = torch.randn(2, 1, 12, 12), [], type(posterior.covariance)
    monkeypatch.setattr("dubito.posteriors.predict.linearized.SWEPT", 0)
    draws = kind.draws
    monkeypatch.setattr("dubito.tensors.covariances.covariance.DRAWN", 5 * posterior.covariance.size)
    monkeypatch.setattr(kind, "draws", lambda self, n, source=None: made.append(n) or draws(self, n, source))
    few = posterior.predict(x, memory=3 * 4 * 10 * posterior.covariance.size / 2**30)
    assert made == [10, 10, 10]
    assert few.how == "linearized, 30 draws"
    made.clear()
    p = posterior.predict(x)
    assert made == [30]
    torch.testing.assert_close(few.means, p.means, rtol=0, atol=0)
    sampled = [posterior.predict(x, "sampled", memory=memory).means for memory in (1.0, 1e-5)]
    torch.testing.assert_close(*sampled)


def test_draws_are_functions_that_all_inputs_share():
    net, x = build("perceptron")
    model = Model(net, Categorical())
    params = model.parameters()
    covariance = covariance_of(model, params, x, "dense")

    def draw(x, seed):
        generator = torch.Generator().manual_seed(seed)
        return linearized(model, x, params=params, buffers={}, covariance=covariance, draws=5, generator=generator).means

    torch.testing.assert_close(draw(x, 0), torch.cat([draw(x[:2], 0), draw(x[2:], 0)], 1))
    assert not torch.allclose(draw(x, 0), draw(x, 1))


# --- a posterior's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        Laplace("dense"),
        Laplace("diagonal"),
        Laplace(),
        Laplace(corrected=True),
        Laplace(shared="reduce"),
        Laplace("lowrank", rank=3),
        Laplace("dense", subnetwork=6),
        Laplace(subset="last_layer"),
        Laplace("dense", "hessian", clip=True),
        Laplace("diagonal", "empirical"),
    ],
    ids=lambda m: f"{m.structure}-{m.curvature}-{m.subset}-{m.shared}-{m.corrected}-{m.subnetwork}",
)
@pytest.mark.parametrize("name", ["perceptron", "conv2d", "embedding"])
def test_fitted_posteriors(name, method):
    net, x = build(name)
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    posterior = dubito.fit(model, replace(method, check=False), (x, y), batch_size=3)
    p = posterior.predict(x)
    torch.testing.assert_close(p.cov[0], exact(model, posterior.params, x, posterior.covariance), rtol=1e-6, atol=1e-9)
    mean, cov = posterior.joint(x)
    torch.testing.assert_close(torch.stack([cov[i, :, i] for i in range(size(x))]), p.cov[0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(mean, p.f_mean)


@pytest.mark.parametrize("structure", ["dense", "kronecker", "lowrank"])
def test_functions_have_the_joint_covariance(structure):
    net, x = build("perceptron")
    model = Model(net, Categorical())
    params = model.parameters()
    posterior = Posterior(model, params, {}, covariance_of(model, params, x, structure))
    draws = posterior.sample_functions(x, 1000, torch.Generator().manual_seed(0)).flatten(1)
    mean, cov = posterior.joint(x)
    cov = cov.reshape(15, 15)
    deviation = cov.diag().sqrt()
    assert ((draws.mean(0) - mean.flatten()).abs() < 5 * deviation / 1000**0.5).all()
    assert ((torch.cov(draws.mT) - cov) / deviation / deviation.unsqueeze(1)).abs().max() < 0.2


def test_variances_are_not_negative_in_single_precision():
    """The data know some directions better than single precision can tell beside the prior."""
    x = torch.randn(5000, 3)
    model = Model(nn.Linear(3, 1), Gaussian(scale=0.01), dubito.priors.Normal(scale=1.0))
    posterior = dubito.fit(model, Laplace("lowrank", check=False), (x, x[:, :1]), batch_size=5000)
    p = posterior.predict(x[:500])
    assert (p.f_var > 0).all()
    assert (p.uncertainty.epistemic > 0).all()
    assert all((leaf > 0).all() for leaf in posterior.covariance.variance().values())


def test_single_precision():
    net, x = build("conv2d")
    model = Model(net, Categorical())
    covariance = covariance_of(model, model.parameters(), x, "kronecker")
    cov = linearized(model, x, params=model.parameters(), buffers={}, covariance=covariance).cov
    single = Model(net.float(), Categorical())
    covariance = curvature(
        single, single.parameters(), [(x.float(), torch.zeros(5).long())], {}, spec=Spec("kronecker"), prior=0.6
    )
    found = linearized(single, x.float(), params=single.parameters(), buffers={}, covariance=covariance).cov
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), cov, rtol=1e-3, atol=1e-4)


def test_arrays_are_taken_as_inputs():
    model = Model(nn.Linear(2, 1), Gaussian(scale=0.1))
    posterior = Posterior.diagonal(model, model.parameters(), {n: torch.ones_like(p) for n, p in model.parameters().items()})
    x = torch.randn(3, 2, dtype=DOUBLE)
    torch.testing.assert_close(posterior.predict(x.numpy()).f_var, posterior.predict(x.float()).f_var)
    torch.testing.assert_close(posterior.joint(x.numpy())[1], posterior.joint(x.float())[1])
    assert posterior.sample_functions(x.numpy(), 4).shape == (4, 3, 1)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "lowrank", "dense"])
@pytest.mark.parametrize("name", ["perceptron", "conv2d", "lstm", "single numbers"])
def test_inference_mode(name, structure, tmp_path):
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5), dubito.priors.Normal(scale=1.0))
    y = targets(model, model.parameters(), x)
    posterior = dubito.fit(model, Laplace(structure, check=False), (x, y))
    dubito.save(posterior, tmp_path / "posterior.safetensors")
    expected = {draws: posterior.predict(x, draws=draws, seed=1) for draws in (None, 5)}
    together = joint(model, x, params=posterior.params, buffers=posterior.buffers, covariance=posterior.covariance)
    with torch.inference_mode():
        read = dubito.load(tmp_path / "posterior.safetensors", model)
        for inputs in (x, x.clone()):  # made outside and inside
            for one in (posterior, read):
                for draws, exact in expected.items():
                    p = one.predict(inputs, draws=draws, seed=1)
                    torch.testing.assert_close(p.means, exact.means)
                    torch.testing.assert_close(p.f_var, exact.f_var)
                found = joint(model, inputs, params=one.params, buffers=one.buffers, covariance=one.covariance)
                torch.testing.assert_close(found, together)
        assert torch.is_inference_mode_enabled()
        tuned = posterior.tuned((x, y), precisions=(0.5, 1.0)).predict(x)
    torch.testing.assert_close(tuned.f_var, posterior.tuned((x, y), precisions=(0.5, 1.0)).predict(x).f_var)
    with torch.no_grad():
        assert not posterior.predict(x).means.requires_grad


def test_the_module_is_as_it_was_also_when_it_raises():
    def run(s, x):
        if len(x) == 3:
            raise RuntimeError("three")
        return s.o(s.b(s.a(x)))

    net = Net(run, a=nn.Linear(2, 3), b=nn.BatchNorm1d(3), o=nn.Linear(3, 2)).double()
    net.train()
    model = Model(net, Categorical())
    params = model.parameters()
    posterior = Posterior(
        model, params, model.buffers(), dubito.tensors.covariances.Diagonal.of({n: torch.ones_like(p) for n, p in params.items()})
    )
    before = [id(p) for p in net.parameters()], {n: b.clone() for n, b in net.named_buffers()}, torch.get_rng_state()
    for n in (4, 3):
        for call in (posterior.predict, posterior.joint, lambda x: posterior.sample_functions(x, 2)):
            try:
                call(numbers(n, 2)) if n == 4 else call(torch.zeros(3, 2, dtype=DOUBLE))
            except RuntimeError as error:
                assert "three" in str(error)  # noqa: PT017
    assert [id(p) for p in net.parameters()] == before[0]
    assert all(torch.equal(b, before[1][n]) for n, b in net.named_buffers())
    assert all(m.training for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "attention", "twice", "sequences", "class token"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "corrected"])
def test_pairs_of_positions_give_what_the_gradients_of_all_weights_give(name, structure, monkeypatch):
    """A GPU goes by them where positions are few."""
    monkeypatch.setattr("dubito.tensors.covariances.propagation.few_positions", lambda *_: True)
    monkeypatch.setattr("dubito.tensors.covariances.kronecker.few_positions", lambda *_: True)
    monkeypatch.setattr("dubito.tensors.covariances.propagation.CHUNK", 300)  # some examples at a time
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params, buffers = model.parameters(), model.buffers()
    covariance = covariance_of(model, params, x, structure)
    p = linearized(model, x, params=params, buffers=buffers, covariance=covariance)
    torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [(30, 10, 6144), (3, 130, 512), (5, 7, 97)])
def test_inner_products_of_long_rows_in_parts(shape):
    rows = numbers(*shape)
    torch.testing.assert_close(in_parts(rows), rows @ rows.mT)


@pytest.mark.gpu
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "corrected"])
def test_a_gpu_gives_the_same_covariances(structure):
    """By pairs where positions are few, by parts of rows where these are long, and by products with a root for small dense blocks."""
    layers = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 40, 3, 4), nn.ReLU(), nn.Flatten()
    net, x = nn.Sequential(*layers, nn.Linear(360, 5)).double().eval(), numbers(30, 3, 12, 12)
    found = []
    for device in ("cpu", "cuda"):
        model, inputs = Model(net.to(device), Categorical()), x.to(device)
        fit = Laplace("kronecker" if structure == "corrected" else structure, corrected=structure == "corrected", check=False)
        posterior = dubito.fit(model, fit, (inputs, torch.arange(30, device=device) % 5), progress=False)
        found.append(posterior.predict(inputs).cov.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)
