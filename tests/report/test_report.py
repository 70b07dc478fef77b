import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import matplotlib as mpl
import pytest
import torch
from PIL import Image
from rich.console import Console

from dubito import Categorical, Gaussian, metrics
from dubito.posteriors.predictive import LatentMixture
from dubito.report import Column, Figure, Picture, Report, Section, Snippet, Table, check_writable
from dubito.report.calibration import bins, coverage, reliability
from dubito.report.canvas import picture
from dubito.report.comparison import Line, histograms, lines
from dubito.report.functions import Curve, band, poster
from dubito.report.images import Guess, card, scatter, strip

NASTY = "<script>alert('1')</script> & \"quoted\""
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Collects what a page holds and checks that its tags are closed in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.loads, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and "script" not in self.open:
            self.words.append(data)


def table(**more) -> Table:
    columns = (Column("method"), Column("accuracy", better="higher"), Column("NLL", better="lower", digits=2), Column("size"))
    rows = (("a", 0.9004, 0.3, 1.0), (NASTY, 0.9001, math.nan, 2.0), ("c", 0.8, 0.1, None))
    return Table("Scores", columns, rows, **more)


def report() -> Report:
    line = picture(lambda figure: figure.subplots().plot([0, 1], [1, 0], "o") and None, (3, 2), alt=NASTY)
    dots = picture(lambda figure: figure.subplots().plot([0, 1], [0, 1]) and None, (3, 2), alt="dots", kind="png")
    figure = Figure(NASTY, (line, line, dots), caption=NASTY, legend=(("#000", NASTY),))
    section = Section(NASTY, NASTY, tables=(table(caption=NASTY),), figures=(figure, figure))
    return Report(NASTY, (section,), summary=NASTY, facts={NASTY: NASTY})


def test_the_best_of_a_column_is_found_with_its_ties_as_shown():
    assert table().best == {(0, 1), (1, 1), (2, 2)}
    assert [table().text(i, 2) for i in range(3)] == ["0.30", "–", "0.10"]
    assert table().text(2, 3) == "–"
    assert Table("one", (Column("x", better="higher"),), ((1.0,),)).best == set()


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="'t': rows must have 2 values"):
        Table("t", (Column("a"), Column("b")), (("x",),))


def test_html_is_escaped_and_balanced_and_loads_nothing():
    text = report().html()
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert page.words.count(NASTY) >= 8
    assert all(load.startswith(("#", "data:")) for load in page.loads)
    assert not re.search(r"@import|url\((?!#)", text)
    assert {"svg", "img", "figure", "figcaption", "table", "nav", "main"} <= set(page.tags)


def test_ids_are_unique_and_all_references_have_one():
    text = report().html()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    wanted = {load[1:] for load in page.loads if load.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted <= set(page.ids)


def test_html_marks_the_best():
    marked = re.findall(r'<td class="best">(.*?)</td>', report().html())
    assert marked == ["0.900", "0.900", "0.10"]


def test_json_round_trips_and_has_no_nan():
    made = report()
    read = json.loads(made.json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read == made.data
    rows = read["sections"][0]["tables"][0]["rows"]
    assert rows[0] == {"method": "a", "accuracy": 0.9004, "NLL": 0.3, "size": 1.0}
    assert rows[1]["NLL"] is None


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_shows_the_table(terminal):
    out = StringIO()
    report().print(Console(file=out, force_terminal=terminal, width=100, color_system="standard" if terminal else None))
    text = out.getvalue()
    assert NASTY in text  # and is not taken for markup
    assert ("0.10*" in text) != terminal
    assert ("\x1b[1;32m" in text) == terminal


def test_write_makes_folders_and_leaves_nothing_else(tmp_path):
    path = report().write(tmp_path / "a" / "b" / "c.html")
    assert sorted(p.name for p in path.parent.iterdir()) == ["c.html", "c.json"]
    assert path.read_text(encoding="utf-8") == report().html()
    assert json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) == report().data


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    path.write_text("old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dubito.tensors.files.os.replace", fail)
    with pytest.raises(OSError, match="cannot be written there: no space left") as caught:
        report().write(path)
    assert caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    assert path.read_text() == "old"


def test_paths_that_cannot_be_written_are_refused_in_words(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(OSError, match="cannot be written there: "):
        check_writable(tmp_path / "file" / "r.html")
    with pytest.raises(OSError, match="it is a folder"):
        check_writable(tmp_path / "folder.html")
    with pytest.raises(OSError, match="ends in .html"):
        check_writable(tmp_path / "r.json")


def test_drawing_neither_uses_nor_changes_the_users_settings():
    def draw() -> Picture:
        return reliability("m", torch.tensor([[0.7, 0.3]] * 8), torch.tensor([0, 1] * 4))

    plain = draw()
    with mpl.rc_context({"lines.linewidth": 9, "axes.facecolor": "black", "font.size": 30, "svg.hashsalt": "other"}):
        before = dict(mpl.rcParams)
        assert draw() == plain
        assert dict(mpl.rcParams) == before


def test_bins_add_up_to_the_calibration_error():
    torch.manual_seed(0)
    logits, y = 2 * torch.randn(500, 4), torch.randint(0, 4, (500,))
    logits[:4] = torch.tensor([0.0, 0.0, -99.0, -99.0])  # a confidence of 1/2
    probs, found = logits.softmax(-1), bins(logits.softmax(-1), y)
    assert found.number.sum() == 500
    gap = (found.number * (found.accuracy - found.confidence).abs()).nansum() / 500
    assert float(gap) == pytest.approx(float(metrics.ece(LatentMixture(Categorical(), logits.unsqueeze(0)), y)), abs=1e-6)
    edge = bins(torch.full((4, 3), 1 / 3), torch.zeros(4, dtype=torch.long), n=3)
    assert edge.number.tolist() == [4, 0, 0]  # (a, b]: an edge counts below
    assert reliability("m", probs, y).alt.startswith(f"Reliability diagram of m: expected calibration error {float(gap):.3f}")


def drawings() -> dict[str, tuple[Picture, ...]]:
    probs, y = torch.tensor([[1.0, 0.0]] * 30), torch.zeros(30, dtype=torch.long)
    scores, none = torch.arange(30.0), torch.zeros(30, dtype=torch.bool)
    image, draws = torch.rand(8, 8), torch.rand(20, 8).softmax(-1)
    x = torch.linspace(-1, 1, 9)
    p = LatentMixture(Gaussian(scale=0.1), torch.randn(5, 9, 1))
    return {
        "reliability": (reliability("m", probs, y),),  # all in one bin, all right
        "coverage": (coverage("t", {"never wrong": (scores, none), "always": (scores, ~none)}),),
        "histograms": histograms({"m": {"a": torch.zeros(5), "b": 9 * torch.ones(3)}}, xlabel="x", upper=2.0),
        "card": (card(image, draws.mean(0), draws, title="t", subtitle="s", truth=9),),
        "scatter": (scatter(image, draws.log(), draws, title="t", subtitle="s"),),
        "one draw": (scatter(image, draws[:1].log(), draws[:1], title="t", subtitle="s"),),
        "band": (band(Curve(x, p, x, (x, x)), title="t", ylim=(-2, 2)),),
    }


def test_every_figure_is_a_drawing_of_its_own():
    for name, pictures in drawings().items():
        for drawn in pictures:
            assert isinstance(drawn.image, str), name
            root = ElementTree.fromstring(drawn.image)
            assert root.tag.endswith("svg"), name
            assert root.get("viewBox"), name
            assert root.get("width") is None, name
            words = re.sub(r"base64,[^\"]*", "", drawn.image).lower()  # the letters of a picture may spell anything
            assert "nan" not in words, name
            assert drawn.alt, name


@pytest.mark.parametrize("few", [True, False])
def test_the_reliability_panel_fills_its_place_also_where_no_bin_has_few_predictions(few):
    probs = torch.tensor([[0.7, 0.3]] * 20 + [[0.95, 0.05]] * (2 if few else 20))
    drawn = reliability("a", probs, torch.zeros(len(probs), dtype=torch.long)).image
    assert isinstance(drawn, str)
    frame = re.search(r'<g id="axes_1">\s*<g id="patch_\d+">\s*<path d="([^"]*)"', drawn)
    assert frame
    heights = [float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", frame[1])]
    assert max(heights) - min(heights) > 130  # of 3.7 inches, 266 points


def test_the_poster_is_a_picture_of_the_width_asked_for(tmp_path):
    x = torch.linspace(-1, 1, 9)
    curve = Curve(x, LatentMixture(Gaussian(scale=0.1), torch.randn(5, 9, 1)), x, (x, x))
    path = poster({"a": {"ReLU": curve, "tanh": curve}}, tmp_path / "new" / "p.png", ylim=(-2, 2), width=900)
    with Image.open(path) as image:
        assert image.width == 900


def compared() -> Report:
    columns = (Column("method"), Column("NLL", better="lower", meaning="nats"), Column("n", digits=0))
    rows = (("a ± b", 0.3, 3), (NASTY, 0.1, 2), ("c", math.nan, None))
    errors = ((None, 0.02, None), (None, 0.01, None), (None, None, None))
    scores = Table("Scores", columns, rows, errors=errors, alike=frozenset({(0, 1)}), sortable=True)
    line = picture(lambda figure: figure.subplots().plot([0, 1], [1, 0]) and None, (3, 2), alt="line")
    snippets = (Snippet("command", f"run {NASTY}", label=NASTY), Snippet("more", "{}", folded=True))
    figure = Figure("f", (replace(line, label=NASTY),))
    return Report("t", (Section("s", tables=(scores,), figures=(figure,), snippets=snippets),))


def test_standard_errors_and_what_is_like_the_best_are_shown():
    made = compared()
    table = next(made.tables)
    assert [table.text(i, 1) for i in range(3)] == ["0.300 ± 0.020", "0.100 ± 0.010", "–"]
    assert made.data["sections"][0]["tables"][0]["standard_errors"][0] == {"method": None, "NLL": 0.02, "n": None}
    assert made.data["sections"][0]["tables"][0]["not_told_from_the_best"] == [["NLL"], [], []]
    assert made.data["sections"][0]["snippets"]["command"] == f"run {NASTY}"
    out = StringIO()
    made.print(Console(file=out, width=100))
    assert "0.300 ± 0.020~" in out.getvalue()
    assert "0.100 ± 0.010*" in out.getvalue()
    with pytest.raises(ValueError, match="errors must have the shape of rows"):
        replace(table, errors=((None,),))


def test_a_table_with_errors_too_wide_for_the_terminal_is_shown_in_parts():
    columns = (Column("method"), *(Column(f"score{j}") for j in range(6)))
    wide = Table("Wide", columns, (("a", *[0.5] * 6),), errors=((None, *[0.1] * 6),))
    out = StringIO()
    Report("t", (Section("s", tables=(wide,)),)).print(Console(file=out, width=60))
    text = out.getvalue()
    assert text.count("0.500 ± 0.100") == 6
    assert text.count("method") > 1
    assert all(len(line.rstrip()) <= 60 for line in text.splitlines())


def test_a_sortable_page_has_one_script_of_its_own_and_escapes_the_rest():
    text = compared().html()
    page = Page(text)
    assert page.tags.count("script") == 1
    assert "<script>alert" not in text
    assert text.count('class="filter"') == 1
    assert 'data-value="0.3"' in text
    assert 'class="alike" data-value="0.3"' in text
    assert re.search(r'<svg data-label="&lt;script', text)
    assert page.words.count(f"run {NASTY}") == 1
    assert "Content-Security-Policy" in report().html()


def test_pictures_of_guesses_and_of_several_methods():
    grey, colour = torch.rand(8, 8), torch.rand(3, 8, 8)
    drawn = strip([Guess(grey, "a very long name of a class", "b", 0.5), Guess(colour, "b", "b", 1.0)], title="mistakes")
    assert drawn.alt == "mistakes: a very long name of a class (0.50), truly b; b (1.00)."
    assert ElementTree.fromstring(str(drawn.image)).tag.endswith("svg")
    three = torch.tensor([0.0, 3.0, 5.0])
    many = {f"method {i} with a name that is far too long": Line(three, three * i, 0.1 * three) for i in range(8)}
    assert "method 7" in lines("Shift", many, xlabel="severity", ylabel="NLL", ticks=(0.0, 3.0, 5.0)).alt
