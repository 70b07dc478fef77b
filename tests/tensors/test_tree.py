"""Arithmetic on trees, with hypothesis for shapes and dtypes."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dubito.tensors import tree

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(shapes, dtypes, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_flatten_and_unflatten_are_inverse(sizes, dtype, draws):
    leaves = {f"w{i}": torch.randn(shape).to(dtype) for i, shape in enumerate(sizes)}
    flat = tree.flatten(leaves)
    assert flat.shape == (tree.size(leaves),)
    assert all(torch.equal(a, leaves[n]) for n, a in tree.unflatten(flat, leaves).items())
    stacked = tree.repeat(leaves, draws)
    flat = tree.flatten(stacked, stacked=True)
    assert flat.shape == (draws, tree.size(leaves))
    assert all(torch.equal(a, stacked[n]) for n, a in tree.unflatten(flat, leaves).items())


def test_stack_select_and_concatenate():
    a, b = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    both = tree.stack([a, b])
    assert torch.equal(tree.select(both, 1)["w"], b["w"])
    assert tree.count(tree.concatenate([both, both])) == 4
    assert torch.equal(tree.select(both, torch.tensor([1, 1, 0]))["w"][:, 0], torch.tensor([1.0, 1.0, 0.0]))


def test_a_clone_shares_nothing():
    p = nn.Parameter(torch.ones(2))
    copy = tree.clone({"w": p})["w"]
    copy += 1
    assert p.sum() == 2
    assert not copy.requires_grad


def test_move_reaches_into_everything_and_respects_what_knows_better():
    class Encoding(UserDict):
        def to(self, device):
            self.moved = device
            return self

    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    value = {"a": [torch.ones(2), ("text", torch.ones(1).int())], "packed": packed, "enc": Encoding(x=1), "none": None}
    moved = tree.move(value, "cpu", torch.float64)
    assert moved["a"][0].dtype == torch.float64
    assert moved["a"][1][1].dtype == torch.int32
    assert moved["a"][1][0] == "text"
    assert isinstance(moved["packed"], nn.utils.rnn.PackedSequence)
    assert moved["enc"].moved == "cpu"
    assert len(list(tree.leaves(moved["a"]))) == 2


@pytest.mark.parametrize("array", [np.array(["cat", "dog"]), np.array([1.0, None])])
def test_arrays_of_names_and_objects_are_told_of(array):
    with pytest.raises(TypeError, match=r"holds text, dates or objects, not numbers: .* np.unique\(names, return_inverse=True\)"):
        tree.tensors((np.zeros(2), array))
