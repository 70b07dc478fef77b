"""Images and texts: exact covariances of every pixel and token, in bounded memory, against Jacobians written out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from curvature.networks import DOUBLE, ggn, moved, numbers, output, targets, tokens
from dubito import Categorical, HeteroscedasticCategorical, HeteroscedasticGaussian, Model, NextToken
from dubito.curvature import Spec, curvature
from dubito.inference.plan import _Tracked
from dubito.model.likelihoods.likelihood import nodes
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.linearized import Linearization, linearized, sweep
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.covariances import Covariance, Diagonal
from posteriors.predict.test_linearized import STRUCTURES, covariance_of, exact


class UNet(nn.Module):
    """Down and up again, with a skip connection."""

    def __init__(self, outputs: int, width: int = 2):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, width, 3, padding=1), moved(nn.BatchNorm2d(width))
        self.down = nn.Conv2d(width, width + 1, 3, padding=1)
        self.up = nn.ConvTranspose2d(width + 1, width, 2, stride=2)
        self.last, self.head = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.norm(self.first(x)))
        low = torch.tanh(self.down(nn.functional.max_pool2d(skip, 2)))
        return self.head(torch.tanh(self.last(torch.cat([skip, self.up(low)], 1))))


class Reader(nn.Module):
    """Words, each by itself and the one before."""

    def __init__(self, words: int, width: int = 3):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(words, width), nn.Linear(2 * width, width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        before = nn.functional.pad(h, (0, 0, 1, 0))[:, :-1]
        return self.head(torch.tanh(self.mix(torch.cat([h, before], -1))))


LIKELIHOODS = {"classes": Categorical(dim=1), "numbers": HeteroscedasticGaussian(dim=1), "noisy classes": None}


def images(name: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    likelihood = LIKELIHOODS[name] or HeteroscedasticCategorical(dim=1, samples=8)
    return Model(UNet(4 if likelihood.discrete else 2).double(), likelihood), numbers(3, 1, 6, 4)


def drawn_targets(model: Model, x: Tensor) -> Tensor:
    """Classes [B, H, W], or numbers [B, 1, H, W]."""
    y = targets(model, model.parameters(), x)
    return y if model.likelihood.indexed else y.movedim(-1, 1)


def covariance_at(model: Model, x: Tensor, structure: str) -> Covariance:
    """A covariance of this structure, for pixels that have channels first."""
    if model.likelihood.dim == -1:
        return covariance_of(model, model.parameters(), x, structure)
    changed = replace(model, likelihood=replace(model.likelihood, dim=-1), output=lambda f: f.movedim(1, -1))
    return covariance_of(changed, model.parameters(), x, structure)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["classes", "numbers"])
def test_every_pixel_of_a_u_net_in_every_structure(name, structure):
    model, x = images(name)
    params, buffers = model.parameters(), model.buffers()
    covariance = covariance_at(model, x, structure)
    p = linearized(model, x, params=params, buffers=buffers, covariance=covariance)
    truth = exact(model, params, x, covariance)
    assert p.how == ""
    torch.testing.assert_close(p.means[0], output(model, params, x))
    torch.testing.assert_close(p.cov[0], truth, rtol=1e-7, atol=1e-9)
    small = linearized(model, x, params=params, buffers=buffers, covariance=covariance, memory=1e-9)
    torch.testing.assert_close(small.cov, p.cov)
    assert torch.isfinite(p.log_prob(drawn_targets(model, x))).all()
    largest = linearized(model, x, params=params, buffers=buffers, covariance=covariance, top=1, memory=1e-9)
    index = p.f_mean.topk(1).indices
    torch.testing.assert_close(largest.f_var.gather(-1, index), p.f_var.gather(-1, index))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_curvature_of_a_u_net(name):
    model, x = images(name)
    params, y = model.parameters(), drawn_targets(model, x)
    wanted = ggn(model, params, x, y)
    for structure in ("dense", "diagonal"):
        found = curvature(model, params, [(x, y)], model.buffers(), spec=Spec(structure, draws=0), prior=1.0)
        inside = torch.linalg.inv(found.dense()) - torch.eye(len(wanted), dtype=DOUBLE)
        torch.testing.assert_close(inside, wanted if structure == "dense" else torch.diag(wanted.diag()), rtol=1e-6, atol=1e-8)


# --- the output layer alone: its Jacobian is its input, at every position ------------------------------------------------


def heads() -> dict[str, Callable[[], tuple[Model, Tensor, Tensor]]]:
    def scene(likelihood, kernel: int = 1, **options):
        net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, kernel, padding=kernel // 2, **options))
        x = numbers(3, 1, 5, 4)
        shape = (3, 5, 4) if likelihood.indexed else (3, 2, 5, 4)
        y = torch.randint(4, shape) if likelihood.indexed else numbers(*shape)
        y[0, ..., 1:] = 255 if likelihood.indexed else torch.nan
        return Model(net.double(), likelihood, only="^2"), x, y

    def text():
        x = tokens(4, 6)
        y = x.clone()
        y[1, 3:] = -100
        y[2] = -100
        return Model(Reader(7).double(), NextToken(), only="head"), x, y

    return {
        "pixels": lambda: scene(Categorical(dim=1, ignore_index=255)),
        "pixels, 3 x 3": lambda: scene(Categorical(dim=1, ignore_index=255), 3),
        "pixels, no bias": lambda: scene(Categorical(dim=1, ignore_index=255), bias=False),
        "numbers": lambda: scene(HeteroscedasticGaussian(dim=1, missing=True)),
        "text": text,
    }


@pytest.mark.parametrize("name", heads())
@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
def test_the_output_layer_alone_at_every_position(name, structure, monkeypatch):
    torch.manual_seed(0)
    model, x, y = heads()[name]()
    params, buffers = model.parameters(), model.buffers()
    covariance = curvature(model, params, [(x, y)], buffers, spec=Spec(structure), prior=0.6)
    wanted = ggn(model, params, x, y)
    if structure != "kronecker":
        inside = torch.linalg.inv(covariance.dense()) - 0.6 * torch.eye(len(wanted), dtype=DOUBLE)
        torch.testing.assert_close(inside, wanted if structure == "dense" else torch.diag(wanted.diag()), rtol=1e-6, atol=1e-8)
    else:
        with monkeypatch.context() as patch:  # by cotangents of every position
            patch.setattr("dubito.curvature.statistics.LayerStatistic.closed", lambda self, layout: False)
            plain = curvature(model, params, [(x, y)], buffers, spec=Spec(structure), prior=0.6)
        torch.testing.assert_close(covariance.dense(), plain.dense())
    truth = exact(model, params, x, covariance)
    monkeypatch.setattr(Linearization, "_block", None)  # nothing is propagated back
    for memory in (1.0, 1e-9):
        p = linearized(model, x, params=params, buffers=buffers, covariance=covariance, memory=memory)
        torch.testing.assert_close(p.cov[0], truth)
        top = linearized(model, x, params=params, buffers=buffers, covariance=covariance, memory=memory, top=1)
        torch.testing.assert_close(top.f_var, p.f_var)
        assert top.cov.ndim == top.means.ndim
    assert top.how == "linearized, variances alone"


@pytest.mark.parametrize("structure", ["lowrank", "subnetwork"])
def test_the_largest_outputs_of_an_output_layer_of_another_structure(structure):
    torch.manual_seed(0)
    model, x, _ = heads()["text"]()
    params, buffers = model.parameters(), model.buffers()
    covariance = covariance_at(model, x, structure)
    truth = exact(model, params, x, covariance).diagonal(dim1=-2, dim2=-1)
    p = linearized(model, x, params=params, buffers=buffers, covariance=covariance, top=2)
    assert p.how == "linearized, 2 largest outputs, others by 30 draws"
    index = p.f_mean.topk(2).indices
    torch.testing.assert_close(p.f_var.gather(-1, index), truth.gather(-1, index))
    assert bool(((p.f_var > 0) | (truth == 0)).all())


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "lowrank"])
@pytest.mark.parametrize("name", ["pixels", "text"])
def test_a_sweep_over_priors_at_every_position(name, structure):
    torch.manual_seed(0)
    model, x, _ = heads()[name]()
    params, buffers = model.parameters(), model.buffers()
    covariance = covariance_at(model, x, structure)
    known = {"params": params, "buffers": buffers}
    for factor, p in zip((0.5, 4.0), sweep(model, x, **known, covariance=covariance, factors=(0.5, 4.0)), strict=True):
        alone = linearized(model, x, **known, covariance=covariance.times(factor))
        torch.testing.assert_close(p.covariances, alone.covariances)


def test_a_transposed_map_is_no_output_layer():
    """The head's pixels come in another order than those of the output."""

    class Turned(nn.Sequential):
        def forward(self, x):
            return super().forward(x).permute(0, 3, 2, 1)

    model = Model(Turned(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double(), Categorical(), only="^2")
    x, params = numbers(2, 1, 4, 4), model.parameters()
    covariance = covariance_of(model, params, x, "kronecker")
    p = linearized(model, x, params=params, buffers=model.buffers(), covariance=covariance)
    torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance))


def test_channels_that_are_not_the_outputs_are_no_output_layer():
    """Logits along the width of an image: the last axis is not that of the convolution's channels."""
    model = Model(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double(), Categorical(), only="^2")
    x, params = numbers(2, 1, 4, 3), model.parameters()
    covariance = covariance_of(model, params, x, "kronecker")
    p = linearized(model, x, params=params, buffers=model.buffers(), covariance=covariance)
    torch.testing.assert_close(p.cov[0], exact(model, params, x, covariance))


# --- many words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_largest_outputs_of_a_text(structure, monkeypatch):
    torch.manual_seed(0)
    model, x = Model(Reader(9).double(), NextToken()), tokens(3, 5)
    params = model.parameters()
    covariance = covariance_of(model, params, x, structure)
    known = {"params": params, "buffers": {}, "covariance": covariance}
    truth = exact(model, params, x, covariance).diagonal(dim1=-2, dim2=-1)
    sources = [torch.Generator().manual_seed(1) for _ in range(4)]
    p = linearized(model, x, **known, top=3, generator=sources[0])
    assert p.how == "linearized, 3 largest outputs, others by 30 draws"
    largest = torch.zeros_like(p.f_mean).scatter(-1, p.f_mean.topk(3).indices, 1).bool()
    torch.testing.assert_close(p.f_var[largest], truth[largest])
    drawn = linearized(model, x, **known, draws=30, generator=sources[1])
    square = (drawn.means - output(model, params, x)).square().mean(0)
    torch.testing.assert_close(p.f_var[~largest], square[~largest])
    small = linearized(model, x, **known, top=3, memory=1e-9, generator=sources[2])
    torch.testing.assert_close(small.f_var, p.f_var)
    many = linearized(model, x, **known, top=3, draws=600, generator=sources[3])
    ratio = (many.f_var / truth)[~largest & (truth > 0)]  # a subnetwork leaves some words certain
    assert float(ratio.mean()) == pytest.approx(1, abs=0.05)
    assert linearized(model, x, **known, top=9).cov.ndim == 5
    posterior = Posterior(model, params, {}, covariance)
    torch.testing.assert_close(posterior.predict(x, top=3, seed=1).f_var[largest], truth[largest])
    with pytest.raises(ValueError, match="top must be at least 1"):
        posterior.predict(x, top=0)
    with pytest.raises(ValueError, match='top is for how="linearized" or how="adjoint"'):
        posterior.predict(x, "sampled", top=2)


def test_the_largest_outputs_of_a_text_by_the_adjoint():
    torch.manual_seed(0)
    model, x = Model(Reader(9).double(), NextToken()), tokens(3, 5)
    params = model.parameters()
    posterior = Posterior.diagonal(model, params, {name: torch.full_like(leaf, 0.01) for name, leaf in params.items()})
    whole, some = posterior.predict(x, "adjoint"), posterior.predict(x, "adjoint", top=2)
    forward = posterior.predict(x, "streamlined", rank=0)
    largest = torch.zeros_like(whole.f_mean).scatter(-1, whole.f_mean.topk(2).indices, 1).bool()
    assert some.how == "adjoint, 2 largest outputs"
    torch.testing.assert_close(some.f_var[largest], whole.f_var[largest])
    torch.testing.assert_close(some.f_var[~largest], forward.f_var[~largest])


def test_draws_only_where_covariances_are_too_many(monkeypatch):
    model, x = Model(Reader(30).double(), NextToken(), only="head"), tokens(2, 5)
    params = model.parameters()
    kronecker = covariance_of(model, params, x, "kronecker")
    diagonal = Diagonal.of({name: torch.ones_like(leaf) for name, leaf in params.items()})
    monkeypatch.setattr("dubito.posteriors.predict.linearized.MATRICES", 5 * 30 * 30 - 1)
    posterior = Posterior(model, params, model.buffers(), kronecker)
    assert posterior.predict(x).how == "linearized, 30 draws"
    assert posterior.predict(x, draws=0).cov.shape == (1, 2, 5, 30, 30)
    assert posterior.predict(x, top=4).cov.shape == (1, 2, 5, 30)
    for module in ("dubito.posteriors.predict.linearized", "dubito.tensors.covariances.diagonal"):
        monkeypatch.setattr(f"{module}.WIDE", 20)
    p = Posterior(model, params, model.buffers(), diagonal).predict(x)
    assert p.cov.shape == (1, 2, 5, 30)
    torch.testing.assert_close(p.f_var, exact(model, params, x, diagonal).diagonal(dim1=-2, dim2=-1))
    for draws, form in ((-1, posterior), (0, Posterior(model, params, model.buffers(), diagonal, how="sampled"))):
        with pytest.raises(ValueError, match="draws must be at least 1"):
            form.predict(x, draws=draws)


# --- memory --------------------------------------------------------------------------------------------------------------


def peak(call: Callable[[], object]) -> int:
    """Bytes of all tensors that are alive at once."""
    tracked = _Tracked()
    with tracked:
        call()
    return tracked.peak


@pytest.mark.parametrize("top", [None, 10])
def test_covariances_stay_within_the_memory(top, monkeypatch):
    """Outputs whose gradients in the weights of a layer are a megabyte together."""
    monkeypatch.setattr("dubito.tensors.covariances.covariance.DRAWN", 0)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 64, 3, padding=1), nn.Tanh(), nn.Conv1d(64, 64, 3, padding=1), nn.Tanh(), nn.Conv1d(64, 12, 1)
    )
    model, x = Model(net, Categorical(dim=1)), torch.randn(4, 1, 4)
    params = model.parameters()
    posterior = Posterior.diagonal(model, params, {name: torch.full_like(leaf, 0.01) for name, leaf in params.items()})
    model.forward(params, x, {})
    posterior.predict(x, draws=0)  # what is cached is there
    result, bound = 4 * x.numel() * 12 * (13 if top is None else 2), 2**20
    assert peak(lambda: posterior.predict(x, draws=None if top else 0, memory=100.0, top=top)) > result + bound
    assert peak(lambda: posterior.predict(x, draws=None if top else 0, memory=bound / 2**30, top=top)) <= result + bound


@pytest.mark.parametrize("how", ["linearized", "sampled"])
def test_draws_are_held_once(how):
    model, x = Model(Reader(2000), NextToken()), tokens(4, 32)
    params = model.parameters()
    posterior = Posterior.diagonal(model, params, {name: torch.full_like(leaf, 0.01) for name, leaf in params.items()})
    logits, bound = 4 * x.numel() * 2000, 8 * 2**20
    taken = peak(lambda: posterior.predict(x, how, draws=30, memory=bound / 2**30))
    assert 30 * logits < taken <= 31 * logits + bound + 2**18


@pytest.mark.parametrize("form", ["draws", "variances"])
def test_probabilities_of_many_words_are_formed_a_few_positions_at_a_time(form, monkeypatch):
    monkeypatch.setattr("dubito.posteriors.predictive.classes.MANY", 2**20)
    x = tokens(4, 64)
    means = torch.randn(6 if form == "draws" else 1, 4, 64, 2000)
    p = LatentMixture(NextToken(), means, None if form == "draws" else torch.rand_like(means))
    logits = 4 * x.numel() * 2000
    nodes = 128 * 2000 * 8 * 6  # of one position
    assert peak(lambda: p.log_prob(x)) < 2 * logits + nodes
    assert peak(lambda: p.uncertainty) < 5 * logits + nodes  # it was 12 and 300 times as much


@pytest.mark.parametrize("form", ["draws", "variances", "covariances", "root", "random nodes", "noisy"])
def test_pieces_of_positions_give_the_whole(form, monkeypatch):
    torch.manual_seed(0)
    classes, likelihood, params = 24, Categorical(scale=None, ignore_index=9), {"likelihood:log_scale": 0.1 * torch.randn(3, 1)}
    means = torch.randn(3, 4, 5, classes)
    weights, y = torch.tensor([0.2, 0.3, 0.5]), torch.randint(24, (4, 5))
    root = 0.3 * torch.randn(3, 4, 5, classes, 7)
    spread = {
        "draws": {},
        "variances": {"cov": torch.rand_like(means)},
        "covariances": {"cov": root @ root.mT},
        "root": {"root": root},
        "random nodes": {"cov": torch.rand_like(means), "link": "mc"},
        "noisy": {},
    }[form]
    if form == "noisy":
        likelihood, params, y = HeteroscedasticCategorical(samples=8), {}, y % 12

    def told():
        p = LatentMixture(likelihood, means, weights=weights, params=params, **spread)
        return p.mean, p.log_prob(y), p.uncertainty.total, p.uncertainty.epistemic, p.log_forecasts

    whole = told()
    monkeypatch.setattr("dubito.posteriors.predictive.classes.MANY", 0)
    monkeypatch.setattr("dubito.posteriors.predictive.classes.CACHE", 4 * 128 * 24 * 3)
    for a, b in zip(told(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nodes_of_more_outputs_than_sobol_sequences_have():
    unit = nodes(128, torch.empty(1, 30_000, dtype=DOUBLE))
    assert unit.shape == (128, 30_000)
    assert torch.equal(unit, nodes(128, torch.empty(1, 30_000, dtype=DOUBLE)))
    torch.testing.assert_close(unit.sum(0), torch.zeros(30_000, dtype=DOUBLE))
    torch.testing.assert_close(unit.square().mean(0), torch.ones(30_000, dtype=DOUBLE))
    torch.testing.assert_close(unit.exp().mean(0), torch.full((30_000,), 0.5, dtype=DOUBLE).exp(), rtol=0.25, atol=0)
    together = unit[:, :200].mT @ unit[:, :200] / 128
    assert float((together - torch.diag(together.diag())).abs().max()) < 0.6


def test_predictions_are_freed_when_nobody_holds_them():
    """Its own nodes were itself, in its own cache, so that all draws waited for the garbage collector."""
    gc.disable()
    try:
        p = LatentMixture(Categorical(), torch.randn(3, 4, 5))
        gone = weakref.ref(p)
        assert p.mean.shape == (4, 5)
        assert p.log_prob(torch.zeros(4).long()).shape == (4,)
        del p
        assert gone() is None
    finally:
        gc.enable()


def test_the_probit_of_many_words_needs_no_matrices():
    means, variances = torch.randn(1, 4, 3000), torch.rand(1, 4, 3000)
    p = LatentMixture(Categorical(), means, variances, link="probit")
    expected = (means[0] / (1 + torch.pi / 8 * variances[0]).sqrt()).softmax(-1)
    torch.testing.assert_close(p.mean, expected)
    assert peak(lambda: LatentMixture(Categorical(), means, variances, link="probit").mean) < 20 * means.numel() * 4
