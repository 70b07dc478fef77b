"""Any number of processes gives the numbers of one process."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import dubito
from distributed_ranks import on_ranks
from dubito import priors

N, STEPS = 37, 20
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
Y = torch.sin(X).sum(1, keepdim=True) + 0.1 * torch.randn(N, 1, generator=GENERATOR)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
MORE = torch.randn(50, 3, generator=GENERATOR)


def network(*, outputs=1, layers=()):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.Tanh(), nn.Linear(8, outputs))


def regression(*layers):
    return dubito.Model(network(layers=layers), dubito.Gaussian(), priors.Normal())


def classes(*layers):
    return dubito.Model(network(outputs=3, layers=layers), dubito.Categorical())


def tensors(posterior):
    """Everything that a posterior is made of, by its predictions and its own numbers."""
    p = posterior.predict(X[:5])
    center = {} if posterior.center is None else {**posterior.center[0], **posterior.center[1]}
    named = {"mean": p.mean, "epistemic": p.uncertainty.epistemic, **center}
    return {name: leaf.double() for name, leaf in named.items()}


def compare(sizes, fit, tolerance=1e-5):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = fit(0)
        for size in sizes:
            for other in on_ranks(size, fit):
                assert other.keys() == alone.keys()
                for name, leaf in alone.items():
                    torch.testing.assert_close(
                        other[name], leaf, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                    )


EPOCHS = STEPS // 2  # of two steps each
METHODS = {
    "MAP": lambda: (regression(), dubito.MAP(epochs=EPOCHS)),
    "MAP with SGD and a clip": lambda: (classes(), dubito.MAP(epochs=EPOCHS, optimizer="sgd", clip=0.1)),
    "MC dropout, its own layers": lambda: (classes(nn.Dropout(0.3)), dubito.MCDropout(epochs=EPOCHS, draws=4)),
    "MC dropout at places": lambda: (classes(), dubito.MCDropout(epochs=EPOCHS, draws=4, at="", rate=0.3)),
    "concrete dropout": lambda: (
        dubito.Model(network(), dubito.Gaussian(scale=0.2), priors.Normal(scale=1.0)),
        dubito.MCDropout(epochs=EPOCHS, draws=4, at="", learn_rates=True),
    ),
    "SWAG": lambda: (regression(), dubito.SWAG(epochs=EPOCHS, rank=3, draws=4)),
    "SWAG, BatchNorm": lambda: (regression(nn.BatchNorm1d(8)), dubito.SWAG(epochs=EPOCHS, rank=3, draws=4)),
    "IVON": lambda: (regression(), dubito.IVON(epochs=EPOCHS, samples=2, draws=4)),
    "Variational, local": lambda: (regression(), dubito.Variational(epochs=EPOCHS, draws=4, samples=2)),
    "Variational, flipout": lambda: (regression(), dubito.Variational(epochs=EPOCHS, draws=4, estimator="flipout")),
    "Variational, path only": lambda: (regression(), dubito.Variational("full", epochs=EPOCHS, draws=4, path_only=True)),
    "Variational, Laplace prior": lambda: (
        replace(regression(), prior=priors.Laplace(scale=1.0)),
        dubito.Variational("low_rank", epochs=EPOCHS, draws=4),
    ),
    "OnlineLaplace": lambda: (regression(), dubito.OnlineLaplace(epochs=EPOCHS, every=3)),
    "SGLD": lambda: (regression(), dubito.SGLD(draws=6, burn_in=4, thin=1)),
    "SGHMC, two chains": lambda: (classes(nn.Dropout(0.2)), dubito.SGHMC(draws=6, burn_in=4, thin=1, chains=2)),
    "NeuralLinear": lambda: (regression(), dubito.NeuralLinear()),
    "PiModel": lambda: (
        classes(nn.Dropout(0.3)),
        dubito.PiModel(dubito.MAP(epochs=4), unlabelled=MORE, unlabelled_size=10, augment=dubito.augment.Noise(0.1)),
    ),
    "MeanTeacher": lambda: (classes(nn.BatchNorm1d(8)), dubito.MeanTeacher(dubito.MAP(epochs=4), unlabelled=MORE, unlabelled_size=10)),
    "TemporalEnsembling": lambda: (
        classes(nn.Dropout(0.3)),
        dubito.TemporalEnsembling(dubito.MAP(epochs=4), unlabelled=MORE, unlabelled_size=10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_two_and_four_processes_give_the_numbers_of_one(name):
    model, method = METHODS[name]()
    y = CLASSES if isinstance(model.likelihood, dubito.Categorical) else Y

    def fit(rank):
        return tensors(dubito.fit(model, method, (X, y), batch_size=20, progress=False))

    compare((2, 4), fit)


class Words(nn.Module):
    """Word embeddings, a recurrent layer and an answer."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.answer = nn.Embedding(11, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.answer(self.lstm(self.words(x))[0][:, -1])


@pytest.mark.parametrize("recurrent", ["sequence", "batch"])
def test_masks_of_words_and_sequences_are_those_of_one_process(recurrent):
    torch.manual_seed(1)
    model, words = (
        dubito.Model(Words(), dubito.Categorical()),
        torch.randint(11, (N, 6), generator=torch.Generator().manual_seed(1)),
    )
    method = dubito.MCDropout(epochs=5, draws=3, at="", rate=0.3, recurrent=recurrent)

    def fit(rank):
        return dubito.fit(model, method, (words, CLASSES), batch_size=20, progress=False).params

    compare((2,), fit)
