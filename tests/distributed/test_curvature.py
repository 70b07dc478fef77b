"""Curvature on any number of processes is that of one, to the rounding of float64."""

import shutil
import warnings

import pytest
import torch
from torch import nn

import dubito
from distributed_ranks import on_ranks
from dubito import priors
from dubito.tensors import processes
from dubito.tensors.covariances import kronecker

N = 37
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X).sum(1, keepdim=True) + 0.1 * torch.randn(N, 1, generator=GENERATOR, dtype=torch.float64)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def network(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, outputs)).double()


def regression(**options):
    return dubito.Model(network(1), dubito.Gaussian(**options), priors.Normal())


def classes():
    return dubito.Model(network(3), dubito.Categorical(), priors.Normal())


def tensors(model, method, data, **options):
    """The posterior of a fit by its covariance, its predictions and its evidence; and the log likelihoods that its steps have told."""
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = dubito.fit(
            model, method, data, progress=False, callbacks=[lambda e: told.append(float(e.info["log_likelihood"]))], **options
        )
    p = posterior.predict(X[:5])
    variance = posterior.covariance.variance()
    evidence = {"evidence": posterior.log_evidence()} if posterior.fitted is not None else {}
    steps = {"told": torch.tensor(told, dtype=torch.float64)}
    return {"mean": p.mean, "epistemic": p.uncertainty.epistemic, **variance, **evidence, **steps, **posterior.prior_precision}


def same(one, other, tolerance=1e-8):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        torch.testing.assert_close(other[name], leaf, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


Laplace = dubito.Laplace
METHODS = {
    "kronecker": (regression, Laplace()),
    "kronecker, classes": (classes, Laplace(prior_groups="one")),
    "diagonal": (regression, Laplace("diagonal")),
    "dense": (classes, Laplace("dense")),
    "low rank": (classes, Laplace("lowrank", rank=3)),
    "subnetwork": (classes, Laplace("dense", subnetwork=9)),
    "EKFAC": (regression, Laplace(corrected=True)),
    "last layer": (classes, Laplace("dense", subset="last_layer")),
    "reduce": (classes, Laplace(shared="reduce")),
    "fisher": (classes, Laplace(curvature="fisher")),
    "fisher, EKFAC": (classes, Laplace(curvature="fisher", corrected=True, draws=2)),
    "fisher of numbers": (regression, Laplace(curvature="fisher")),
    "fisher of a Student-t": (
        lambda: dubito.Model(network(1), dubito.StudentT(scale=0.5), priors.Normal()), Laplace("diagonal", curvature="fisher"),
    ),
    "drawn labels": (classes, Laplace("diagonal", draws=3)),
    "empirical": (classes, Laplace(curvature="empirical")),
    "hessian": (lambda: regression(scale=0.3), Laplace("dense", curvature="hessian", clip=True)),
    "hessian, low rank": (lambda: regression(scale=0.3), Laplace("lowrank", curvature="hessian", clip=True, rank=3)),
    "OnlineLaplace": (regression, dubito.OnlineLaplace(epochs=4, every=2)),
    "OnlineLaplace, fisher": (classes, dubito.OnlineLaplace(epochs=4, every=2, curvature="fisher")),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_processes_gives_the_posterior_of_one(name):
    make, method = METHODS[name]
    data = (X, Y if make().likelihood.discrete is False else CLASSES)
    alone = tensors(make(), method, data, batch_size=10)
    for size in (2, 4):
        for other in on_ranks(size, lambda rank: tensors(make(), method, data, batch_size=10)):
            same(alone, other)


@pytest.mark.parametrize("name", ["kronecker", "low rank", "subnetwork", "EKFAC", "fisher, EKFAC"])
def test_more_processes_than_examples_in_a_batch(name):
    make, method = METHODS[name]
    data = (X[:9], Y[:9] if make().likelihood.discrete is False else CLASSES[:9])
    alone = tensors(make(), method, data, batch_size=3, accumulate=2)
    for other in on_ranks(4, lambda rank: tensors(make(), method, data, batch_size=3, accumulate=2)):
        same(alone, other)


def test_uneven_batches_of_their_own_count_once():
    own = [[(X[:5], CLASSES[:5]), (X[5:10], CLASSES[5:10])], [(X[10:19], CLASSES[10:19])]]
    together = [(torch.cat([X[:5], X[10:19]]), torch.cat([CLASSES[:5], CLASSES[10:19]])), (X[5:10], CLASSES[5:10])]
    for name in ("fisher, EKFAC", "low rank"):
        make, method = METHODS[name]
        alone = tensors(make(), method, together)
        for other in on_ranks(2, lambda rank, make=make, method=method: tensors(make(), method, own[rank])):
            same(alone, other)


STOPPED = {"EKFAC": 2, "low rank": 6, "fisher, EKFAC": 5, "subnetwork": 4, "OnlineLaplace, fisher": 10}


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_that_is_stopped_between_batches_goes_on(name, tmp_path):
    make, method = METHODS[name]
    data = (X, Y if make().likelihood.discrete is False else CLASSES)

    def fit(folder, **options):
        whole = {"callbacks": [], **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = dubito.fit(make(), method, data, batch_size=10, checkpoint=folder, progress=False, **whole)
        return posterior.covariance.variance() if hasattr(posterior, "covariance") else {}

    alone = fit(None)
    on_ranks(2, lambda rank: fit(tmp_path / "2", callbacks=[lambda e: rank == 1 and e.step == STOPPED[name]]) and None)
    for size in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / str(size))
    for size in (2, 1, 3):
        for other in on_ranks(size, lambda rank, size=size: fit(tmp_path / str(size), resume=True)):
            same(alone, other)


def test_a_checkpoint_written_on_the_way_holds_the_sums_of_all(tmp_path):
    make, method = METHODS["EKFAC"]

    def fit(folder, **options):
        def late(event):
            if event.step == options.get("until"):
                raise ArithmeticError("enough")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resume, every = options.get("resume", False), options.get("every", 60.0)
            return dubito.fit(
                make(), method, (X, Y), batch_size=10, checkpoint=folder, checkpoint_every=every, resume=resume, callbacks=[late],
                progress=False,
            ).covariance.variance()  # fmt: skip

    def broken(rank):
        with pytest.raises(Exception, match="enough"):
            fit(tmp_path / "2", every=0.0, until=7)

    alone = fit(None)
    on_ranks(2, broken)
    for other in on_ranks(2, lambda rank: fit(tmp_path / "2", resume=True)):
        same(alone, other)


def test_every_layer_is_decomposed_by_one_process(monkeypatch):
    def work(rank):
        sizes = []

        def counted(matrix):
            sizes.append(len(matrix))
            return torch.linalg.eigh(matrix)

        monkeypatch.setattr(kronecker, "eigh", counted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dubito.fit(regression(scale=0.3), Laplace(optimize_evidence=False), (X, Y), batch_size=10, progress=False)
        return sizes

    first, second = on_ranks(2, work)
    assert sorted([*first, *second]) == sorted([3 + 1, 6, 6 + 1, 1])
    assert len(first) == len(second) == 2


def test_sums_travel_once_a_pass(monkeypatch):
    """Squares, products and residuals once; in every step one log likelihood."""

    def work(rank):
        sent, one = [], processes.Processes.sum_

        def counted(self, tensors, **options):
            sent.append(sum(leaf.nbytes for leaf in tensors))
            one(self, tensors, **options)

        monkeypatch.setattr(processes.Processes, "sum_", counted)
        tensors(regression(), Laplace("diagonal", check=False), (X, Y), batch_size=10)
        return sent

    weights = sum(leaf.numel() for leaf in network(1).parameters())
    for sent in on_ranks(2, work):
        assert sorted(sent) == [8] * 4 + [8 * (weights + 3 + 2)]
