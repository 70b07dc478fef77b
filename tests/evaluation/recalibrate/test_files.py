"""Maps that are written and read do the same."""

import pytest
import torch

from dubito import Categorical, Gaussian
from dubito import recalibrate as r
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import store


def given():
    source = torch.Generator().manual_seed(0)
    classes = LatentMixture(Categorical(), 2 * torch.randn(1, 100, 3, generator=source))
    numbers = LatentMixture(Gaussian(scale=1.0), torch.randn(1, 100, 2, generator=source))
    y = torch.multinomial((classes.mean.log() / 2).softmax(-1), 1, generator=source).squeeze(-1)
    return classes, y, numbers, torch.randn(100, 2, generator=source)


CLASSES = [r.Temperature(), r.VectorScaling(0.1), r.MatrixScaling(0.1), r.Isotonic(), r.Histogram(5)]


@pytest.mark.parametrize(
    "method", [*CLASSES, r.Variance(), r.Quantiles(), r.ConformalSets("lac", by_class=True), r.ConformalIntervals()]
)
def test_there_and_back(method, tmp_path):
    classes, labels, numbers, targets = given()
    p, y = (numbers, targets) if isinstance(method, r.Variance | r.Quantiles | r.ConformalIntervals) else (classes, labels)
    fit = method.fit(p, y)
    r.save(fit, tmp_path / "map.safetensors")
    again = r.load(tmp_path / "map.safetensors")
    assert type(again) is type(fit)
    a, b = fit(p), again(p)
    if isinstance(a, r.RecalibratedClasses | r.RecalibratedNumbers | LatentMixture):
        a, b = a.mean, b.mean
        assert fit(p).to("cpu").log_prob(y).equal(again(p).log_prob(y))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_what_is_no_map_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"save takes a fitted map, such as Temperature\(\).fit\(...\); got a Temperature"):
        r.save(r.Temperature(), tmp_path / "map.safetensors")
    store.write(tmp_path / "other.safetensors", {"a": torch.zeros(1)}, {"kind": "posterior"})
    with pytest.raises(store.FileError, match="not a map"):
        r.load(tmp_path / "other.safetensors")
