"""What users ran into, or would have: one test a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dubito
from dubito import MAP, Categorical, Ensemble, Gaussian, MCDropout, Model, MultiTask
from dubito.inference.batches import batches
from dubito.posteriors.predict.sampled import _KNOWN

X, LABELS = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 3


def test_learned_noise_starts_somewhere_when_the_first_batch_is_constant():
    y = torch.zeros(1000, 1)
    y[500], y[7] = 5, 3
    p = dubito.fit(Model(nn.Linear(4, 1), Gaussian()), MAP(epochs=5), (torch.randn(1000, 4), y), batch_size=32)
    assert p.params["likelihood:log_scale"].item() > -3
    assert p.predict(torch.zeros(1, 4)).log_prob(torch.zeros(1, 1)).item() > -10


def test_frozen_parameters_stay():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    for method in (MAP(epochs=2), Ensemble(MAP(epochs=2), 2)):
        posterior = dubito.fit(Model(net, Categorical()), method, (X, LABELS))
        assert set(posterior.params) == {"2.weight", "2.bias"}
        assert torch.equal(posterior.buffers["0.weight"], net[0].weight)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        dubito.fit(Model(net, Categorical()), MAP(epochs=1), (X, LABELS))


def test_a_network_that_changes_its_input_is_refused():
    class Mutating(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            x -= 5
            return self.linear(x)

    x = X.clone()
    with pytest.raises(ValueError, match="in place"):
        dubito.fit(Model(Mutating(), Categorical()), MAP(epochs=1), (x, LABELS))
    assert torch.equal(x, X)


def test_parametrized_layers_are_not_silently_left_alike_or_undropped():
    norm = nn.utils.parametrizations.weight_norm
    model = Model(nn.Sequential(norm(nn.Linear(4, 16)), nn.ReLU(), norm(nn.Linear(16, 3))), Categorical())
    ensemble = dubito.fit(model, Ensemble(MAP(epochs=0), 2), (X, LABELS))
    assert not any(torch.equal(*leaf) for leaf in ensemble.params.values())
    with pytest.raises(ValueError, match=r"\['0', '2'\].*parametrized"):
        dubito.fit(model, MCDropout(epochs=1, at=""), (X, LABELS))


def test_tied_embeddings_are_dropped_as_words_only():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.dec = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            self.dec.weight = self.emb.weight

        def forward(self, ids):
            return self.dec(self.emb(ids))

    ids = torch.randint(0, 11, (50,))
    posterior = dubito.fit(Model(Tied(), Categorical()), MCDropout(epochs=1, at="emb", rate=0.3, draws=20), (ids, ids))
    assert (posterior.predict(ids).uncertainty.epistemic > 0).any()
    with pytest.raises(ValueError, match=r"\['dec'\].*tied"):
        dubito.fit(Model(Tied(), Categorical()), MCDropout(epochs=1, at="dec"), (ids, ids))
    model = Model(Tied(), Categorical())
    every, words = (dubito.fit(model, MCDropout(epochs=1, at=at), (ids, ids)) for at in ("", "emb"))
    torch.testing.assert_close(every.predict(ids).mean, words.predict(ids).mean)


def test_activations_that_others_see_are_not_folded():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.s, self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8)), nn.Linear(8, 3)

        def forward(self, x):
            z = self.s[2](self.s[1](self.s[0](x)))
            return self.head(self.s[3](z) + z)

    _KNOWN.clear()
    posterior = dubito.fit(Model(Skip(), Categorical()), MCDropout(epochs=1), (X, LABELS))
    first = posterior.predict(X, draws=20).means
    for memory in (1.0, 1e-3, 1e-5):
        assert torch.allclose(posterior.predict(X, draws=20, memory=memory).means, first, atol=1e-5)


def test_the_last_batch_is_never_a_single_example():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = Model(net, Categorical())
    assert [len(y) for _, y in batches(model, (X[:65], LABELS[:65]), size=64)] == [32, 33]
    posterior = dubito.fit(model, Ensemble(MAP(epochs=1), 2), (X[:65], LABELS[:65]), batch_size=64)
    assert posterior.predict(X).mean.shape == (100, 3)


def test_networks_that_cannot_run_batched_still_make_ensembles():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            h = self.linear(x)
            return h if h.mean() > 0 else -h

    posterior = dubito.fit(Model(Branching(), Categorical()), Ensemble(MAP(epochs=1), 2), (X, LABELS))
    assert posterior.predict(X).mean.shape == (100, 3)
    with pytest.raises(RuntimeError, match="vectorize=False"):
        dubito.fit(Model(Branching(), Categorical()), Ensemble(MAP(epochs=1), 2, vectorize=True), (X, LABELS))


def test_scalar_parameters_are_clipped_in_stacked_members():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.t, self.linear = nn.Parameter(torch.tensor(1.0)), nn.Linear(4, 3)

        def reset_parameters(self):
            nn.init.constant_(self.t, 2.0)

        def forward(self, x):
            return self.linear(x) * self.t

    with pytest.warns(UserWarning, match="t is not as initialized"):
        posterior = dubito.fit(Model(Scaled(), Categorical()), Ensemble(MAP(epochs=1, clip=1.0), 2), (X, LABELS))
    assert posterior.params["t"].shape == (2,)


def test_arrays_lists_and_batches_without_labels():
    model = Model(nn.Linear(4, 3), Categorical())
    posterior = dubito.fit(model, MAP(epochs=1), (X.double().numpy(), LABELS.numpy()))
    p = posterior.predict(X.numpy().astype(np.float64))
    assert p.log_prob(LABELS.numpy()).shape == (100,)
    named = dubito.fit(Model(nn.Linear(4, 3), Categorical()), MAP(epochs=1), (X, LABELS))
    assert named.predict_loader([{"input": X}])[1] is None
    with pytest.raises(TypeError, match=r"predict\(x\)"):
        posterior.predict_loader((X, LABELS))
    with pytest.raises(TypeError, match=r"predict\(x\)"):
        posterior.predict_loader(TensorDataset(X, LABELS))
    listed = dubito.fit(model, MAP(epochs=1), (X.tolist(), LABELS.tolist()))
    assert torch.equal(listed.params["weight"], dubito.fit(model, MAP(epochs=1), (X, LABELS)).params["weight"])


def test_a_task_keeps_the_layout_of_all():
    tasks = MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(), 3)}, dim=1)
    images = torch.randn(4, 2, 5, 6)
    y = {"depth": torch.randn(4, 1, 5, 6), "label": torch.randint(0, 3, (4, 5, 6))}
    p = dubito.fit(Model(nn.Conv2d(2, 4, 1), tasks), MAP(epochs=1), [(images, y)]).predict(images)
    whole = p.log_prob(y)
    parts = p.task("depth").log_prob(y["depth"]) + p.task("label").log_prob(y["label"])
    assert torch.allclose(whole, parts, rtol=1e-4)


def test_a_start_that_would_be_ignored_is_refused():
    model = Model(nn.Linear(4, 3), Categorical())
    posterior = dubito.fit(model, MAP(epochs=1), (X, LABELS))
    with pytest.raises(ValueError, match="members are initialized anew"):
        dubito.fit(model, Ensemble(MAP(epochs=1), 2), (X, LABELS), start=posterior)


def test_more_noise_scales_than_outputs_is_said_in_words():
    with pytest.raises(ValueError, match="3 noise scales, but the network has 1"):
        dubito.fit(Model(nn.Linear(4, 1), Gaussian(outputs=3)), MAP(epochs=1), (X, X[:, :1]))
    with pytest.raises(ValueError, match="no parameters"):
        Model(nn.ReLU(), Categorical())
