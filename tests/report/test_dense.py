"""Pictures of dense predictions say what they show, for classes and for numbers."""

import io

import pytest
import torch
from PIL import Image

from dubito import Categorical
from dubito.apps.dense import Detector, maps_of
from dubito.likelihoods import HeteroscedasticGaussian
from dubito.posteriors.predictive import LatentMixture
from dubito.report.dense import detection, panels

COLOURS = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]


def test_classes_are_shown_in_their_colours():
    """Truth red, prediction green; void is black."""
    f = torch.zeros(2, 1, 6, 8, 3)
    f[..., 1] = 9.0
    y = torch.zeros(1, 6, 8, dtype=torch.long)
    y[:, :3] = 11
    found = panels(torch.ones(1, 3, 6, 8), y, maps_of(LatentMixture(Categorical(dim=1), f)), colours=COLOURS, names="abc")
    pixels = torch.frombuffer(bytearray(Image.open(io.BytesIO(found.image)).convert("RGB").tobytes()), dtype=torch.uint8).reshape(
        -1, 3
    )
    red, green, blue, black = ((pixels == torch.tensor(colour)).all(1).sum() for colour in (*COLOURS, (0, 0, 0)))
    assert green > 1.8 * red > 0, "half of the truth is void"
    assert blue == 0
    assert black > 0.8 * red
    assert found.alt.startswith("Dense prediction, 1 image: input, truth, prediction, aleatoric and epistemic")


def test_numbers():
    p = LatentMixture(HeteroscedasticGaussian(dim=1), torch.randn(3, 2, 6, 8, 2))
    y = torch.rand(2, 6, 8)
    y[0, 0] = torch.nan
    found = panels(torch.rand(2, 6, 8), y, maps_of(p), labels=["here", "there"], title="Depth")
    assert found.alt.startswith("Depth, 2 images")
    assert isinstance(found.image, bytes)


def test_detection():
    one = Detector()
    one.add(torch.rand(1000), torch.rand(1000) < 0.2)
    found = detection("Errors", {"total": one, "aleatoric": one})
    assert "total 0." in found.alt
    assert found.image.startswith("<svg")
    with pytest.raises(ValueError, match="no curve"):
        detection("Errors", {})


def test_what_does_not_fit_is_refused():
    found = maps_of(LatentMixture(Categorical(dim=1), torch.randn(2, 1, 6, 8, 3)))
    y = torch.zeros(1, 6, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="of the same images"):
        panels(torch.rand(2, 3, 6, 8), y, found)
    with pytest.raises(ValueError, match="got 2 for 3 classes"):
        panels(torch.rand(1, 3, 6, 8), y, found, colours=COLOURS[:2])
    with pytest.raises(ValueError, match="labels must be one per image"):
        panels(torch.rand(1, 3, 6, 8), y, found, labels=["a", "b"])
