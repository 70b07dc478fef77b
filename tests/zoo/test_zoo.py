"""Every network of the zoo, by every method and every way to predict: `make zoo`. docs/zoo.md is the table of what came out."""

from __future__ import annotations

import importlib.util

import pytest

from zoo import page, stand_in
from zoo.cells import COLUMNS, OK, Skip, cell
from zoo.networks import NETWORKS

WITHOUT_TORCHVISION = ("timm", "segmentation_models_pytorch")


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", NETWORKS)
def test_cell_is_right_or_refused_in_a_sentence(name, column, record_property):
    entry = NETWORKS[name]
    if entry.package in WITHOUT_TORCHVISION:
        stand_in.install()
    if importlib.util.find_spec(entry.package) is None:
        pytest.skip(f"{entry.package} is not installed: make zoo")
    earlier = page.read().get(name, {}).get(column)
    record_property("zoo", [name, column, "raised"])
    try:
        outcome = cell(entry, column)
    except Skip as reason:
        outcome = f"not tried: {reason}"
    record_property("zoo", [name, column, outcome])
    assert outcome == OK or earlier != OK, f"refused, and worked before: {outcome}"


def test_page_follows_from_the_results():
    assert page.PAGE.read_text() == page.text(page.read()), "write it again: python tests/zoo/page.py"
