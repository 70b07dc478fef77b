"""`dubito fit`, `dubito compare` and the demo configure every method alike."""

import pytest
from torch import nn

import dubito
from dubito.cli.commands.options import parse_options
from dubito.cli.compare import grid as grid_module
from dubito.cli.compare.grid import Fits
from dubito.cli.compare.spec import parse_spec, training_of
from dubito.evaluation.problems import problem
from dubito.inference.presets import PRESETS, chain, configure, dropout_places, label, preset, suiting, table_training
from dubito.inference.registry import METHODS

WORDS = ("data.csv", "--target", "y", "--out", "out")


def test_every_registered_method_has_a_preset():
    assert PRESETS.keys() == METHODS.keys()


@pytest.fixture(scope="module")
def digits():
    return problem("digits").limited(40, 20)


@pytest.mark.parametrize("name", [*METHODS, "ensemble:swag", "ensemble:laplace", "ensemble:mc_dropout"])
def test_fit_compare_and_demo_agree(name, digits, monkeypatch):
    """The same method, the same training before it and the same prior, for the same problem."""
    training = training_of(digits)
    expected = configure(name, training)
    options = parse_options(name, WORDS, about="", training=training)
    assert options.configuration == (expected.method, expected.start)
    if "neural_linear" not in name:  # which is for regressions
        compared = parse_spec(name, digits)
        assert (compared.method, compared.start, compared.learns_prior) == tuple(expected)

        calls, start = [], dubito.posteriors.Point(compared.model(digits, (1, 8, 8)), {}, {})
        monkeypatch.setattr(grid_module, "fit", lambda model, method, *_, **__: calls.append((model.prior, method)) or start)
        Fits(digits, 0)(compared, digits.split(0))
        assert [method for _, method in calls] == [*([expected.start] if expected.start else []), expected.method]
        assert calls[-1][0] == (dubito.priors.Normal() if expected.learns_prior else training.prior)
        assert expected.start is None or calls[0][0] == training.prior


def test_fit_takes_its_training_from_the_table():
    options = parse_options("map", [*WORDS, "--batch-size", "10", "--prior-scale", "2"], about="")
    training = options.training(100, (4,), 1)
    assert training == table_training(100, batch_size=10, prior_scale=2.0)._replace(dropout_at="^(hidden2|head)$")
    assert parse_options("map", WORDS, about="", training=training).configuration[0] == dubito.MAP().with_budget(10)


def test_a_chain_is_checked():
    training = table_training(100)
    assert list(chain("ensemble", training)) == ["ensemble", "map"]
    with pytest.raises(ValueError, match="a method cannot wrap itself"):
        chain("ensemble:ensemble", training)
    with pytest.raises(ValueError, match="laplace does not wrap another method"):
        chain("laplace:map", training)


def test_labels():
    training = table_training(100)
    names = {"ensemble": "Ensemble of 5", "ensemble:laplace": "Ensemble of 5 Laplace", "mc_dropout": "MC dropout"}
    assert {name: label(name, configure(name, training).method) for name in names} == names


def test_dropout_goes_before_all_layers_but_the_first():
    assert dropout_places(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))) == "^(2)$"
    assert dropout_places(nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1)), inputs=True) == "^(0|1)$"
    assert dropout_places(nn.Sequential(nn.Linear(1, 8), nn.Dropout(), nn.Linear(8, 1))) is None
    assert dropout_places(nn.Linear(1, 1)) == "^()$"


def test_the_demo_shows_what_suits_its_likelihood():
    assert "neural_linear" not in suiting(METHODS, dubito.Categorical)
    assert not preset("hmc").shown
