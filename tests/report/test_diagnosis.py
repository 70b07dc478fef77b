"""The report on chains, also where there is little to draw."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import dubito
from dubito.diagnostics import log_scores, summarize
from dubito.posteriors import Samples
from dubito.report import Picture
from dubito.report.diagnosis import chain_colours, diagnosis, energies, rhats, running_scores, trace


def sound(drawn: Picture) -> str:
    assert isinstance(drawn.image, str)
    assert ElementTree.fromstring(drawn.image).tag.endswith("svg")
    assert "nan" not in re.sub(r"base64,[^\"]*", "", drawn.image).lower()
    return drawn.alt


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(4, 30),
        torch.randn(1, 2000),
        torch.ones(2, 5),  # never moved
        torch.randn(2, 1),
        torch.tensor([[1.0, math.nan, 2.0], [1.0, 2.0, math.inf]]),
        torch.full((2, 4), math.nan),
        torch.randn(100, 5),
    ],
    ids=["usual", "one", "constant", "short", "broken", "lost", "many"],
)
def test_traces(values):
    assert f"trace of {len(values)} chains" in sound(trace(values, title="t", label="l"))


def test_colours():
    assert len(set(chain_colours(4))) == 4
    assert len(set(chain_colours(50))) == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 1.005, 1.009, 1.02], "75 % of 4 are at most 1.01, the largest is 1.02"),
        ([1.0, 55.0, math.nan], "50 % of 2 are at most 1.01, the largest is 55"),
        ([1.0, 1.5, math.inf], "33 % of 3 are at most 1.01, the largest is inf"),
        ([math.nan], "of 0 are"),
    ],
)
def test_histograms_of_rhat(values, said):
    assert said in sound(rhats(torch.tensor(values), title="t", good=1.01))


def test_the_bars_of_a_histogram_end_where_the_good_ones_do(monkeypatch):
    bars = []
    from matplotlib.axes import Axes

    monkeypatch.setattr(Axes, "bar", lambda self, left, height, width, **look: bars.append((left, height, width)))
    rhats(torch.linspace(1, 1.1, 1000), title="t", good=1.01)
    (good, fine, width), (bad, worse, _) = bars
    assert float(good[-1] + width[-1]) == pytest.approx(1.01)
    assert float(bad[0]) == pytest.approx(1.01)
    assert (fine.sum(), worse.sum()) == (100, 900)


def test_energies():
    assert "standard deviations: energies" in sound(energies(torch.randn(4, 100)))
    sound(energies(torch.ones(4, 10)))
    sound(energies(torch.randn(2, 1)))
    sound(energies(torch.full((2, 3), math.nan)))


@pytest.mark.parametrize("n", [1, 2, 50])
def test_running_scores(n):
    sound(running_scores(torch.linspace(-2, -1, n), [torch.linspace(-3, -1, n)] * 2, label="nats"))
    sound(running_scores(torch.full((n,), -1.0), [torch.full((n,), -1.0)], label="nats"))


def posterior(chains: int = 4, draws: int = 50) -> Samples:
    model = dubito.Model(torch.nn.Linear(2, 3), dubito.Categorical())
    params = {name: torch.randn(chains * draws, *leaf.shape) for name, leaf in model.parameters().items()}
    trace = {name: torch.randn(chains * draws) for name in ("energy", "log_likelihood", "log_prior")}
    return Samples(model, params, model.buffers(), chains=chains, trace=trace, sampler={"method": "HMC", "adjusted": True})


@pytest.mark.parametrize("chains", [1, 4])
def test_the_whole_report(chains, tmp_path):
    made, x, y = posterior(chains), torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    p = made.predict(x)
    summary = made.summary(x)
    report = diagnosis(
        made,
        summary,
        title="chains",
        predictions=p.probs,
        scores=log_scores(p, y),
        names=("ant", "bee", "cat"),
        label="probability",
    )
    titles = [section.title for section in report.sections]
    assert titles == ["Summary", "Do the chains agree?", "Traces", "Energy and score"]
    assert report.summary == summary.verdict
    text = report.html()
    assert ("chain 4" in text) == (chains == 4)
    assert re.search(r"row \d, (ant|bee|cat): R-hat", text)
    assert re.search(r"(weight\[\d, \d\]|bias\[\d\]): R-hat", text)
    worst = int(summary.predictions.rhat.argmax())
    assert f"row {worst // 3 + 1}, {('ant', 'bee', 'cat')[worst % 3]}: R-hat {summary.predictions.worst:.3f}" in text
    assert report.write(tmp_path / "r.html").is_file()


def test_a_report_of_weights_alone():
    made = posterior()
    bare = Samples(made.model, made.params, made.buffers, chains=4)
    report = diagnosis(bare, summarize(bare.params, chains=4), title="t")
    assert [section.title for section in report.sections] == ["Summary", "Do the chains agree?", "Traces"]
    assert "give data to see predictions" in report.html()
