"""A posterior as a module: it predicts as the posterior does, and everything that takes modules takes it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import Categorical, Gaussian, HeteroscedasticGaussian, Laplace, Model, as_module
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors import Mixture
from dubito.posteriors.export import elimination
from dubito.posteriors.predict.streamlined import Streamlined, Weight
from dubito.posteriors.predict.streamlined.engine import covariance_of
from dubito.tensors.covariances import Dense

FIELDS = ["mean", "total", "aleatoric", "epistemic", "f_mean", "f_cov"]


def mlp(*widths: int, activation=nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)).eval()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(F.gelu(self.first(left) + self.second(right)))


def around(network: nn.Module, variance: float = 0.01, likelihood=None) -> Posterior:
    """A Gaussian with the same variance for every weight."""
    model = Model(network, likelihood or Categorical())
    mean = model.parameters()
    return Posterior.diagonal(model, mean, {n: torch.full_like(leaf, variance) for n, leaf in mean.items() if ":" not in n})


def distance(a: dict, b: dict, rows: int | None = None) -> float:
    """The largest relative difference of any field, over the first rows of b."""
    assert list(a) == list(b) == FIELDS
    return max(float((a[k] - b[k][:rows]).abs().max() / b[k].abs().max().clamp_min(1e-9)) for k in FIELDS)


# --- it predicts as the posterior does --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "how"),
    [
        ("diagonal", "streamlined"),
        ("kronecker", "streamlined"),
        ("lowrank", "streamlined"),
        ("dense", "streamlined"),
        ("kronecker", "adjoint"),
        pytest.param("diagonal", "adjoint", marks=pytest.mark.slow),
        pytest.param("lowrank", "adjoint", marks=pytest.mark.slow),
    ],
)
def test_as_the_posterior(structure, how):
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    model = Model(mlp(4, 16, 12, 3), Categorical())
    start = dubito.fit(model, dubito.MAP(epochs=30, learning_rate=0.01), (x, y))
    posterior = dubito.fit(model, Laplace(structure=structure, check=False), (x, y), start=start)
    found, p = as_module(posterior, x[:4], how=how)(x), posterior.predict(x, how)
    torch.testing.assert_close(found["f_mean"], p.f_mean)
    torch.testing.assert_close(found["f_cov"], p.cov[0], rtol=1e-4, atol=1e-5)
    # logits vary by several units here, where nodes in other places differ: by as much as either is off
    torch.testing.assert_close(found["mean"], p.mean, rtol=0, atol=0.06)
    torch.testing.assert_close(found["total"], p.uncertainty.total, rtol=0, atol=0.06)
    torch.testing.assert_close(found["epistemic"], p.uncertainty.epistemic, rtol=0, atol=0.06)
    torch.testing.assert_close(found["mean"].sum(-1), torch.ones(60))
    torch.testing.assert_close(found["total"], found["aleatoric"] + found["epistemic"])


@pytest.mark.parametrize("likelihood", [Gaussian(scale=0.3), Gaussian(), Gaussian(outputs=2), HeteroscedasticGaussian()])
def test_regression_has_the_noise_inside(likelihood):
    posterior = around(mlp(4, 16, 4 if isinstance(likelihood, HeteroscedasticGaussian) else 2), likelihood=likelihood)
    x = torch.randn(10, 4)
    for rank in (None, 0):
        found, p = as_module(posterior, x, rank=rank)(x), posterior.predict(x, "streamlined", rank=rank)
        torch.testing.assert_close(found["mean"], p.mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["total"], p.uncertainty.total, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(found["epistemic"], p.uncertainty.epistemic, rtol=1e-2, atol=1e-3)
        assert (found["total"] > found["epistemic"]).all()


def test_probabilities_against_monte_carlo():
    posterior = around(mlp(4, 16, 3), variance=0.05)
    x = torch.randn(20, 4)
    found = as_module(posterior, x)(x)
    unit = torch.randn(len(x), 20_000, 3)
    probs = F.softmax(found["f_mean"].unsqueeze(1) + unit @ torch.linalg.cholesky(found["f_cov"]).mT, -1)  # [B, n, C]
    torch.testing.assert_close(found["mean"], probs.mean(1), rtol=0, atol=0.01)
    torch.testing.assert_close(found["aleatoric"], torch.special.entr(probs).sum(-1).mean(1), rtol=0, atol=0.02)


def test_a_scale_of_the_variances_counts():
    posterior = replace(around(mlp(4, 8, 1), likelihood=Gaussian(scale=0.1)), variance_scale=4.0)
    x = torch.randn(5, 4)
    torch.testing.assert_close(as_module(posterior, x)(x)["f_cov"][..., 0], posterior.predict(x, "streamlined").f_var)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_elimination_is_a_root(rank):
    half = torch.randn(7, 5, rank)
    cov = half @ half.mT
    root = elimination(cov)
    torch.testing.assert_close(root @ root.mT, cov, rtol=1e-3, atol=1e-4)
    assert (elimination(torch.zeros(2, 3, 3)) == 0).all()


# --- it is a module ---------------------------------------------------------------------------------------------------


def test_buffers_are_its_own():
    posterior = around(mlp(4, 8, 3))
    x = torch.randn(6, 4)
    module = as_module(posterior, x)
    before = module(x)
    assert not list(module.parameters())
    assert {"mean.0.weight", "var.0.weight", "second.2.bias", "readout.nodes"} <= set(module.state_dict())
    other = as_module(around(mlp(4, 8, 3)), x)
    assert distance(other(x), before) > 0.1
    other.load_state_dict(module.state_dict())
    assert distance(other(x), before) == 0
    for leaf in module.buffers():
        leaf.zero_()
    assert distance(as_module(posterior, x)(x), before) == 0, "the posterior shares no memory with its module"
    double = other.double()(x.double())
    assert double["mean"].dtype == torch.float64
    assert distance(before, {k: v.float() for k, v in double.items()}) < 1e-4


def test_modes_and_other_numbers_of_examples():
    posterior = around(mlp(4, 8, 3))
    x = torch.randn(6, 4)
    with torch.inference_mode():
        module = as_module(posterior, torch.randn(2, 4))
    plain = module(x)
    with torch.no_grad():
        assert distance(module(x), plain) < 1e-5
    with torch.inference_mode():
        assert distance(module(x), plain) < 1e-5
    assert distance(module(x[:1]), plain, rows=1) < 1e-4
    assert not module(x)["mean"].requires_grad
    assert module(x.requires_grad_())["epistemic"].requires_grad, "saliency: which inputs one is uncertain about"


def test_as_the_network_is_called():
    posterior = around(TwoInputs())
    x = {"left": torch.randn(5, 4), "right": torch.randn(5, 3)}
    module = as_module(posterior, x)
    torch.testing.assert_close(module(**x)["f_cov"], posterior.predict(x, "streamlined").cov[0], rtol=1e-4, atol=1e-6)
    pair = tuple(x.values())
    assert distance(as_module(posterior, pair)(*pair), module(**x)) < 1e-5


def bf16_works() -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.Linear(4, 4)(torch.zeros(2, 4))
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(
    not bf16_works(), reason="oneDNN refuses bfloat16 on this CPU; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 makes it run"
)
@pytest.mark.parametrize("rank", [0, -1])
def test_autocast(rank):
    posterior = around(mlp(4, 32, 32, 3))
    x = torch.randn(50, 4)
    module = as_module(posterior, x, rank=rank)
    plain = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x)
    assert all(leaf.dtype == torch.float32 for leaf in found.values())
    assert 0 < distance(found, plain) < 0.1
    assert (found["mean"] - plain["mean"]).abs().max() < 0.02


@pytest.mark.parametrize(
    ("posterior", "options", "message"),
    [
        (lambda: Mixture.equal([around(mlp(4, 3))] * 2), {}, "of each member"),
        (lambda: around(mlp(4, 3)), {"how": "sampled"}, "one pass"),
        (lambda: around(mlp(4, 3)), {"how": "adjoint", "rank": 2}, "rank"),
    ],
)
def test_refusals(posterior, options, message):
    with pytest.raises(ValueError, match=message):
        as_module(posterior(), torch.zeros(2, 4), **options)


def test_an_adjoint_that_is_no_graph_says_so():
    posterior = around(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3)))
    leaves = {name: list(leaf.shape) for name, leaf in posterior.params.items()}
    size = sum(leaf.numel() for leaf in posterior.params.values())
    dense = Dense(leaves, torch.eye(size).unsqueeze(0), dict.fromkeys(leaves, torch.ones(())), torch.ones(1))
    with pytest.raises(ValueError, match="one graph"):
        as_module(replace(posterior, covariance=dense), torch.randint(10, (5, 3)), how="adjoint")


def test_the_adjoint_of_random_embeddings():
    """Words that occur again in a text share their row."""
    posterior = around(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)))
    x = torch.tensor([[1, 1, 1], [2, 3, 2], [4, 5, 6], [7, 7, 8], [0, 9, 0]])
    module = as_module(posterior, x, how="adjoint")
    for words in (x, x[:2], torch.randint(10, (17, 3))):
        torch.testing.assert_close(module(words)["f_cov"], posterior.predict(words, "adjoint").covariances[0])


# --- compilers and exporters ------------------------------------------------------------------------------------------

CASES = {
    "mlp": (lambda: mlp(4, 16, 3), (4,), {"rank": 0}),
    "all directions": (lambda: mlp(4, 16, 3, activation=nn.GELU), (4,), {"rank": -1}),
    "some directions": (lambda: mlp(4, 16, 8, 3, activation=nn.Tanh), (4,), {"rank": 4}),
    "cnn": (cnn, (1, 6, 6), {"rank": 0}),
    "adjoint": (lambda: mlp(4, 16, 3), (4,), {"how": "adjoint"}),
}
BATCH = torch.export.Dim("batch")


@pytest.fixture(params=CASES, scope="module")
def case(request) -> tuple[nn.Module, Tensor]:
    make, shape, options = CASES[request.param]
    x = torch.randn(6, *shape)
    return as_module(around(make()), x, **options), x


def test_compile(case):
    torch._dynamo.reset()
    module, x = case
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    given = x.clone()
    torch._dynamo.mark_dynamic(given, 0)  # an error where the number of examples is fixed on the way
    with torch.no_grad():
        assert distance(compiled(given), module(x)) < 1e-4


@pytest.mark.parametrize("backend", [pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor")])
@pytest.mark.filterwarnings("ignore")  # of deprecated parts of torch that torch uses
def test_compile_to_the_end(backend):
    torch._dynamo.reset()
    x = torch.randn(6, 4)
    module = as_module(around(mlp(4, 16, 3)), x)
    with torch.no_grad():
        assert distance(torch.compile(module, fullgraph=True, backend=backend, dynamic=True)(x), module(x)) < 1e-4


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])  # strict means by way of the compiler
def test_export(case, strict):
    module, x = case
    program = torch.export.export(module, (x,), dynamic_shapes=({0: BATCH},), strict=strict)
    assert distance(program.module()(x[:4]), module(x), rows=4) < 1e-4


@pytest.mark.slow
def test_an_exported_program_needs_no_dubito(tmp_path):
    x = torch.randn(6, 4)
    module = as_module(around(mlp(4, 16, 3)), x)
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=({0: BATCH},)), tmp_path / "program.pt2")
    torch.save((x, module(x)), tmp_path / "truth.pt")
    code = (
        "import sys, torch; sys.modules['dubito'] = None; x, truth = torch.load('truth.pt');"
        "p = torch.export.load('program.pt2').module()(x); print(max(float((p[k] - truth[k]).abs().max()) for k in truth))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_onnx(case, tmp_path):
    pytest.importorskip("onnxscript", reason="ONNX is an extra: pip install dubito[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="ONNX is an extra: pip install dubito[onnx]")
    module, x = case
    options = {"dynamic_shapes": ({0: BATCH},), "output_names": FIELDS, "verbose": False}
    torch.onnx.export(module, (x,), tmp_path / "m.onnx", dynamo=True, **options)
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    found = session.run(FIELDS, {session.get_inputs()[0].name: x[:4].numpy()})
    assert distance(dict(zip(FIELDS, map(torch.from_numpy, found), strict=True)), module(x), rows=4) < 1e-4


# --- training through it ----------------------------------------------------------------------------------------------


def engine_of(network: nn.Module, likelihood) -> tuple[Streamlined, dict[str, Tensor], dict[str, Tensor]]:
    """An engine, and leaves: means and log variances."""
    posterior = around(network, likelihood=likelihood)
    mean = {name: leaf.clone().requires_grad_() for name, leaf in posterior.params.items()}
    log_var = {name: torch.full_like(leaf, math.log(0.01)).requires_grad_() for name, leaf in mean.items()}
    return posterior.streamlined, mean, log_var


def given(mean: dict[str, Tensor], log_var: dict[str, Tensor]) -> dict[str, Weight]:
    return {name: Weight.of(mean[name], log_var[name].exp()) for name in mean}


def test_gradients_are_those_of_the_moments():
    engine, mean, log_var = engine_of(mlp(3, 5, 4, 2, activation=nn.GELU).double(), Gaussian(scale=0.1))
    x, names = torch.randn(2, 3, dtype=torch.float64), list(mean)

    def moments(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        half = len(names)
        f = engine.moments(
            x, rank=-1, weights=given(dict(zip(names, leaves, strict=False)), dict(zip(names, leaves[half:], strict=True)))
        )
        return f.mean, covariance_of(f)

    assert torch.autograd.gradcheck(moments, (*mean.values(), *log_var.values()))


def test_gradients_where_a_unit_is_surely_off():
    engine, mean, log_var = engine_of(mlp(3, 6, 6, 2), Gaussian(scale=0.1))
    with torch.no_grad():
        mean["0.bias"].fill_(-1000.0)
    for rank in (0, -1):
        cov = covariance_of(engine.moments(torch.randn(4, 3), rank=rank, weights=given(mean, log_var)))
        slopes = torch.autograd.grad(cov.sum(), [*mean.values(), *log_var.values()], allow_unused=True)
        assert all(torch.isfinite(slope).all() for slope in slopes if slope is not None)


def fitted(engine: Streamlined, mean: dict, log_var: dict, x: Tensor, y: Tensor, scale: float, steps: int) -> list[float]:
    """Deterministic VI under a standard normal prior: the negative ELBO at every step."""
    leaves, losses = [*mean.values(), *log_var.values()], []
    optimizer = torch.optim.Adam(leaves, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        f = engine.moments(x, weights=given(mean, log_var))
        spread = covariance_of(f).diagonal(dim1=-2, dim2=-1)
        misfit = ((y - f.mean) ** 2 + spread).sum() / (2 * scale**2)
        kl = sum((0.5 * (m * m + s.exp() - 1 - s)).sum() for m, s in zip(mean.values(), log_var.values(), strict=True))
        optimizer.zero_grad()
        (misfit + kl).backward()
        optimizer.step()
        schedule.step()
        losses.append(float((misfit + kl).detach()))
    return losses


def test_variational_inference_is_exact_for_a_linear_model():
    x = torch.randn(40, 3).double()
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.3 * torch.randn(40, 1).double()
    engine, mean, log_var = engine_of(nn.Linear(3, 1, bias=False).double(), Gaussian(scale=0.3))
    fitted(engine, mean, log_var, x, y, 0.3, 800)
    precision = x.mT @ x / 0.09 + torch.eye(3).double()
    torch.testing.assert_close(mean["weight"].detach(), torch.linalg.solve(precision, x.mT @ y / 0.09).mT, rtol=0, atol=1e-3)
    torch.testing.assert_close(log_var["weight"].detach().exp(), 1 / precision.diagonal().unsqueeze(0), rtol=1e-2, atol=0)


def test_variational_inference_through_a_network():
    x = torch.linspace(-2, 2, 40).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1)
    engine, mean, log_var = engine_of(mlp(1, 20, 1, activation=nn.Tanh), Gaussian(scale=0.1))
    losses = fitted(engine, mean, log_var, x, y, 0.1, 500)
    assert losses[-1] < 0.2 * losses[0]
    model = Model(mlp(1, 20, 1, activation=nn.Tanh), Gaussian(scale=0.1))
    posterior = Posterior.diagonal(
        model, {n: m.detach() for n, m in mean.items()}, {n: s.detach().exp() for n, s in log_var.items()}
    )
    p = as_module(posterior, x)(x)
    draws = posterior.predict(x, "sampled", draws=2000)
    assert (p["mean"] - torch.sin(2 * x)).square().mean().sqrt() < 0.25
    torch.testing.assert_close(p["mean"], draws.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(p["total"].sqrt(), draws.uncertainty.total.sqrt(), rtol=0.15, atol=0)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + torch.tanh(self.inner(x)))


def test_the_adjoint_of_what_is_no_chain():
    """The first time, and for another number of examples."""
    posterior, x = around(Around()), torch.randn(6, 4)
    found = as_module(posterior, x, how="adjoint")(x[:4])
    torch.testing.assert_close(found["f_cov"].diagonal(dim1=1, dim2=2), posterior.predict(x[:4], "adjoint").f_var)


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "likelihood", "x", "y"),
    [
        (mlp(4, 8, 3), Categorical(), torch.randn(12, 4), torch.arange(12) % 3),
        (mlp(4, 8, 2), Gaussian(), torch.randn(12, 4), torch.randn(12, 2)),
        (mlp(4, 8, 2), HeteroscedasticGaussian(), torch.randn(12, 4), torch.randn(12, 1)),
        (cnn(), Categorical(), torch.randn(12, 1, 6, 6), torch.arange(12) % 3),
        (nn.Conv2d(1, 3, 1), Categorical(dim=1), torch.randn(6, 1, 4, 4), torch.randint(3, (6, 4, 4))),
    ],
    ids=["classes", "noise of each", "predicted noise", "batch norm", "pixels"],
)
@pytest.mark.parametrize("method", [dubito.Ensemble(dubito.MAP(epochs=2, learning_rate=0.05), 3), dubito.MAP(epochs=2)])
def test_members_side_by_side_predict_as_the_samples_do(network, likelihood, x, y, method):
    posterior = dubito.fit(Model(network, likelihood), method, (x, y))
    before = {name: leaf.clone() for name, leaf in network.state_dict().items()}
    module, p = as_module(posterior, x), posterior.predict(x)
    found, split = module(x), p.uncertainty
    expected = {"mean": p.mean, "total": split.total, "aleatoric": split.aleatoric, "epistemic": split.epistemic}
    torch.testing.assert_close({key: found[key] for key in expected}, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close((found["f_mean"], found["f_cov"]), (p.f_mean, p.f_var), atol=1e-5, rtol=1e-4)
    program = torch.export.export(module, (x[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x), found, atol=1e-5, rtol=1e-4)
    assert all(torch.equal(leaf, before[name]) for name, leaf in network.state_dict().items())


def test_members_of_unequal_weights():
    posterior = dubito.fit(
        Model(mlp(4, 3), Categorical()), dubito.Ensemble(dubito.MAP(epochs=1), 2), (torch.randn(6, 4), torch.arange(6) % 3)
    )
    x, weighted = torch.randn(5, 4), replace(posterior, weights=torch.tensor([0.9, 0.1]))
    torch.testing.assert_close(as_module(weighted, x)(x)["mean"], weighted.predict(x).mean)
    with pytest.raises(ValueError, match="leave out `how`"):
        as_module(posterior, x, how="adjoint")


def test_members_take_inputs_by_name():
    data = {"left": torch.randn(6, 4), "right": torch.randn(6, 3), "labels": torch.arange(6) % 3}
    posterior = dubito.fit(Model(TwoInputs(), Categorical()), dubito.Ensemble(dubito.MAP(epochs=1), 2), [data])
    x = {name: data[name] for name in ("left", "right")}
    torch.testing.assert_close(as_module(posterior, x)(**x)["mean"], posterior.predict(x).mean)


def test_members_in_double_precision_are_averaged_in_it():
    """With weights of 1/3 in float32 the mean would be wrong in the eighth digit."""
    model = Model(mlp(3, 4, 1).double(), Gaussian(scale=0.1))
    draws = {name: torch.stack([leaf, leaf + 1, leaf - 2]) for name, leaf in model.parameters().items()}
    posterior, x = dubito.posteriors.Samples(model, draws, model.buffers()), torch.randn(7, 3, dtype=torch.float64)
    module, p = as_module(posterior, x[:2]), posterior.predict(x)
    torch.testing.assert_close(module(x)["mean"], p.mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(module(x)["epistemic"], p.uncertainty.epistemic, rtol=1e-12, atol=1e-12)
