"""Members of an ensemble on processes of their own."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import dubito
from distributed_ranks import errors, on_ranks
from dubito import MAP, Ensemble, priors
from dubito.posteriors import Mixture, Samples
from dubito.tensors import tree

N = 37
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X).sum(1, keepdim=True) + 0.1 * torch.randn(N, 1, generator=GENERATOR, dtype=torch.float64)


def model(*layers, scale=None):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), *layers, nn.Tanh(), nn.Linear(6, 1)).double()
    return dubito.Model(net, dubito.Gaussian(scale=scale), priors.Normal())


def fit(method, data=(X, Y), *, of=None, **settings):
    return dubito.fit(of or model(), method, data, **{"batch_size": 10, "progress": False, **settings})


def tensors(posterior):
    """Everything that makes a posterior, by names."""
    if isinstance(posterior, Mixture):
        return {f"{i}/{name}": leaf for i, one in enumerate(posterior.members) for name, leaf in tensors(one).items()}
    p = posterior.predict(X[:5])
    center = {} if posterior.center is None else posterior.center[0]
    own = {**posterior.params, **posterior.own_buffers} if isinstance(posterior, Samples) else {}
    return {"mean": p.mean, "epistemic": p.uncertainty.epistemic, **center, **own}


SHORT = MAP(epochs=4, check=False)
ENSEMBLES = {
    "deep": (Ensemble(5), {}),
    "of modes, one by one": (Ensemble(SHORT, 5, vectorize=False), {}),
    "anchored": (Ensemble(SHORT, 5, anchored=True), {"of": model(scale=0.5)}),
    "bagged, with adversaries": (Ensemble(SHORT, 5, bagging=True, adversarial=0.01), {}),
    "tempered": (Ensemble(SHORT, 5), {"temperature": 0.5}),
    "with BatchNorm": (Ensemble(SHORT, 5, keep="3", perturb=0.1), {"of": model(nn.BatchNorm1d(6))}),
    "of Laplace": (Ensemble(dubito.Laplace(check=False), 5, start=SHORT), {"temperature": 0.5}),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_members_on_processes_of_their_own_are_those_of_one_process(name):
    method, settings = ENSEMBLES[name]
    if name == "deep":
        method = replace(method, method=replace(method.method, epochs=8))

    def work(rank):
        return fit(method, **settings)

    alone = fit(method, distributed=False, **settings)
    for result in on_ranks(3, work):
        assert (type(result), result.label) == (type(alone), alone.label)
        for key, leaf in tensors(alone).items():
            torch.testing.assert_close(tensors(result)[key], leaf, rtol=1e-8, atol=1e-8, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("name", ["of HMC", "with dropout"])
def test_what_is_random_in_training_is_independent_on_every_process(name):
    """Members that begin at the same weights, so that nothing but random numbers tells them apart."""
    sampler = dubito.HMC(0.01, chains=2, draws=3, burn_in=0, tune=False)
    of = model(nn.Dropout(0.5)) if name == "with dropout" else model(scale=0.5)
    method = Ensemble(SHORT if name == "with dropout" else sampler, 2)

    def work(rank):
        return fit(method, of=of, start=[of.parameters()] * 2, temperature=0.5)

    one, other = on_ranks(2, work)
    assert one.label == "tempered (T = 0.5)"
    assert all(torch.equal(leaf, tensors(other)[key]) for key, leaf in tensors(one).items())
    first, second = (
        (part.params for part in one.members) if isinstance(one, Mixture) else map(tree.select, [one.params] * 2, [0, 1])
    )
    assert not any(torch.equal(leaf, second[key]) for key, leaf in first.items())


def test_a_run_of_members_goes_on_to_the_same_bits(tmp_path):
    def stop(event):
        return event.step == 7

    def work(rank):
        whole = fit(Ensemble(SHORT, 3))
        fit(Ensemble(SHORT, 3), checkpoint=tmp_path, callbacks=[stop])
        return whole, fit(Ensemble(SHORT, 3), checkpoint=tmp_path, resume=True)

    for whole, resumed in on_ranks(2, work):
        assert all(torch.equal(leaf, tensors(resumed)[key]) for key, leaf in tensors(whole).items())
    found = errors(3, lambda rank: fit(Ensemble(SHORT, 3), checkpoint=tmp_path, resume=True))
    assert all("holds a run with another number of processes (process-" in one for one in found), found


def test_members_on_a_mesh_of_chains():
    def work(rank):
        return fit(Ensemble(SHORT, 3), distributed=init_device_mesh("cpu", (2, 1), mesh_dim_names=("chains", "data")))

    alone = tensors(fit(Ensemble(SHORT, 3), distributed=False))
    for result in on_ranks(2, work):
        for key, leaf in alone.items():
            torch.testing.assert_close(tensors(result)[key], leaf, rtol=1e-8, atol=1e-8)


def own_loader(rank):
    return DataLoader(TensorDataset(X[rank::2], Y[rank::2]), batch_size=10)


REFUSED = {
    "fewer members than processes": (
        lambda rank: fit(Ensemble(SHORT, 1)),
        "Ensemble cannot run on 2 processes: its members (1) run",
    ),
    "data of their own": (
        lambda rank: fit(Ensemble(SHORT, 2), own_loader(rank)),
        "Ensemble cannot run on 2 processes: its members (2)",
    ),
    "validation": (lambda rank: fit(Ensemble(SHORT, 2), validation=(X, Y)), "validation scores all 2 members together"),
    "other weights": (
        lambda rank: fit(Ensemble(SHORT, 2, keep="0", perturb=0.1), start={k: v + rank for k, v in model().parameters().items()}),
        "the processes differ in weights of the network",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_every_process(name):
    work, words = REFUSED[name]
    found = errors(2, work)
    assert all(words in one for one in found), found


@pytest.mark.parametrize("slow", [0, 1])
def test_a_process_that_fails_ends_those_that_train_other_members_or_have_done_so(slow):
    def work(rank):
        def callback(event):
            if rank == slow:
                time.sleep(0.05)
            if rank == 0 and event.step == 40:
                raise KeyError("lost")

        began = time.monotonic()
        try:
            fit(Ensemble(MAP(epochs=200 if slow else 20, check=False), 2), callbacks=[callback])
        except Exception as error:
            return time.monotonic() - began, str(error)

    (_, _), (seconds, words) = on_ranks(2, work, seconds=60)
    assert words == "process 0 of 2 has failed: KeyError: 'lost'"
    assert seconds < 20, "long before the 40 seconds that all steps would take, or the minutes of an exchange"
