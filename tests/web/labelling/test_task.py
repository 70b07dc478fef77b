"""What there is to label: data sets by name, and files of one's own."""

import io

import numpy as np
import pytest
import torch
from dubito.labelling.server import keys
from dubito.labelling.task import Images
from PIL import Image

from dubito.labelling import task


def test_digits_come_along_and_their_labels_are_not_in_the_pool():
    digits = task("digits", pool=30, test=20)
    assert digits.pool.shape == (30, 1, 8, 8)
    assert digits.held_out is not None
    assert digits.held_out[0].shape == (20, 1, 8, 8)
    assert digits.shown.content(3) == {"kind": "image", "width": 8, "height": 8}
    assert torch.equal(digits.pool, task("digits", pool=30).pool), "the same inputs every time"
    assert digits.build()(digits.pool).shape == (30, 10)


def test_published_sets(data_root):
    fashion = task("fashion-mnist", pool=20, test=10)
    assert (fashion.pool.shape, fashion.classes[8]) == ((20, 1, 28, 28), "bag")
    reviews = task("polarity", pool=20, test=10)
    assert reviews.classes == ("negative", "positive")
    assert "<unknown>" not in "".join(reviews.shown.content(i)["text"] for i in range(20))
    for one in (fashion, reviews):
        assert one.build()(one.pool).shape == (20, len(one.classes))


def test_an_image_is_a_png_of_its_pixels():
    x = torch.rand(2, 3, 80, 100, generator=torch.Generator().manual_seed(0))
    shown = Images(x)
    image = np.asarray(Image.open(io.BytesIO(shown.png(1))))
    np.testing.assert_allclose(image, x[1].movedim(0, -1).numpy() * 255, atol=0.51)
    assert Image.open(io.BytesIO(shown.png(1, small=True))).size == (64, 51)
    grey = np.asarray(Image.open(io.BytesIO(Images(x[:, :1], ink=True).png(0))))
    np.testing.assert_allclose(grey, 255 - x[0, 0].numpy() * 255, atol=0.51)


@pytest.mark.parametrize("shape", [(6, 1, 20, 24), (6, 20, 24), (6, 20, 24, 3)])
@pytest.mark.parametrize("inner", [False, True])
def test_images_of_ones_own_with_and_without_a_test_part(shape, inner, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    arrays = {"x": pixels} | ({"x_test": pixels[:4], "y_test": np.array(["dog", "cat", "dog", "cat"])} if inner else {})
    np.savez(tmp_path / "photos.npz", **arrays)
    found = task(str(tmp_path / "photos.npz"), classes=() if inner else ("dog", "cat"))
    assert found.classes == (("cat", "dog") if inner else ("dog", "cat"))
    assert found.pool.shape == (6, 3 if shape[-1] == 3 else 1, 20, 24)
    assert 0.9 < found.pool.max() <= 1
    assert found.build()(found.pool).shape == (6, 2)
    assert (found.held_out is not None) == inner
    if found.held_out is not None:
        assert found.held_out[1].tolist() == [1, 0, 1, 0]
        assert torch.equal(found.held_out[0], found.pool[:4])


def test_rows_are_standardised_for_the_network_and_shown_as_they_are(tmp_path):
    (tmp_path / "new.csv").write_text("age,income\n20,1000\n40,3000\n60,2000\n")
    (tmp_path / "known.csv").write_text("income,buys,age\n3000,yes,40\n1000,no,20\n")
    found = task(str(tmp_path / "new.csv"), held_out=tmp_path / "known.csv", target="buys")
    assert found.classes == ("no", "yes")
    assert found.shown.content(1) == {"kind": "row", "cells": [["age", "40"], ["income", "3000"]]}
    torch.testing.assert_close(found.pool.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert found.held_out is not None
    torch.testing.assert_close(found.held_out[0], found.pool[[1, 0]])
    assert found.held_out[1].tolist() == [1, 0]


def test_lines_of_text(tmp_path):
    (tmp_path / "new.txt").write_text("a fine film\n\nno , not this\n")
    (tmp_path / "known.txt").write_text("good a fine film\nbad not this\n")
    found = task(str(tmp_path / "new.txt"), held_out=tmp_path / "known.txt", classes=("good", "bad"))
    assert found.shown.content(1) == {"kind": "text", "text": "no , not this"}
    assert found.rows == (0, 2), "the line between them is empty"
    assert found.held_out is not None
    assert found.held_out[1].tolist() == [0, 1]
    network = found.build()
    longer = torch.nn.functional.pad(found.pool, (0, 3))
    torch.testing.assert_close(network(longer), network(found.pool))


def test_every_class_has_a_key():
    assert keys(("a", "B", "3")) == ("a", "b", "3")
    assert keys(("a", "A")) == ("1", "2")
    assert keys(tuple(f"class {i}" for i in range(40)))[9:12] == ("0", "a", "b")
    assert keys(tuple(f"class {i}" for i in range(40)))[-1] == ""


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digit", {}, "no data set is called 'digit'"),
        ("digits", {"classes": ("a", "b")}, "are for files"),
        ("nowhere.npz", {}, "there is no such file"),
        ("rows.csv", {}, "name the classes"),
        ("rows.csv", {"classes": ("a",)}, "at least two different classes"),
        ("rows.csv", {"classes": ("a", "a")}, "at least two different classes"),
        ("rows.csv", {"classes": ("a", "b"), "target": "v"}, "would be an input"),
        ("shifted.npz", {"classes": ("a", "b")}, "between 0 and 255"),
        ("strange.npz", {"classes": ("a", "b")}, r"got \[4, 7, 5, 5\]"),
        ("inner.npz", {"classes": ("a", "b")}, "'c' is not one of the classes a, b"),
        ("lines.txt", {"held_out": "labels.txt"}, "line 2: write the class"),
        ("lines.txt", {"held_out": "labels.txt", "classes": ("a", "b")}, "line 2"),
    ],
)
def test_what_cannot_be_labelled_is_refused_in_words(name, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("u,v\n1,2\n3,5\n")
    np.savez("shifted.npz", x=np.linspace(-2, 2, 400).reshape(4, 10, 10))
    np.savez("strange.npz", x=np.zeros((4, 7, 5, 5)))
    np.savez("inner.npz", x=np.zeros((4, 2)), x_test=np.zeros((2, 2)), y_test=np.array(["a", "c"]))
    (tmp_path / "lines.txt").write_text("one two\nthree\n")
    (tmp_path / "labels.txt").write_text("a one two\nb\n")
    with pytest.raises(ValueError, match=words):
        task(name, **options)


def test_some_inputs_keep_their_numbers():
    whole, some = task("digits"), task("digits", pool=20)
    assert some.rows is not None
    assert len(some.rows) == 20
    torch.testing.assert_close(some.pool, whole.pool[list(some.rows)])


def test_some_lines_keep_their_numbers(tmp_path):
    (tmp_path / "new.txt").write_text("\n".join(f"\nline {i}" for i in range(30)))
    found = task(str(tmp_path / "new.txt"), classes=("good", "bad"), pool=5)
    assert found.rows is not None
    assert [found.shown.content(i)["text"] for i in range(5)] == [f"line {row // 2}" for row in found.rows]


def test_dark_held_out_images_are_scaled_as_the_others(tmp_path):
    pixels = np.zeros((4, 20, 20), dtype=np.uint8)
    pixels[1:] = 200
    np.savez(tmp_path / "photos.npz", x=pixels, x_test=pixels[:1] + 1, y_test=np.array(["night"]))
    found = task(str(tmp_path / "photos.npz"), classes=("night", "day"))
    assert found.held_out is not None
    assert float(found.held_out[0].max()) == pytest.approx(1 / 255)
