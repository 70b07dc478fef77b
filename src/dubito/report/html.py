"""A report as one HTML file. It loads nothing, and has a script only if it has tables to sort or text to copy."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from functools import cache
from html import escape as quote
from importlib.resources import files
from itertools import count
from string import Template

from dubito.report.content import Content, Figure, Picture, Section, Snippet, Table


@cache
def read_asset(package: str, name: str) -> str:
    """The text of the file `assets/name` of a package."""
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")


def fill(template: str, **values: str) -> str:
    """A template with `$name` replaced by the value of that name.

    >>> fill("<h1>$title</h1>", title="Scores")
    '<h1>Scores</h1>'
    """
    return Template(template).substitute(values)


ARROWS = {"higher": "↑", "lower": "↓"}

FIRST = {"higher": "descending", None: "ascending", "lower": "ascending"}  # the best at the top


def page(report: Content) -> str:
    """The HTML of a report."""
    links = "".join(f'<li><a href="#{_anchor(s)}">{_text(s.title)}</a></li>' for s in report.sections)
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in report.facts.items())
    numbers = count()  # a prefix for the ids inside the drawings of each figure
    sortable = next((section for section in report.sections if any(table.sortable for table in section.tables)), None)
    sections = "".join(_section(section, numbers, search=section is sortable) for section in report.sections)
    interactive = sortable is not None or any(section.snippets for section in report.sections)
    return fill(
        _asset("report.html"),
        title=_text(report.title),
        style=style(),
        summary=_paragraph(report.summary),
        links=links,
        sections=sections,
        facts=facts,
        script=f"<script>\n{_asset('report.js')}</script>\n" if interactive else "",
    )


def style() -> str:
    """The style sheet that all pages share."""
    return _asset("report.css").strip()


def _asset(name: str) -> str:
    return read_asset("dubito.report", name)


def _text(words: str) -> str:
    """Escaped text, in which no line begins with a percent sign."""
    return re.sub(r"(?<=\d) %", "&nbsp;%", quote(words))


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{_text(text)}</p>\n" if text else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _section(section: Section, numbers: Iterator[int], *, search: bool) -> str:
    """A section; with `search` a box above its tables, which filters the rows of all tables of the page."""
    parts = [_table(table) for table in section.tables] + [_figure(figure, next(numbers)) for figure in section.figures]
    parts += [_snippet(snippet) for snippet in section.snippets]
    box = _asset("filter.html") if search else ""
    head = f'<h2 id="{_anchor(section)}">{_text(section.title)}</h2>\n'
    return f"<section>\n{head}{_paragraph(section.text)}{box}{''.join(parts)}</section>\n"


def _table(table: Table) -> str:
    words = [all(isinstance(row[j], str) for row in table.rows) for j in range(len(table.columns))]
    heads, best = [], table.best
    for column, word in zip(table.columns, words, strict=True):
        arrow = f'<span class="arrow">{ARROWS[column.better]} better</span>' if column.better else ""
        title = f' title="{_text(column.meaning)}"' if column.meaning else ""
        kind, name = _class("word" if word else ""), _text(column.name)
        if table.sortable:
            title, name = f'{title} data-first="{FIRST[column.better]}"', f'<button type="button">{name}</button>'
        heads.append(f'<th scope="col"{kind}{title}>{name}{arrow}</th>')
    rows = []
    for i in range(len(table.rows)):
        cells = []
        for j, word in enumerate(words):
            kind = "word" if word else "best" if (i, j) in best else "alike" if (i, j) in table.alike else ""
            tag = 'th scope="row"' if word else "td"
            cells.append(f"<{tag}{_class(kind)}{_sorted_by(table, i, j)}>{_cell(table.text(i, j))}</{tag.split()[0]}>")
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    title = f"<caption>{_text(table.title)}</caption>\n" if table.title else ""
    head = f"<thead><tr>{''.join(heads)}</tr></thead>\n"
    # a table that must be scrolled on a small screen can be reached by the keyboard
    frame = f'<div class="wide" tabindex="0" role="region" aria-label="{_text(table.title)}">'
    kind = _class("sortable" if table.sortable else "")
    return f"{frame}<table{kind}>\n{title}{head}<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n{_paragraph(table.caption, 'note')}"


def _cell(words: str) -> str:
    """The text of a value, with its standard error in smaller type."""
    value, sign, error = words.partition(" ± ")
    return f'{_text(value)}<span class="error">± {_text(error)}</span>' if sign else _text(words)


def _sorted_by(table: Table, row: int, column: int) -> str:
    """The value with all digits, for sorting: what is shown is rounded."""
    value = table.rows[row][column]
    known = table.sortable and isinstance(value, int | float) and math.isfinite(value)
    return f' data-value="{value!r}"' if known else ""


def _snippet(snippet: Snippet) -> str:
    title, label = _text(snippet.title), _label(snippet.label)
    body = f'<pre><code>{quote(snippet.text)}</code></pre><button type="button" class="copy" hidden>Copy</button>'
    if snippet.folded:
        return f'<details class="snippet"{label}><summary>{title}</summary><div class="body">{body}</div></details>\n'
    return f'<div class="snippet"{label}><h3>{title}</h3><div class="body">{body}</div></div>\n'


def _label(label: str) -> str:
    return f' data-label="{_text(label)}"' if label else ""


def _figure(figure: Figure, number: int) -> str:
    swatches = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" rx="2" fill="{_text(colour)}"/></svg>'
        f"{_text(meaning)}</li>"
        for colour, meaning in figure.legend
    )
    legend = f'<ul class="legend">{swatches}</ul>\n' if swatches else ""
    width = max((picture.width for picture in figure.pictures), default=320)
    # as many columns as fit, and none wider than a quarter more than drawn, or the text would grow out of proportion
    grid = f"grid-template-columns: repeat(auto-fill, minmax(min(100%, {width}px), 1fr))"
    pictures = "".join(_picture(picture, f"f{number}-{i}-") for i, picture in enumerate(figure.pictures))
    caption = f"<figcaption>{_text(figure.caption)}</figcaption>\n" if figure.caption else ""
    head = f"<h3>{_text(figure.title)}</h3>\n{legend}"
    return f'<figure>\n{head}<div class="pictures" style="{grid}">\n{pictures}</div>\n{caption}</figure>\n'


def _picture(picture: Picture, prefix: str) -> str:
    limit = f"max-width: {round(1.25 * picture.width)}px"
    if isinstance(picture.image, bytes):
        data = base64.b64encode(picture.image).decode()
        return f'<img{_label(picture.label)} style="{limit}" alt="{_text(picture.alt)}" src="data:image/png;base64,{data}">\n'
    # ids are unique in a page, and every drawing brings its own p1, m1, glyph-A ...
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", picture.image)
    return (
        drawing.replace("<svg", f'<svg{_label(picture.label)} role="img" aria-label="{_text(picture.alt)}" style="{limit}"', 1)
        + "\n"
    )
