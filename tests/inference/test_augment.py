"""Augmentations change what they say, by as much as they say, and nothing else."""

from __future__ import annotations

import pytest
import torch

from dubito.augment import Compose, Flip, Noise, Shift


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_shifts_are_uniform_and_the_same_for_all_channels():
    image = torch.zeros(3, 9, 9)
    image[:, 4, 4] = torch.tensor([1.0, 2.0, 3.0])
    moved = Shift(2)(image.expand(5000, 3, 9, 9), source())
    assert torch.equal(moved.sum((2, 3)), torch.tensor([1.0, 2.0, 3.0]).expand(5000, 3))
    assert torch.equal(moved[:, 1], 2 * moved[:, 0])
    seen = moved[:, 0].mean(0)
    inside = seen[2:7, 2:7]
    assert float(seen.sum()) == pytest.approx(float(inside.sum()))
    assert (inside - 1 / 25).abs().max() < 4 * (1 / 25 / 5000) ** 0.5


def test_a_shift_is_a_crop_of_the_reflected_image():
    x = torch.rand(64, 2, 6, 5, generator=source(1))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2), mode="reflect")
    moved = Shift(2)(x, source())
    for one, around in zip(moved, padded, strict=True):
        crops = [around[:, i : i + 6, j : j + 5] for i in range(5) for j in range(5)]
        assert any(torch.equal(one, crop) for crop in crops)
    with pytest.raises(ValueError, match="larger than 5 pixels"):
        Shift(5)(x, source())


def test_flips_half_and_noise_has_its_scale():
    x = torch.rand(4000, 1, 3, 4, generator=source(1))
    turned = Flip()(x, source())
    mirrored = (turned == x.flip(-1)).flatten(1).all(1)
    assert ((turned == x).flatten(1).all(1) ^ mirrored).all()
    assert float(mirrored.double().mean()) == pytest.approx(0.5, abs=0.03)
    apart = Noise(0.3)(x, source()) - x
    assert float(apart.std()) == pytest.approx(0.3, rel=0.02)
    assert abs(float(apart.mean())) < 0.01


def test_the_generator_decides_and_nothing_is_changed_in_place():
    x = torch.rand(8, 1, 6, 6, generator=source(1))
    kept, world = x.clone(), torch.get_rng_state()
    change = Compose((Shift(1), Flip(), Noise(0.1)))
    assert torch.equal(change(x, source(2)), change(x, source(2)))
    assert not torch.equal(change(x, source(2)), change(x, source(3)))
    assert torch.equal(x, kept)
    assert torch.equal(world, torch.get_rng_state())


def test_refusals():
    with pytest.raises(ValueError, match="scale must be at least 0"):
        Noise(-1.0)
    with pytest.raises(ValueError, match="at least 0"):
        Shift(-1)
    with pytest.raises(TypeError, match=r"real numbers; got torch.uint8"):
        Noise(0.1)(torch.zeros(2, 3, dtype=torch.uint8), source())
    with pytest.raises(ValueError, match=r"mirror; got \[2, 3\]"):
        Flip()(torch.zeros(2, 3), source())
