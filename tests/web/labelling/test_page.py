"""`dubito label` from end to end: a person at the keyboard of a headless browser."""

import http.client
import json
import re
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from dubito.labelling.server import page

from browser import Browser, program
from dubito.cli.program import main
from dubito.labelling import Server, Session, session, task


class Person:
    """Looks at the page, and presses keys."""

    def __init__(self, browser: Browser, address: str):
        self.browser = browser
        browser.ask("Page.navigate", url=address)
        browser.complaints, browser.requests = [], []
        self.until("!!document.querySelector('#classes button:not(:disabled)')")

    def until(self, condition: str) -> None:
        end = time.monotonic() + 60
        while not self.browser.run(condition):
            assert time.monotonic() < end, f"it never came to {condition}: {self.browser.complaints}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        self.browser.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.browser.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def answer(self, key: str) -> None:
        """Press a key, and wait until it has been taken."""
        count = "Number(document.querySelector('#numbers dd').textContent)"
        before = self.browser.run(count)
        self.until("!!document.querySelector('#classes button:not(:disabled)')")
        self.press(key)
        self.until(f"{count} === {before + 1}")

    def text(self, place: str) -> str:
        return self.browser.run(f"document.querySelector({place!r}).textContent")


@pytest.fixture(scope="module")
def browser():
    program()  # or skip
    with Browser() as one:
        yield one


@pytest.fixture
def person(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "STEPS", 5)
    one = Session(task("digits", pool=40, test=30), tmp_path, batch=4, draws=5)
    server = Server(one)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    one.start()
    found = Person(browser, server.address)
    found.session = one
    yield found
    server.shutdown()
    server.server_close()
    one.close()


def test_a_person_labels_by_keys_and_sees_the_model_learn(person):
    browser, one = person.browser, person.session
    person.until("document.querySelector('#input img')?.naturalWidth === 8")
    first = int(browser.run("document.querySelector('#input img').alt.split(' ')[1]"))
    person.answer("7")
    assert one.journal.standing == {first: 7}
    assert person.text("#said") == "Saved: 7"
    assert browser.run("document.querySelector('#input img').alt") != f"input {first}"
    person.press("Backspace")
    person.until(f"document.querySelector('#input img')?.alt === 'input {first}'")
    assert one.journal.standing == {}
    person.press(" ")
    person.until("document.querySelector('#progress').textContent.includes('1 skipped')")
    assert one.journal.standing == {first: None}
    for key in "01234":
        person.answer(key)
    person.until("document.querySelectorAll('#charts circle').length > 2")
    assert re.fullmatch(r"\d+\.\d %", browser.run("document.querySelectorAll('#numbers dd')[1].textContent"))
    assert "labels" in browser.run("document.querySelector('#charts svg').getAttribute('aria-label')")
    person.until("document.querySelector('#input img') && !document.querySelector('#busy').textContent")
    person.press("/")
    person.until("[...document.querySelectorAll('#classes .guess')].some(bar => parseFloat(bar.style.width) > 0)")
    last = list(one.journal.standing)[-1]
    browser.run("document.querySelector('#recent button').click()")
    person.until(f"document.querySelector('#input img')?.alt === 'input {last}'")
    browser.run("document.querySelector('#classes button[data-class=\"9\"]').click()")
    person.until("document.querySelector('#said').textContent === 'Saved: 9'")
    assert one.journal.standing[last] == 9
    person.press("x")
    person.press("Escape")
    person.until("document.querySelector('#said').textContent.startsWith('Stopped')")
    assert browser.complaints == []
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in browser.requests)


def test_it_fits_a_phone_and_says_when_the_server_has_gone(person):
    browser = person.browser
    browser.ask("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.run("window.fetch = () => Promise.reject(new Error('gone'))")
    person.press("3")
    person.until("!document.querySelector('#trouble').hidden")
    assert "are saved" in person.text("#trouble")
    assert person.session.journal.standing == {}


def test_the_command_serves_and_stops_and_goes_on(tmp_path, monkeypatch, capsys):
    """A browser of ours answers one question and stops, twice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "STEPS", 5)
    np.savez("photos.npz", x=np.random.default_rng(0).random((12, 6, 6)))
    seen, threads = [], []

    def visit(address: str) -> None:
        host, base = re.fullmatch(r"http://(127\.0\.0\.1:\d+)(/\S+/)", address).groups()

        def ask(method: str, path: str, body: dict | None = None) -> dict:
            with closing(http.client.HTTPConnection(host, timeout=60)) as connection:
                connection.request(method, base + path, json.dumps(body), {"Content-Type": "application/json"})
                return json.loads(connection.getresponse().read())

        end = time.monotonic() + 60
        while not (state := ask("GET", "state"))["asked"]:
            assert time.monotonic() < end
            time.sleep(0.02)
        seen.append(state)
        seen.append(ask("POST", "label", {"index": state["asked"][0]["index"], "label": 1}))
        ask("POST", "stop", {})

    def browse(address: str) -> None:
        threads.append(threading.Thread(target=visit, args=[address]))
        threads[-1].start()

    monkeypatch.setattr("webbrowser.open", browse)
    for labels in (1, 2):
        assert main(["label", "--data", "photos.npz", "--classes", "cat", "dog"]) == 0
        threads[-1].join()
        assert [state["labelled"] for state in seen[-2:]] == [labels - 1, labels]
        assert f"{labels} label{'s' * (labels > 1)}: labels/photos-npz/labels.csv" in capsys.readouterr().out
    assert (tmp_path / "labels/photos-npz/labels.csv").read_text().count("dog") == 2
    assert seen[2]["asked"][0]["index"] != seen[0]["asked"][0]["index"]


def test_names_cannot_break_the_page():
    given = replace(task("digits", pool=4), name="<b>&", classes=("</script><b>", "fine"))
    made = page(given)
    assert "</script><b>" not in made
    assert "<title>Labelling &lt;b&gt;&amp;</title>" in made
    assert made.count("</script>") == 1


def test_a_port_that_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        assert main(["label", "--port", str(other.getsockname()[1])]) == 2
    assert "leave it out to use a free port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "nowhere"], "no data set is called 'nowhere'"),
        (["--data", "nowhere.npz"], "there is no such file"),
        (["--acquisition", "balt"], "no acquisition function 'balt'"),
        (["--batch", "1"], "batch must be at least 2"),
        (["--test", "0"], "--test must be at least 1"),
        (["--rate", "1"], "rate must be above 0"),
        (["--network", "torch.nn:nothing"], "nothing"),
        (["--out", "/dev/null/here"], "Not a directory"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["label", *args]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
