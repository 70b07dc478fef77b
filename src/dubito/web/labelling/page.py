"""The page on which a person labels: one file, with nothing to load but inputs and the state of the session."""

from __future__ import annotations

import json
from html import escape
from string import ascii_lowercase

from dubito.report.html import STYLE
from dubito.web.labelling.script import SCRIPT
from dubito.web.labelling.task import Task

OWN_STYLE = """
body { min-height: 100vh; display: flex; flex-direction: column; }
header { padding: .8rem 1.25rem 0; display: flex; flex-wrap: wrap; gap: .3rem 1.5rem; align-items: baseline; width: 100%; }
header h1 { font-size: 1.25rem; margin: 0; }
header p { margin: 0; font-size: .95rem; }
#busy { margin-left: auto; }
main { display: grid; grid-template-columns: minmax(0, 3fr) minmax(17rem, 2fr); gap: 1.5rem; padding: 1rem 1.25rem; width: 100%; flex: 1; }
#question { display: flex; flex-direction: column; gap: .9rem; min-width: 0; }
#input { background: var(--tint); border: 1px solid var(--line); border-radius: .6rem; height: min(26rem, 48vh); display: flex; align-items: center;
  justify-content: center; overflow: auto; padding: 1rem; }
#input img { height: 100%; width: 100%; object-fit: contain; image-rendering: pixelated; }
#input img.tiny { height: 65%; image-rendering: auto; }
#input blockquote { font-size: clamp(1.2rem, 2.6vw, 1.7rem); line-height: 1.45; margin: auto; max-width: 34rem; }
#input table { margin: auto; }
#input .note { text-align: center; }
#classes { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem; }
button { font: inherit; color: inherit; background: var(--page); border: 1px solid var(--edge); border-radius: .45rem; padding: .4rem .6rem; cursor: pointer; }
button:hover:not(:disabled) { border-color: var(--link); }
button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
button:disabled { opacity: .45; cursor: default; }
#classes button { display: flex; align-items: center; gap: .5rem; text-align: left; position: relative; overflow: hidden; }
#classes button > * { position: relative; }
#classes .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; flex: 1; }
#classes .count { color: var(--soft); font-size: .85rem; font-variant-numeric: tabular-nums; }
#classes .guess { position: absolute; inset: 0 auto 0 0; background: var(--best); width: 0; }
kbd { font: 600 .85rem ui-monospace, monospace; background: var(--tint); border: 1px solid var(--edge); border-bottom-width: 2px; border-radius: .3rem;
  padding: .05rem .4rem; min-width: 1.5rem; text-align: center; }
#actions { display: flex; flex-wrap: wrap; gap: .5rem; }
#said { min-height: 1.5rem; margin: 0; color: var(--soft); }
#trouble { border: 1px solid #c0392b; border-radius: .45rem; padding: .5rem .8rem; margin: 0; }
#numbers { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem; margin: 0; padding: 0; border: 0; }
#numbers div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .7rem; }
#numbers dt { font-weight: 400; font-size: .84rem; color: var(--soft); line-height: 1.3; }
#numbers dd { font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
#charts figure { margin: 1rem 0 0; }
#charts figcaption { margin: 0 0 .2rem; }
#charts svg { width: 100%; height: auto; display: block; }
#charts text { font-size: 10px; fill: var(--soft); }
#recent { display: flex; flex-wrap: wrap; gap: .4rem; list-style: none; margin: .5rem 0 0; padding: 0; }
#recent button { padding: .25rem; width: 4.4rem; font-size: .8rem; line-height: 1.25; text-align: center; overflow: hidden; }
#recent img { width: 100%; height: 3.2rem; object-fit: contain; image-rendering: pixelated; display: block; }
#recent .words { display: block; height: 3.2rem; overflow: hidden; font-size: .66rem; text-align: left; overflow-wrap: anywhere; }
#recent .name { display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
h2 { font-size: 1rem; border: 0; padding: 0; margin: 1.2rem 0 0; }
footer { margin-top: 0; padding-bottom: 1rem; width: 100%; }
@media (max-width: 48rem) { main { grid-template-columns: 1fr; } #input { height: 15rem; } #busy { margin-left: 0; } }
""".strip()  # noqa: E501 (a rule a line)


def keys(classes: tuple[str, ...]) -> tuple[str, ...]:
    """The key of every class: a name of one letter or digit is its own; else 1 to 9 and 0, then letters, and "" when these run out.

    >>> keys(("0", "1", "2")), keys(("cat", "dog"))
    (('0', '1', '2'), ('1', '2'))
    """
    if all(len(name) == 1 and name.isalnum() for name in classes) and len({name.lower() for name in classes}) == len(classes):
        return tuple(name.lower() for name in classes)
    known = [*"1234567890", *ascii_lowercase]
    return tuple(known[i] if i < len(known) else "" for i in range(len(classes)))


def page(task: Task) -> str:
    """The whole file for a task."""
    settings = json.dumps({"classes": task.classes, "keys": keys(task.classes)}).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Labelling {escape(task.name)}</title>
<style>
{STYLE}
{OWN_STYLE}
</style>
</head>
<body>
<header>
<h1>{escape(task.name)}</h1>
<p id="progress"></p>
<p id="busy" role="status"></p>
</header>
<main>
<section id="question" aria-label="What is this?">
<p id="trouble" role="alert" hidden></p>
<div id="input" aria-live="polite"></div>
<div id="classes"></div>
<div id="actions">
<button id="skip"><kbd>Space</kbd> cannot tell</button>
<button id="undo"><kbd>Backspace</kbd> undo</button>
<button id="guess" aria-pressed="false"><kbd>/</kbd> show the model's guess</button>
<button id="stop"><kbd>Esc</kbd> stop for now</button>
</div>
<p id="said" role="status"></p>
</section>
<section aria-label="How far it is">
<dl id="numbers"></dl>
<div id="charts"></div>
<h2>Last answers</h2>
<ul id="recent"></ul>
</section>
</main>
<footer>Every answer is on disk as soon as it is given. Click one of the last answers to be asked again.
The model asks for what it doubts, so its guesses there are worse than elsewhere.</footer>
<script>
const SETTINGS = {settings};
{SCRIPT}
</script>
</body>
</html>
"""
