"""A session: the person goes on while the model learns, nothing is lost, and it goes on tomorrow."""

import csv
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from torch import nn

from dubito.evaluation.problems import problem, some
from dubito.labelling import Server, Session, session, task
from dubito.tensors import store

CLASSES = 10
ROWS = some(899, 60).tolist()  # of the 60 inputs, in the data set
TRUTH = problem("digits").split(0).y_train[ROWS].tolist()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(session, "STEPS", 5)


def opened(folder, *, given=None, **options):
    return Session(given or task("digits", pool=60, test=30), folder, **{"batch": 4, "draws": 5, **options})


@contextmanager
def running(folder, **options):
    one = opened(folder, **options)
    one.start()
    try:
        yield one
    finally:
        one.close()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def answer(one, n):
    for _ in range(n):
        until(lambda: one.queue)
        index = one.queue[0]
        one.answer(index, TRUTH[index])


def rows(folder):
    with (folder / "labels.csv").open() as file:
        return [(int(row["row"]), row["class"]) for row in csv.DictReader(file)]


def test_it_asks_learns_and_shows_how_it_gets_better(tmp_path):
    with running(tmp_path) as one:
        answer(one, 8)
        until(lambda: one.state()["rounds"] and not one.busy)
        state = one.state()
        assert state["labelled"] == 8
        assert state["rounds"][0]["labels"] >= 2
        assert 0 <= state["rounds"][0]["held_out"]["accuracy"] <= 1
        assert state["rounds"][0]["pool"]["epistemic"] > 0
        until(lambda: one.queue and one.state()["asked"][0]["guess"] is not None)
        assert sum(one.state()["asked"][0]["guess"]) == pytest.approx(1, abs=1e-4)
        assert json.loads(json.dumps(one.state())) == one.state()
    assert rows(tmp_path) == [(ROWS[index], str(TRUTH[index])) for index in one.journal.standing]


def test_the_person_goes_on_while_the_model_learns(tmp_path, monkeypatch):
    learning, go = threading.Event(), threading.Event()
    with running(tmp_path, batch=8) as one:
        real = one.learning.refit

        def slow():
            learning.set()
            assert go.wait(60)
            return real()

        monkeypatch.setattr(one.learning, "refit", slow)
        answer(one, 4)
        assert learning.wait(60)
        first = one.queue[0]
        answer(one, 2)
        assert len(one.journal.standing) == 6, "taken, though a fit is under way"
        current = one.queue[0]
        go.set()
        until(lambda: len(one.queue) > 2 or one.error)
        assert one.error is None
        assert one.queue[0] == current, "what is being looked at does not change under one's eyes"
        assert first not in one.queue


def test_undo_skip_and_the_model_follow(tmp_path):
    with running(tmp_path) as one:
        until(lambda: len(one.queue) == 4)
        a, b, c, d = one.queue
        one.answer(a, 1)
        one.answer(b, None)
        one.undo()
        assert one.queue[0] == b
        one.undo(a)
        assert one.queue[0] == a
        one.answer(a, 3)
        one.answer(b, 2)
        one.answer(c, None)
        one.answer(d, 5)
        until(lambda: one.queue and not one.busy)
        assert not {a, b, c, d} & set(one.queue)
        one.undo(c)  # it may have been told to the model as skipped
        one.answer(c, 7)
        one.undo(a)
    assert one.journal.standing == {b: 2, d: 5, c: 7}
    assert dict(zip(one.learning.labelled.tolist(), one.learning.targets.tolist(), strict=True)) == {b: 2, d: 5, c: 7}
    assert one.learning.skipped.tolist() == []
    assert a in one.learning.pending.tolist()
    assert rows(tmp_path) == [(ROWS[b], "2"), (ROWS[d], "5"), (ROWS[c], "7")]


def test_the_file_of_labels_is_never_behind(tmp_path, monkeypatch):
    one = opened(tmp_path)
    one.queue = a, b, _ = one.learning.ask(3).tolist()
    one.answer(a, 1)
    assert rows(tmp_path) == [(ROWS[a], "1")]
    one.answer(b, 2)
    one.undo(a)
    assert rows(tmp_path) == [(ROWS[b], "2")]

    def full():
        raise store.WriteError(28, "no room")

    monkeypatch.setattr(one, "_write_labels", full)
    one.answer(a, 3)  # taken: it is in the journal
    assert one.journal.standing == {b: 2, a: 3}
    assert a not in one.queue
    one._lock.close()


def test_what_the_model_was_told_is_taken_back(tmp_path):
    one = opened(tmp_path)
    a, b, c = one.learning.ask(3).tolist()
    one._sync_labels({a: 1, b: None, c: 2})
    one._sync_labels({b: 4, c: None})
    assert one.learning.labelled.tolist() == [b]
    assert one.learning.targets.tolist() == [4]
    assert one.learning.skipped.tolist() == [c]
    assert a in one.learning.pending.tolist()
    one._sync_labels({b: 5})
    assert one.learning.targets.tolist() == [5]
    assert {a, c} <= set(one.learning.pending.tolist())
    one._lock.close()


def test_it_goes_on_tomorrow_also_after_a_crash(tmp_path):
    one = opened(tmp_path)
    one.start()
    answer(one, 6)
    until(lambda: not one.busy and len(one.queue) > 2)
    index = one.queue[0]
    one._stopping = True  # a crash: nobody closes the session, and only the file of answers knows the last one
    with one._changed:
        one._changed.notify_all()
    one._thread.join()
    one._stopping = False
    one.answer(index, TRUTH[index])
    left = list(one.queue)
    one._lock.close()
    (tmp_path / "labels.csv").unlink()
    (tmp_path / ".labels.csv.a8s7d").write_text("row,cl")
    opened(tmp_path)._lock.close()
    assert len(rows(tmp_path)) == 7, "the labels are there before anything is fitted"
    assert not list(tmp_path.glob(".labels.csv.*"))
    with running(tmp_path) as again:
        assert again.journal.standing == one.journal.standing
        assert again.queue[: len(left)] == left or set(left) <= set(again.queue)
        until(lambda: again._fitted == 7)
        assert again.learning.labelled.tolist() == list(again.journal.standing)
        assert len(again.state()["rounds"]) >= len(one.state()["rounds"])
    assert len(rows(tmp_path)) == 7


@pytest.mark.parametrize("damage", ["missing", "empty", "shorter"])
def test_answers_that_are_lost_are_told_and_their_copies_stay(damage, tmp_path):
    with running(tmp_path) as one:
        answer(one, 3)
    path = tmp_path / "answers.jsonl"
    content, copies = path.read_bytes(), rows(tmp_path)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "shorter" else 0])
    with pytest.raises(store.FileError, match=r"answers of \d inputs are lost, which labels.csv or model still have"):
        opened(tmp_path)
    assert rows(tmp_path) == copies
    path.write_bytes(content)
    opened(tmp_path).close()
    assert rows(tmp_path) == copies


def test_classes_that_look_like_formulas_are_escaped(tmp_path):
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n")
    with running(tmp_path / "folder", given=task(str(tmp_path / "lines.txt"), classes=("=A1", "-1"))) as one:
        for label in (0, 1):
            until(lambda: one.queue)
            one.answer(one.queue[0], label)
    assert sorted(name for _, name in rows(tmp_path / "folder")) == ["'=A1", "-1"]


def test_all_inputs_can_be_answered(tmp_path):
    with running(tmp_path, given=task("digits", pool=6, test=10)) as one:
        for _ in range(6):
            until(lambda: one.queue)
            one.answer(one.queue[0], 3)
        until(lambda: one._fitted == 6)
        state = one.state()
        assert state["done"]
        assert state["asked"] == []
        assert state["rounds"][-1]["labels"] == 6, "the last fit knows all"


def test_a_fit_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    with running(tmp_path) as one:
        real = one.learning.refit

        def broken():
            raise FloatingPointError("NaN in the loss")

        monkeypatch.setattr(one.learning, "refit", broken)
        answer(one, 2)
        until(lambda: one.error)
        assert one.state()["error"] == "FloatingPointError: NaN in the loss"
        answer(one, 7)  # more than had been asked: the person goes on whatever happens
        assert len(one.journal.standing) == 9
        monkeypatch.setattr(one.learning, "refit", real)
        answer(one, 1)
        until(lambda: one.error is None and one.state()["rounds"])


def test_who_does_not_wait_for_the_fit_has_all_labels(tmp_path, monkeypatch):
    learning, go = threading.Event(), threading.Event()
    one = opened(tmp_path, batch=8)
    one.start()
    monkeypatch.setattr(one.learning, "refit", lambda: learning.set() or go.wait(60))
    answer(one, 4)
    assert learning.wait(60)
    answer(one, 2)
    one.close(patience=0)
    assert len(rows(tmp_path)) == 6
    go.set()
    one.close()


def test_a_disk_that_is_full_at_the_end_is_told(tmp_path, monkeypatch):
    one = opened(tmp_path)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "atomic_write", full)
    with pytest.raises(store.WriteError, match=r"No space.*answers\.jsonl"):
        one.close()
    monkeypatch.undo()
    opened(tmp_path)._lock.close()  # it is not in use any more


def test_what_cannot_be_is_refused(tmp_path):
    with running(tmp_path) as one:
        until(lambda: one.queue)
        index = one.queue[0]
        for wrong in (10, -1, "3", True, 2.0):
            with pytest.raises(ValueError, match="from 0 to 9"):
                one.answer(index, wrong)
        with pytest.raises(ValueError, match="no answer to take back"):
            one.undo()
        one.answer(index, 3)
        with pytest.raises(ValueError, match="is not in the queue"):
            one.answer(index, 3)
        with pytest.raises(FileExistsError, match="in use by another"):
            opened(tmp_path)
    with pytest.raises(ValueError, match="stopped"):
        one.answer(index, 3)
    with pytest.raises(ValueError, match="pool was 60 and is now 50"):
        Session(task("digits", pool=50), tmp_path)
    with pytest.raises(ValueError, match="batch must be at least 2"):
        opened(tmp_path, batch=1)
    (tmp_path / "answers.jsonl").write_text('{"index": 60, "label": 0}\n')
    with pytest.raises(store.FileError, match="does not belong to this task"):
        opened(tmp_path)


@pytest.fixture
def server(tmp_path):
    with running(tmp_path) as one:
        found = Server(one)
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        until(lambda: one.queue)
        yield found
        found.shutdown()
        found.server_close()


def ask(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    kind = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, body=None if body is None else json.dumps(body), headers={**kind, **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def test_the_server_answers_on_this_machine_to_who_knows_the_token(server):
    assert server.server_address[0] == "127.0.0.1"
    base = f"/{server.token}/"
    response, content = ask(server, "GET", base)
    assert response.status == 200
    assert b"<title>Labelling digits</title>" in content
    assert "frame-ancestors 'none'" in response.getheader("Content-Security-Policy")
    index = server.session.queue[0]
    response, content = ask(server, "GET", f"{base}input/{index}")
    assert content.startswith(b"\x89PNG")
    for path in ("/", "/state", "/wrong/state", f"/{server.token}x/", f"{base}input/60", f"{base}input/-1", f"{base}other"):
        assert ask(server, "GET", path)[0].status == 404, path
    assert ask(server, "GET", base, Host="evil.example")[0].status == 404, "a site that points to this machine"
    assert ask(server, "POST", "/wrong/label", {"index": index, "label": 1})[0].status == 404
    assert ask(server, "POST", f"{base}label", {"index": index, "label": 1}, **{"Content-Type": "text/plain"})[0].status == 400
    assert server.session.journal.answers == []


def test_answers_by_the_server(server):
    base, index = f"/{server.token}/", server.session.queue[0]
    response, content = ask(server, "POST", f"{base}label", {"index": index, "label": 3})
    assert response.status == 200
    assert json.loads(content)["labelled"] == 1
    assert server.session.journal.standing == {index: 3}
    response, content = ask(server, "POST", f"{base}label", {"index": index, "label": 3})
    assert response.status == 409
    assert "another window" in json.loads(content)["refused"]
    assert ask(server, "POST", f"{base}label", {"index": "a", "label": 3})[0].status == 409
    assert ask(server, "POST", f"{base}label", [1])[0].status == 400
    assert ask(server, "POST", f"{base}undo", {})[0].status == 200
    assert server.session.journal.standing == {}
    response, content = ask(server, "POST", f"{base}stop", {})
    assert json.loads(content)["stopped"]


def test_requests_that_no_page_makes(server, capsys):
    """None of them gets two answers, reaches the session, or fills the terminal with tracebacks."""
    base, index = f"/{server.token}/", server.session.queue[0]
    good = json.dumps({"index": index, "label": 3}).encode()
    nested = b"[" * 9000
    for path, length, body in (
        ("/wrong/label", "\u00b2", b""),
        (f"{base}label", "\u00b2", b""),
        (f"{base}label", "9" * 5000, b""),
        (f"{base}label", "10001", b""),
        (f"{base}label", "-1", b""),
        (f"{base}label", str(len(nested)), nested),
        ("/wrong/label", str(len(good)), good),
    ):
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_address[1]}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(server.server_address[:2], timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode("latin-1") + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.count(b"HTTP/1.1 4") == 1, (path, length)
    try:
        raise BrokenPipeError
    except OSError:
        server.handle_error(None, None)  # a page that was gone before the answer
    assert ask(server, "GET", f"{base}state")[0].status == 200
    assert server.session.journal.answers == []
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout2d(0.3), nn.Identity()])
def test_a_network_with_dropout_of_its_own_gets_no_more(layer, tmp_path):
    one = opened(tmp_path, network=nn.Sequential(layer, nn.Flatten(), nn.Linear(64, CLASSES)))
    at = one.learning.method(5).at
    one.close()
    assert at == ("" if isinstance(layer, nn.Identity) else None)
