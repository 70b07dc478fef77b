"""What methods say of themselves."""

from dataclasses import fields
from pathlib import Path

import pytest

import dubito
from dubito.inference.method import Traits, traits_of
from dubito.inference.registry import METHODS

WRAPPERS = {"ensemble", "pi_model", "temporal_ensembling", "mean_teacher"}


def make(name):
    return METHODS[name](dubito.MAP()) if name in WRAPPERS else METHODS[name]()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_its_traits(name):
    method = make(name)
    assert isinstance(method.traits, Traits)
    assert hasattr(method, "unstack") or not method.traits.stacks
    if method.traits.length_field is not None:
        assert method.traits.length_field in {item.name for item in fields(method)}


def test_a_method_without_traits_has_the_defaults():
    assert traits_of(object()) == Traits()


def test_traits_of_a_class_are_those_that_do_not_depend_on_its_settings():
    assert traits_of(dubito.Laplace).post_hoc
    assert traits_of(dubito.HMC) == Traits()


def test_combinators_combine():
    assert traits_of(dubito.Ensemble(dubito.MCDropout())).keeps_dropout
    assert traits_of(dubito.Ensemble(dubito.Variational())).draws_weights
    assert traits_of(dubito.Ensemble(dubito.MAP())).starts_anew
    inside = traits_of(dubito.PiModel(dubito.MCDropout(warmup=0.1), ramp_up=0.0))
    assert inside.keeps_dropout
    assert inside.length_settings == ("warmup=0",)
    assert not inside.takes_example_weights


def test_accept_steps():
    adjusted = {name for name in METHODS if make(name).traits.adjusted}
    assert adjusted == {"metropolis", "mala", "hmc", "nuts", "mams"}
    assert traits_of(dubito.HMC(adjusted=False)).adjusted is False


def test_every_trait_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text()
    for item in fields(Traits):
        assert f"| `{item.name}` |" in page
        assert f"| `{item.name}` |" in (Traits.__doc__ or "")


def test_class_attributes_of_methods_of_version_0_1_count_as_traits():
    class Old:
        post_hoc = True
        may_grow = "n_draws"
        weighs = False
        starts_anew = True

    traits = traits_of(Old())
    assert (traits.post_hoc, traits.length_field, traits.many_starts) == (True, "n_draws", False)
    assert (traits.starts_anew, traits.takes_example_weights) == (True, False)
