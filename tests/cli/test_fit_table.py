"""`dubito fit TABLE`: without a method."""

import csv
import json
import os

import numpy as np
import pytest

from dubito.apps.tables import TableModel
from dubito.cli import main


@pytest.fixture
def cli(capsys):
    def run(*args):
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table, and what was fitted to it in the current folder."""
    place = tmp_path_factory.mktemp("tables")
    source = np.random.default_rng(0)
    size, kind = source.uniform(20, 200, 100), source.choice(["flat", "=house"], 100)
    price = 1000 * size + 50_000 * (kind == "flat") + source.normal(size=100) * 3000
    with open(place / "homes.csv", "w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["nr", "size", "kind", "price"])
        writer.writerows(
            [i, f"{s:.1f}".replace(".", ","), k, round(p)] for i, (s, k, p) in enumerate(zip(size, kind, price, strict=True))
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 100)
        patch.chdir(place)
        assert main(["fit", "homes.csv", "--target", "price"]) == 0
        assert main(["fit", "homes.csv", "--target", "kind", "--out", "kinds"]) == 0
    return place


def rows(text):
    return list(csv.DictReader(text.splitlines()))


def test_fit_says_what_it_does(folder, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 20)
    code, out, err = cli("fit", folder / "homes.csv", "--target", "price", "--out", tmp_path / "o", "--ignore", "kind")
    assert (code, err) == (0, "")
    assert "100 rows, 3 columns beside the target" in out
    assert "price: regression (whole numbers, 100 different ones; otherwise give --kind classification)" in out
    assert "Note: column nr was left out: an ID: the number of the row" in out
    assert f"Wrote {tmp_path / 'o'}. Predict with: dubito predict" in out
    code, _, err = cli("fit", folder / "homes.csv", "--target", "price", "--out", tmp_path / "o")
    assert (code, "exists" in err) == (2, True)


def test_the_folder_has_the_name_of_the_table(folder):
    assert os.listdir(folder / "homes") == ["table.safetensors"]
    assert TableModel.load(folder / "homes" / "table.safetensors").targets == ("price",)


def test_predict_answers_odd_rows_and_says_so(folder, cli, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("kind,size\nflat,100\nflat,\n=house,100\ncastle,100\nflat,1e9\n")
    code, out, err = cli("predict", folder / "homes", path)
    assert (code, err) == (0, "")
    found = rows(out)
    assert [row["dubito_note"].partition(",")[0].partition(" far")[0] for row in found] == [
        "", "size is missing or unreadable", "", "kind 'castle' is new", "size is",
    ]  # fmt: skip
    assert float(found[0]["mean"]) == pytest.approx(150_000, rel=0.1)
    assert float(found[0]["lower"]) < float(found[0]["mean"]) < float(found[0]["upper"])
    assert min(float(found[i]["total"]) for i in (1, 3, 4)) >= float(found[0]["total"])


def test_cells_that_look_like_formulas_are_escaped(folder, cli):
    code, out, _ = cli("predict", folder / "kinds", folder / "homes.csv")
    assert code == 0
    assert {row["class"] for row in rows(out)} <= {"flat", "'=house"}
    assert "p_=house" in out.splitlines()[0]


def test_evaluate(folder, cli, tmp_path):
    code, out, _ = cli("evaluate", folder / "homes", folder / "homes.csv", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["rows"] == 100
    assert found["coverage"] > 0.8
    assert cli("evaluate", folder / "kinds", folder / "homes.csv")[0] == 0
    path = tmp_path / "new.csv"
    path.write_text("kind,size,price\ncastle,100,1\nflat,100,\n")
    assert "row 2: the target is missing" in cli("evaluate", folder / "homes", path)[2]
    assert "row 1: the target is missing, or is not one" in cli("evaluate", folder / "kinds", path)[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["predict", "FOLDER", "NEW", "--draws", "3"], "--draws 3: "),
        (["predict", "FOLDER", "NEW"], "new.csv: the table has no column size"),
        (["diagnose", "FOLDER"], "was fitted by tables, which has no chains to diagnose"),
        (["fit", "homs", "--target", "price"], "no method is called 'homs'; choose from map, "),
    ],
)
def test_refused(folder, cli, tmp_path, args, message):
    (tmp_path / "new.csv").write_text("kind\nflat\n")
    places = {"FOLDER": folder / "homes", "NEW": tmp_path / "new.csv"}
    code, _, err = cli(*(places.get(arg, arg) for arg in args))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_damaged_file(folder, cli, tmp_path):
    content = bytearray((folder / "homes" / "table.safetensors").read_bytes())
    content[-9] ^= 1
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "table.safetensors").write_bytes(content)
    code, _, err = cli("predict", tmp_path / "bad", folder / "homes.csv")
    assert (code, "do not match their checksum" in err) == (2, True)


def test_predict_repeats_the_note_on_the_calibration(folder, cli, monkeypatch):
    monkeypatch.setattr("dubito.cli.commands.notes.ENOUGH", 0)
    monkeypatch.setattr("dubito.cli.commands.notes.USUAL", (2, 3))
    code, _, err = cli("predict", folder / "homes", folder / "homes.csv")
    assert code == 0
    assert "Note: the 90 % intervals contain" in err
    assert "check it on further rows with `dubito evaluate`" in err


@pytest.fixture
def cut(folder, tmp_path):
    """The table in three parts, in a folder."""
    head, *body = (folder / "homes.csv").read_text().splitlines()
    data = tmp_path / "parts"
    data.mkdir()
    for name, lines in {"a": body[:30], "b": body[30:90], "c": body[90:]}.items():
        (data / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n")
    (data / "notes.md").write_text("not a table")
    return data


def test_a_folder_is_predicted_part_by_part_and_once(folder, cut, cli, tmp_path):
    out = tmp_path / "out"
    assert cli("predict", folder / "homes", folder / "homes.csv", "--out", tmp_path / "whole.csv")[0] == 0
    code, _, err = cli("predict", folder / "homes", cut, "--out", out, "--jobs", "2")
    assert code == 0
    assert err.count("Wrote") == 3
    assert sorted(os.listdir(out)) == ["a.csv", "b.csv", "c.csv", "predictions.json"]
    each = [(out / f"{name}.csv").read_text().splitlines() for name in "abc"]
    assert [each[0][0], *(line for lines in each for line in lines[1:])] == (tmp_path / "whole.csv").read_text().splitlines()
    written = {name: (out / name).stat().st_mtime_ns for name in os.listdir(out)}
    os.remove(out / "b.csv")
    code, _, err = cli("predict", folder / "homes", cut, "--out", out)  # as after a run that was stopped
    assert (code, err.count("Wrote")) == (0, 1)
    assert all((out / name).stat().st_mtime_ns == written[name] for name in ("a.csv", "c.csv"))
    code, _, err = cli("predict", folder / "homes", cut, "--out", out)
    assert (code, "are predicted already" in err) == (0, True)
    later = (cut / "c.csv").stat().st_mtime + 100
    os.utime(cut / "c.csv", (later, later))
    assert cli("predict", folder / "homes", cut, "--out", out)[2].count("c.csv") == 1


def test_processes_of_a_launcher_share_a_folder(folder, cut, cli, tmp_path, monkeypatch):
    out, names = tmp_path / "out", []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        names.append([line.rpartition("/")[2] for line in cli("predict", folder / "homes", cut, "--out", out)[2].splitlines()])
    assert [[name for name in each if name.endswith(".csv")] for each in names] == [["a.csv", "c.csv"], ["b.csv"]]
    assert cli("predict", folder / "homes", folder / "homes.csv") == (0, "", "")  # a table alone: by the first process


def test_what_is_wrong_with_a_folder_of_tables(folder, cut, cli, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert "--out FOLDER" in cli("predict", folder / "homes", cut)[2]
    assert "is the folder of the tables" in cli("predict", folder / "homes", cut, "--out", cut)[2]
    (tmp_path / "empty").mkdir()
    assert "no .csv, .tsv" in cli("predict", folder / "homes", tmp_path / "empty", "--out", out)[2]
    (cut / "b.csv").write_text("nothing;of;this\n1;2;3\n")
    code, _, err = cli("predict", folder / "homes", cut, "--out", out)
    assert (code, err.count("Wrote")) == (2, 2)
    assert "1 of 3 tables cannot be predicted, the others are:" in err
    assert "b.csv" in err.rpartition("others are:")[2]
    assert "made by another model, or with other flags" in cli("predict", folder / "kinds", cut, "--out", out)[2]
    assert (
        "made by another model, or with other flags" in cli("predict", folder / "homes", cut, "--out", out, "--level", "0.5")[2]
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    assert "is not empty" in cli("predict", folder / "homes", cut, "--out", tmp_path / "full")[2]
    (cut / "a.tsv").write_text("")
    assert "rename one of them" in cli("predict", folder / "homes", cut, "--out", out)[2]
    monkeypatch.setattr("dubito.cli.commands.parts.WAIT", 0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    os.remove(cut / "a.tsv")
    assert "do all processes see the same folder?" in cli("predict", folder / "homes", cut, "--out", tmp_path / "new")[2]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_is_evaluated_as_one_table(folder, cut, cli, jobs):
    whole = json.loads(cli("evaluate", folder / "homes", folder / "homes.csv", "--json")[1])
    code, out, _ = cli("evaluate", folder / "homes", cut, "--json", "--jobs", jobs)
    found = json.loads(out)
    assert (code, found["rows"]) == (0, 100)
    assert {name: pytest.approx(value, rel=1e-6) for name, value in whole.items() if name != "standard_errors"} == {
        name: value for name, value in found.items() if name != "standard_errors"
    }
