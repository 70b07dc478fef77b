import pytest
from dubito.data.examples import locate

from dubito.data import cifar10, fashion_mnist, kmnist, mnist, notmnist, uci

READERS = [cifar10, fashion_mnist, kmnist, mnist, notmnist, lambda **root: uci("yacht", 0, **root)]


@pytest.mark.parametrize("reader", READERS)
def test_no_folder_known(reader, monkeypatch):
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set the environment variable DUBITO_DATA"):
        reader()


@pytest.mark.parametrize("reader", READERS)
def test_file_not_there(reader, tmp_path):
    with pytest.raises(FileNotFoundError, match="put the published file in that place"):
        reader(root=tmp_path)


def test_the_argument_comes_before_the_variable(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path / "elsewhere"))
    assert locate("set", root=tmp_path) == tmp_path / "set"
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    assert locate("set") == tmp_path / "set"
