import gzip
import re
import sys
import time

import numpy as np
import pytest
import torch

from dubito.data import detect, table
from dubito.evaluation.data.csv_table import CsvFile


@pytest.fixture
def csv(tmp_path):
    def write(text, name="t.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        return path

    return write


@pytest.fixture
def npz(tmp_path):
    def write(**arrays):
        path = tmp_path / "t.npz"
        np.savez(path, **arrays)
        return path

    return write


def refused(message, path, *args, **options):
    with pytest.raises(ValueError, match=message) as caught:
        table(path, *args, **options)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


def test_a_missing_cell_of_one_column_is_a_row_and_a_blank_line_is_none(csv):
    """pandas writes a missing cell of one column as "", and predictions are to line up with the rows."""
    path = csv('a\n1\n""\n\n  \n3\n""\n')
    t = table(path, ())
    assert t.features == ("a", "a=?")
    assert t.x.tolist() == [[1, 0], [2, 1], [3, 0], [2, 1]]
    refused("row 2 \\(line 3\\), column 'a': the cell is empty", path, (), features=["a"])
    assert table(csv('a,b\n1,"two\n\n"\n\n3,"four"\n'), ()).features == ("a", "b=four", "b=two")  # a blank line within a cell


def test_csv_regression(csv):
    t = table(csv("a, y ,b\n1,10,2\n\n3,20,4e0\n"))
    assert t.x.tolist() == [[1, 2], [3, 4]]
    assert t.y is not None
    assert t.y.tolist() == [[10], [20]]
    assert (t.features, t.targets, t.classes) == (("a", "b"), ("y",), ())
    assert t.x.dtype == t.y.dtype == torch.float32


def test_csv_several_targets_and_chosen_features(csv):
    t = table(csv("a,b,c,d\n1,2,3,4\n"), ("d", "a"), features=("c",))
    assert t.x.tolist() == [[3]]
    assert t.y is not None
    assert t.y.tolist() == [[4, 1]]


def test_csv_without_a_target(csv):
    t = table(csv("id,a,b\nx17,1,2\n"), (), features=("b", "a"))
    assert t.y is None
    assert t.x.tolist() == [[2, 1]]


def test_csv_with_text_and_missing_cells(csv):
    t = table(csv("age,city,owner,y\n30,Rome,yes,1\n,Oslo,no,2\n50,NA,yes,3\n40,Rome,yes,4\n"))
    assert t.features == ("age", "age=?", "city=Oslo", "city=Rome", "city=?", "owner=no", "owner=yes")
    assert t.fill == {"age": 40.0}
    assert t.x[:, :2].tolist() == [[30, 0], [40, 1], [50, 0], [40, 0]]
    assert t.x[:, 2:5].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert t.x[:, 5:].tolist() == [[0, 1], [1, 0], [0, 1], [0, 1]]

    # Another file is read as the first was, whatever it lacks.
    other = table(csv("city,age,owner\nOslo,?,no\n,80,no\n", "new.csv"), (), features=t.features, fill=t.fill)
    assert other.x.tolist() == [[40, 1, 1, 0, 0, 1, 0], [80, 0, 0, 0, 1, 1, 0]]
    assert (other.features, other.fill) == (t.features, t.fill)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,city\n30,Paris\n", "column 'city', row 1 \\(line 2\\): 'Paris' is not one of the known texts, Oslo, Rome$"),
        ("age,city\n30,\n", "column 'city', row 1 \\(line 2\\): the cell is empty"),
        ("age,city\n,Oslo\n", "row 1 \\(line 2\\), column 'age': the cell is empty"),
        ("age,town\n30,Oslo\n", "no column is called 'city'"),
    ],
)
def test_what_the_first_file_did_not_have_is_refused(text, message, csv):
    refused(message, csv(text), (), features=("age", "city=Oslo", "city=Rome"))


def test_columns_that_are_no_inputs(csv):
    path = csv("id,a,y\nk1,1,5\nk2,,6\nk3,3,7\n")
    t = table(path, ignore=("id",))
    assert (t.features, t.fill) == (("a", "a=?"), {"a": 2.0})
    refused("no column is called 'key'; choose from id, a, y$", path, ignore=("key",))
    refused("no column is left for the inputs", path, ignore=("id", "a"))


def test_csv_from_a_spreadsheet(csv):
    t = table(csv('"the input","y"\r\n"1","2"\r\n', encoding="utf-8-sig"))
    assert t.features == ("the input",)


def test_csv_string_classes(csv):
    t = table(csv("a,kind\n1,dog\n2,cat\n3,dog\n"), "kind", kind="classification")
    assert t.classes == ("cat", "dog")
    assert t.y is not None
    assert t.y.tolist() == [1, 0, 1]
    assert t.y.dtype == torch.int64


def test_csv_number_classes(csv):
    t = table(csv("a,y\n1,10\n2,9\n3,9.0\n"), kind="classification")
    assert t.classes == ("9", "10")
    assert t.y is not None
    assert t.y.tolist() == [1, 0, 0]


def test_known_classes(csv):
    path = csv("a,y\n1,dog\n2,dog\n")
    t = table(path, kind="classification", classes=("bee", "cat", "dog"))
    assert t.y is not None
    assert t.y.tolist() == [2, 2]
    refused(
        "row 1 \\(line 2\\): 'dog' is not one of the known classes, bee, cat",
        path,
        kind="classification",
        classes=("bee", "cat"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("a,y\n", "a header but no row"),
        ("1,2\n3,4\n", "header with the names of the columns is needed"),
        ("a,b\n1,2\n", "no column is called 'y'; choose from a, b$"),
        ("a,yy\n1,2\n", "no column is called 'y'; did you mean 'yy'\\? choose from a, yy$"),
        ("y\n1\n", "no column is left for the inputs"),
        ("a,a,y\n1,2,3\n", "two columns are called 'a'"),
        (",a,y\n0,1,2\n", "column 1 has no name"),
        ("a,y\n1,2\n3\n", "row 2 \\(line 3\\): 1 cells, the header has 2"),
        ("a,y\n1,2\n\n3,4,5\n", "row 2 \\(line 4\\): 3 cells, the header has 2"),
        ("a,y\n1,2\n,\n", "row 2 \\(line 3\\), column 'y': the cell is empty"),
        ("a,b,y\n1,,2\n,NA,4\n", "column 'b' is empty; leave it out \\(--ignore\\)"),
        ("a,y\np,1\nq,2\nr,3\n", "column 'a' holds 3 different texts in 3 rows, such as 'p'"),
        ("a,a=p,y\np,1,1\nq,2,2\n", "the column 'a=p' has the name of an input that is made of 'a'"),
        ("a,y\n1,2\n3,NA\n", "row 2 \\(line 3\\), column 'y': NA stands for a missing value"),
        ("a,y\n1,2\nred,4\n", "row 2 \\(line 3\\), column 'a': 'red' is not a number"),
        ("a,y\ninf,2\n", "row 1 \\(line 2\\), column 'a': inf is too large or infinite"),
        ("a,y\n1,1e39\n", "row 1 \\(line 2\\), column 'y': 1e39 is too large or infinite"),
        ('a,y\n"1,2\n', "cannot be read as CSV"),
    ],
)
def test_bad_csv(text, message, csv):
    refused(message, csv(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,y\n1,dog\n2,dog\n", "column 'y': every row is of the one class 'dog'"),
        ("a,y\n1,dog\n2,\n", "column 'y', row 2 \\(line 3\\): the class is missing"),
        ("a,y\n1,0.5\n2,1\n", "column 'y', row 1 \\(line 2\\): 0.5 is a number, not a class"),
        *(
            (f"a,y\n1,dog\n2,cat\n3,{text}\n", f"column 'y', row 3 \\(line 4\\): {re.escape(text)} stands for a missing class")
            for text in ("NA", "none", "?", "null", "NaN")
        ),
    ],
)
def test_bad_classes(text, message, csv):
    refused(message, csv(text), kind="classification")


def test_a_class_may_have_such_a_name_where_it_is_asked_for(csv):
    t = table(csv("a,y\n1,none\n2,few\n"), kind="classification", classes=("none", "few"))
    assert t.y is not None
    assert t.y.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digits_are_kept_where_they_are_asked_for(dtype, csv, npz):
    exact = dtype == torch.float64
    for path in (csv("a,y\n1700000001,1e9\n1700000002,1000000000.5\n"), npz(x=[[1700000001], [1700000002]], y=[1e9, 1e9 + 0.5])):
        t = table(path, dtype=dtype)
        assert t.y is not None
        assert t.x.dtype == t.y.dtype == dtype
        assert (float(t.x[1] - t.x[0]), float(t.y[1] - t.y[0])) == ((1, 0.5) if exact else (0, 0))
    with pytest.raises(ValueError, match="1e39 is too large or infinite"):
        table(csv("a,y\n1,1e39\n"), dtype=dtype)


def test_not_text(csv):
    refused("cannot be read as CSV in UTF-8", csv("à,y\n1,2\n", encoding="latin-1"))


def test_no_such_file(tmp_path):
    refused("there is no such file", tmp_path / "none.csv")


def test_unknown_ending(csv):
    refused("only .csv, .tsv .* files can be read", csv("a,y\n1,2\n", name="t.xlsx"))


def test_bad_arguments(csv):
    path = csv("a,y\n1,2\n")
    with pytest.raises(ValueError, match='"regression" or "classification", not \'ranking\''):
        table(path, kind="ranking")
    with pytest.raises(ValueError, match="one target, not 2: a, y"):
        table(path, ("a", "y"), kind="classification")


def test_npz_regression(npz):
    t = table(npz(x=np.arange(6).reshape(3, 2), y=np.arange(3.0)))
    assert t.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert t.y is not None
    assert t.y.tolist() == [[0], [1], [2]]
    assert t.features == ("x0", "x1")
    assert t.x.dtype == t.y.dtype == torch.float32


def test_npz_images_and_text_classes(npz):
    t = table(npz(x=np.zeros((3, 1, 4, 4)), label=np.array(["b", "a", "b"])), "label", kind="classification")
    assert t.x.shape == (3, 1, 4, 4)
    assert (t.features, t.classes) == ((), ("a", "b"))
    assert t.y is not None
    assert t.y.tolist() == [1, 0, 1]


def test_npz_without_a_target(npz):
    t = table(npz(x=np.ones((2, 2))), (), features=("width", "height"))
    assert (t.y, t.features) == (None, ("width", "height"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.ones((2, 2)), "y": np.ones(2)}, "no array is called 'x'; choose from X, y$"),
        ({"x": np.ones((2, 2)), "yy": np.ones(2)}, "no array is called 'y'; did you mean 'yy'"),
        ({"x": np.ones(2), "y": np.ones(2)}, "its shape is \\(2,\\)"),
        ({"x": np.ones((0, 2)), "y": np.ones(0)}, "its shape is \\(0, 2\\)"),
        ({"x": np.ones((2, 2)), "y": np.ones(3)}, "x has 2 rows, but y has the shape \\(3,\\)"),
        ({"x": np.array([[1.0, 2.0], [np.nan, 3.0]]), "y": np.ones(2)}, "x\\[1, 0\\]: nan stands for a missing value"),
        ({"x": np.array([["a"], ["b"]]), "y": np.ones(2)}, "x holds <U1, not numbers"),
        ({"x": np.array([[1.0, None]], dtype=object), "y": np.ones(1)}, "cannot be read as arrays.*allow_pickle=False"),
    ],
)
def test_bad_npz(arrays, message, npz):
    refused(message, npz(**arrays))


def test_classes_are_one_only_where_they_are_the_same_whole_number(csv):
    def classes(*labels: str) -> tuple[str, ...]:
        return table(csv("a,y\n" + "".join(f"0,{label}\n" for label in labels)), kind="classification").classes

    assert classes("1", "1.0", "01", "+1", "1.", "-0", "0", "-2") == ("-2", "0", "1")
    assert set(classes("1e2", "100", "1_2", "12")) == {"1e2", "100", "1_2", "12"}
    large = ("9007199254740992", "9007199254740993", "9007199254740994")
    assert classes(*reversed(large)) == large
    assert detect(csv("a,y\n" + "".join(f"0,{label}\n" for label in large * 4)), "y")[1] == "whole numbers, 3 different ones"


def test_npz_one_class_and_wrong_width(npz):
    path = npz(x=np.ones((2, 3)), y=np.array([4, 4]))
    refused("every row is of the one class '4'", path, kind="classification")
    refused("x has the shape \\(2, 3\\), where \\[N, 2\\] is needed", path, features=("a", "b"))
    refused("one target array", path, ("y", "z"))


def test_broken_npz(npz, csv):
    refused("not an NPZ file", csv("a,y\n1,2\n", name="t.npz"))
    path = npz(x=np.ones((50, 2)), y=np.ones(50))
    content = bytearray(path.read_bytes())
    content[200:220] = bytes(20)
    path.write_bytes(content)
    refused("cannot be read as arrays", path)


@pytest.mark.parametrize(
    ("cells", "kind", "why"),
    [
        (["red", "1", "2", "red"], "classification", "text"),
        (["0", "1", "1.0", "00"], "classification", "whole numbers, 2 different ones"),
        (["1", "2", "3", "4"], "regression", "whole numbers, 4 different ones"),
        ([str(i) for i in range(21)] * 4, "regression", "whole numbers, 21 different ones"),
        (["1", "2", "2.5", "1"], "regression", "numbers with fractions"),
        (["1", "", "NA", "1"], "classification", "whole numbers, 1 different ones"),  # the reader then says what is missing
    ],
)
def test_detect(cells, kind, why, csv, npz):
    assert detect(csv("a,y\n" + "".join(f"1,{cell}\n" for cell in cells)), "y") == (kind, why)
    assert detect(npz(x=np.zeros((len(cells), 1)), y=np.array(cells)), "y") == (kind, why)


def test_detect_arrays_and_refusals(csv, npz):
    assert detect(npz(y=np.array([0.0, 1.0, 1.0, 0.0])), "y")[0] == "classification"
    assert detect(npz(y=np.array([True, False])), "y") == ("classification", "text")
    assert detect(npz(y=np.zeros((4, 2))), "y") == ("regression", "an array of 2 axes")
    with pytest.raises(ValueError, match="no column is called 'z'"):
        detect(csv("a,y\n1,2\n"), "z")
    with pytest.raises(ValueError, match="no array is called 'z'"):
        detect(npz(y=np.zeros(4)), "z")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "a;b;y\n1,5;x;2\n2.000,25;z;3\n;z;4\n"),
        ("t.tsv", "a\tb\ty\n1,5\tx\t2\n2.000,25\tz\t3\n\tz\t4\n"),
        ("t.csv", "a|b|y\n1.5|x|2\n2000.25|z|3\n|z|4\n"),
        ("t.csv", 'a,b,y\n"1.5",x,2\n2000.25,z,3\n,z,4\n'),
    ],
)
def test_separators_and_decimal_commas(name, text, csv):
    found = table(csv(text, name=name), "y")
    assert found.features == ("a", "a=?", "b=x", "b=z")
    assert found.x[:2, 0].tolist() == [1.5, 2000.25]
    assert found.y is not None
    assert found.y.flatten().tolist() == [2, 3, 4]


def test_percentages_with_decimal_commas(csv):
    file = CsvFile.read(csv("a;;y\n1,5 %;1;2\n2,25%;2;3\n"), unnamed=True)
    assert file.columns == {"a": ["1.5 %", "2.25%"], "unnamed 2": ["1", "2"], "y": ["2", "3"]}


def test_compressed_csv(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,y\n1,2\n3,4\n"))
    assert table(path, "y").x.flatten().tolist() == [1, 3]
    path.write_bytes(b"a,y\n1,2\n")
    refused("cannot be read as CSV", path)


def test_parquet_without_its_reader_names_the_extra(tmp_path, monkeypatch):
    for name in ("polars", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    refused(r"t.parquet: Parquet needs polars or pandas with pyarrow: pip install 'dubito\[tables\]'", path)


def test_parquet(tmp_path):
    frames = pytest.importorskip("polars")
    frames.DataFrame({"a": [1.5, None, 2.0], "b": ["x", "y", "x"], "y": [1, 2, 3]}).write_parquet(tmp_path / "t.parquet")
    found = table(tmp_path / "t.parquet", "y")
    assert found.features == ("a", "a=?", "b=x", "b=y")
    assert found.x[0, 0] == 1.5


def test_many_columns_take_linear_time(csv):
    names = [f"c{i}" for i in range(20_000)]
    started = time.process_time()
    found = table(csv(",".join([*names, "y"]) + "\n" + (",".join(["1"] * 20_001) + "\n") * 3), "y")
    assert found.x.shape == (3, 20_000)
    assert time.process_time() - started < 3  # 20,000 squared comparisons took 6 seconds
