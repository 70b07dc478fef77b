"""`dubito fit`, `dubito compare` and the demo configure every method alike."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dubito
from dubito.cli.commands.fit import make_recipe
from dubito.cli.commands.options import parse_options
from dubito.cli.commands.tables import Rows
from dubito.cli.compare import grid as grid_module
from dubito.cli.compare.grid import Fits
from dubito.cli.compare.spec import parse_spec, training_of
from dubito.evaluation import data
from dubito.evaluation.problems import of_table, problem
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
        network, given = digits.build((1, 8, 8), 10), dubito.priors.Normal(scale=3.0)
        assert calls[-1][0] == (dubito.Model(network, dubito.Categorical()).prior if expected.learns_prior else given)
        assert expected.start is None or calls[0][0] == given


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("name", ["map", "ensemble", "laplace"])
def test_without_a_scale_the_prior_is_that_of_a_model(name, kind, monkeypatch):
    """In `dubito fit` as in `dubito compare`, of the method and of the training before it."""
    classes = kind == "classification"
    y = torch.arange(20) % 2 if classes else torch.randn(20, 1)
    read = data.Table(torch.randn(20, 3), y, ("a", "b", "c"), ("y",), ("no", "yes") if classes else ())
    table, calls = of_table("t.csv", read), []
    plain = dubito.Model(table.build((3,), 2 if classes else 1), dubito.Categorical() if classes else dubito.Gaussian())
    made = dubito.posteriors.Point(plain, {}, {})
    monkeypatch.setattr(grid_module, "fit", lambda model, *_, **__: calls.append(model.prior) or made)
    Fits(table, 0)(parse_spec(name, table), table.split(0))
    assert calls == [plain.prior] * (2 if name == "laplace" else 1)
    options = parse_options(name, WORDS, about="")
    recipe = make_recipe(options, read, y, kind, Rows(torch.arange(16), torch.arange(16, 20)))
    assert repr(recipe.model(None).prior) == repr(plain.prior)  # of layers with other names
    options = parse_options(name, [*WORDS, "--prior-scale", "0.5"], about="")
    recipe = make_recipe(options, read, y, kind, Rows(torch.arange(16), torch.arange(16, 20)))
    assert recipe.model(None).prior == dubito.priors.Normal(scale=0.5)


def test_another_prior_makes_other_cells(tmp_path):
    """Those of version 0.1, where N(0, 1) was the default, are not taken for them."""
    table = of_table("t.csv", data.Table(torch.randn(20, 3), torch.arange(20) % 2, ("a", "b", "c"), ("y",), ("no", "yes")))
    digests = []
    for scale in (None, 1.0, 2.0):
        given = replace(table, training=table.training._replace(prior_scale=scale))
        for name in ("map", "laplace"):
            spec = parse_spec(name, given)
            key = grid_module.Grid(given, (spec,), (0,), tmp_path)._key(spec, 0, given.split(0), "")
            digests.append(key.digest)
            old = {name: value for name, value in key.settings.items() if name != "prior"}
            assert (replace(key, settings=old).digest == key.digest) == (scale is not None and name == "map")
    assert len(set(digests)) == 6


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
