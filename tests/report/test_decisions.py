"""The pictures of a judgement are drawings, also where there is little to see."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from dubito import Categorical, Gaussian, metrics
from dubito.evaluation.judge import Judge
from dubito.posteriors.predictive import LatentMixture
from dubito.report.calibration import diagram, pit, quantiles, risk, scores


def classes(n=400, sure=1.0):
    generator = torch.Generator().manual_seed(0)
    judged = Judge(scores=["one_minus_max", "mutual_information"])
    p = LatentMixture(Categorical(), sure * 2 * torch.randn(3, n, 4, generator=generator))
    y = torch.randint(4, (n,), generator=generator)
    judged.update(p, p.mean.argmax(-1) if sure > 1 else y)
    return judged.compute(), p, y


def numbers(n=300, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    judged = Judge()
    p = LatentMixture(Gaussian(scale=scale), torch.zeros(2, n, 1))
    judged.update(p, torch.randn(n, generator=generator))
    return judged.compute()


def test_every_figure_is_a_drawing():
    _, p, y = classes()
    flawless, _, _ = classes(20, sure=50.0)  # no errors at all
    drawn = [
        diagram("mass", metrics.reliability(p, y, by="mass")),
        diagram("flawless", flawless.reliability),
        quantiles("t", {"a": numbers().quantiles, "b": numbers(50, 0.3).quantiles}),
        pit("few", numbers(3).pit),
        risk("flawless", flawless.decisions),
        scores("flawless", flawless.decisions["one_minus_max"].counts),
    ]
    for one in drawn:
        root = ElementTree.fromstring(one.image)
        assert root.tag.endswith("svg")
        assert "nan" not in re.sub(r"base64,[^\"]*", "", one.image).lower()
        assert one.alt


def test_what_is_read_out():
    found, p, y = classes()
    assert f"{float(metrics.ece(p, y)):.3f} on 400 predictions" in diagram("m", found.reliability).alt
    wrong = int((p.mean.argmax(-1) != y).sum())
    assert f"{400 - wrong} successes and {wrong} errors" in scores("t", found.decisions["one_minus_max"].counts).alt
    assert f"mutual_information {found.decisions['mutual_information'].values['aurc']:.3g}" in risk("t", found.decisions).alt
    narrow = numbers(2000, 0.3)
    assert f"a {narrow['quantile_error']:.3f}" in quantiles("t", {"a": narrow.quantiles}).alt
    outside = int(re.search(r": (\d+) of 20 bins", pit("t", narrow.pit).alt)[1])
    assert outside > 15
    outside = int(re.search(r": (\d+) of 20 bins", pit("t", numbers(2000).pit).alt)[1])
    assert outside < 5


def test_nothing_to_show_is_said():
    with pytest.raises(ValueError, match="no curve"):
        risk("t", {})
    with pytest.raises(ValueError, match="no curve"):
        quantiles("t", {})
    with pytest.raises(ValueError, match="no PIT values"):
        pit("t", torch.zeros(20))
    with pytest.raises(ValueError, match="no predictions"):
        diagram("m", metrics.Reliability.of(torch.zeros(0), torch.zeros(0)))
