"""A report as one HTML file: no fonts, no resource that would have to be loaded, and no script unless something can be sorted."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from html import escape as quote
from itertools import count

from dubito.report.report import Figure, Picture, Report, Section, Snippet, Table
from dubito.report.script import SCRIPT

ARROWS = {"higher": "↑", "lower": "↓"}

FIRST = {"higher": "descending", None: "ascending", "lower": "ascending"}  # the best at the top
# Whatever slips into a page, a browser will not load it.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

# Figures stay light in a dark theme, on cards: their colours were chosen for white.
STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2430; --soft: #5a6675; --line: #d9dfe6; --tint: #f5f7f9; --best: #e3f1ea;
  --alike: #f1f8f4; --link: #0072b2; --edge: #b4c0cc; --gap: 0; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e4e8ec; --soft: #9aa6b2; --line: #323a43; --tint: #1d232a;
  --best: #1d4534; --alike: #19302a; --link: #6db8ea; --edge: #55616d; --gap: .5rem; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0; color: var(--ink); background: var(--page); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.01em; }
h2 { font-size: 1.4rem; line-height: 1.3; margin: 3rem 0 .5rem; padding-top: 1.4rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.08rem; margin: 2.2rem 0 .3rem; }
p { margin: .4rem 0 .9rem; max-width: 48rem; }
header p { font-size: 1.08rem; color: var(--soft); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; list-style: none; margin: 1rem 0 0; padding: 0; font-size: .93rem; }
a { color: var(--link); }
.wide { overflow-x: auto; margin: 1rem 0 .6rem; background:
  linear-gradient(to left, var(--page) 50%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--edge), transparent) right / .7rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .45rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { vertical-align: bottom; font-weight: 600; border-bottom: 2px solid var(--ink); white-space: normal; max-width: 7.5rem; }
tbody th { font-weight: 500; }
.word { text-align: left; }
.best { background: var(--best); font-weight: 700; }
.alike { background: var(--alike); }
.error { display: block; color: var(--soft); font-weight: 400; font-size: .85em; line-height: 1.3; }
.sortable th, .sortable td { padding: .4rem .6rem; }
.sortable tbody .word { min-width: 9rem; max-width: 18rem; white-space: normal; overflow-wrap: break-word; }
.sortable th.word { position: sticky; left: 0; background: var(--page); }
.sortable thead button { all: unset; cursor: pointer; }
.sortable thead button:hover { text-decoration: underline; }
.sortable thead button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.sortable thead button::after { content: "\\a0↕"; color: var(--soft); font-weight: 400; }
.sortable [aria-sort="ascending"] button::after { content: "\\a0▲"; }
.sortable [aria-sort="descending"] button::after { content: "\\a0▼"; }
.filter { margin: 1.2rem 0 0; font-size: .95rem; }
.filter input { font: inherit; color: inherit; background: var(--tint); border: 1px solid var(--line); border-radius: .35rem; padding: .3rem .6rem;
  width: min(100%, 20rem); margin: 0 .6rem 0 .4rem; }
.snippet { position: relative; margin: .8rem 0; }
.snippet pre { margin: .3rem 0 0; padding: .7rem 4.6rem .7rem .9rem; background: var(--tint); border: 1px solid var(--line); border-radius: .4rem;
  overflow-x: auto; max-height: 26rem; font-size: .86rem; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; }
.snippet summary { cursor: pointer; }
.snippet h3 { margin: 1.2rem 0 0; font-size: 1rem; }
.body { position: relative; }
.copy { position: absolute; top: .45rem; right: .5rem; font: inherit; font-size: .8rem; color: var(--link); background: var(--page);
  border: 1px solid var(--line); border-radius: .3rem; padding: .1rem .5rem; cursor: pointer; }
.arrow, .note, figcaption { color: var(--soft); }
.arrow { display: block; font-size: .78rem; font-weight: 400; white-space: nowrap; }
.note, figcaption { font-size: .92rem; max-width: 48rem; }
figure { margin: 0 0 1.8rem; }
figcaption { margin-top: .5rem; }
.pictures { display: grid; gap: 1.1rem; align-items: start; margin-top: .7rem; }
.pictures > * { display: block; width: 100%; height: auto; background: #fff; border-radius: var(--gap); padding: var(--gap); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: .4rem 0; padding: 0; font-size: .92rem; }
.legend svg { width: .95rem; height: .95rem; margin-right: .45rem; vertical-align: -.12rem; }
footer { margin-top: 3rem; padding-top: 1.2rem; padding-bottom: 2.5rem; font-size: .88rem; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; padding-top: 1.2rem; border-top: 1px solid var(--line); }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { table { font-size: .88rem; } th, td { padding: .4rem .5rem; } .sortable tbody .word { min-width: 6.5rem; max-width: 9rem; } }
@media print { h2 { break-after: avoid; } figure { break-inside: avoid; } nav, .filter, .copy { display: none; } }
""".strip()  # noqa: E501 (a rule a line)


FILTER = """<p class="filter" hidden><label>Filter the rows and their pictures
<input type="search" placeholder="a method, a word" autocomplete="off" spellcheck="false"></label>
<output aria-live="polite"></output></p>
"""


def page(report: Report) -> str:
    """The whole file."""
    links = "".join(f'<li><a href="#{_anchor(s)}">{_text(s.title)}</a></li>' for s in report.sections)
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in report.facts.items())
    numbers = count()  # a prefix for the ids inside the drawings of each figure
    sortable = any(table.sortable for table in report.tables)
    script = f"<script>\n{SCRIPT}\n</script>\n" if sortable or any(s.snippets for s in report.sections) else ""
    sections = [_section(section, numbers) for section in report.sections]
    if sortable:  # one box for all tables, above the first
        at = next(i for i, section in enumerate(report.sections) if any(table.sortable for table in section.tables))
        sections[at] = sections[at].replace('<div class="wide"', FILTER + '<div class="wide"', 1)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{_text(report.title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<header>
<h1>{_text(report.title)}</h1>
{_paragraph(report.summary)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{"".join(sections)}</main>
<footer>
<dl>
{facts}</dl>
</footer>
{script}</body>
</html>
"""


def _text(words: str) -> str:
    """Escaped, and no line begins with a percent sign."""
    return re.sub(r"(?<=\d) %", "&nbsp;%", quote(words))


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{_text(text)}</p>\n" if text else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _section(section: Section, numbers: Iterator[int]) -> str:
    parts = [_table(table) for table in section.tables] + [_figure(figure, next(numbers)) for figure in section.figures]
    parts += [_snippet(snippet) for snippet in section.snippets]
    head = f'<h2 id="{_anchor(section)}">{_text(section.title)}</h2>\n'
    return f"<section>\n{head}{_paragraph(section.text)}{''.join(parts)}</section>\n"


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
    """A number's standard error is set smaller than the number."""
    value, sign, error = words.partition(" ± ")
    return f'{_text(value)}<span class="error">± {_text(error)}</span>' if sign else _text(words)


def _sorted_by(table: Table, row: int, column: int) -> str:
    """The value in full, for sorting: what is shown is rounded."""
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
