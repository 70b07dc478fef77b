"""Networks that decide by the values of certain data: padding masks, lengths, ids."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import Categorical, Model, as_module
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.streamlined import engine

WAYS = [("streamlined", {"rank": 0}), ("streamlined", {"rank": -1}), ("adjoint", {})]


def distance(a, b) -> float:
    """The largest difference of means and of variances, relative to the largest."""
    return max(float((a.f_mean - b.f_mean).abs().max()), float((a.f_var / b.f_var - 1).abs().max()))


class RMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings [B, H, T, D] of positions [B, T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.cat([angles, angles], -1)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + turned * angles.sin()


class Text(nn.Module):
    """A small text model; `skips`: with a mask that hides nothing it runs without, as text models do."""

    def __init__(self, skips: bool = True, attention: str = "sdpa", tied: bool = False):
        super().__init__()
        self.skips, self.attention = skips, attention
        self.words, self.places = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(12, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.first, self.second, self.up, self.down = RMSNorm(8), RMSNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.last = nn.Linear(8, 20 if tied else 3, bias=False)
        if tied:
            self.last.weight = self.words.weight
        with torch.no_grad():
            self.words.weight.normal_()

    def _mask(self, mask: Tensor, like: Tensor) -> Tensor | None:
        if self.skips and not torch.compiler.is_compiling() and mask.all():
            return None
        hidden = (1.0 - mask[:, None, None, :].to(like.dtype)).bool()
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill(hidden, torch.finfo(like.dtype).min)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        h = self.words(ids) + self.places(positions)
        q, k, v = (layer(self.first(h)).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k, bias = rotated(q, positions), rotated(k, positions), self._mask(mask, h)
        if self.attention == "sdpa":
            o = F.scaled_dot_product_attention(q, k, v, bias)
        else:
            scores = q @ k.transpose(-1, -2) * 0.5
            scores = scores if bias is None else scores + bias
            o = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        h = h + self.o(o.transpose(1, 2).reshape(*ids.shape, 8))
        h = h + self.down(F.silu(self.up(self.second(h))))
        end = (mask * torch.arange(ids.shape[1])).argmax(-1)
        pooled = h[torch.arange(len(ids)), end]
        return self.last(pooled)


def text(lengths: list[int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(1, 20, (len(lengths), 6), generator=g)
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    return {"ids": ids * mask, "mask": mask}


def twin(posterior: Posterior, network: nn.Module) -> Posterior:
    """The same posterior over another network with the same weights."""
    network.load_state_dict(posterior.model.network.state_dict())
    return replace(posterior, model=replace(posterior.model, network=network.eval()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("how", "options"), WAYS)
def test_a_mask_that_hides_nothing_may_be_left_out(how, options, attention, around):
    posterior = around(Text(attention=attention), variance=0.001)
    straight = twin(posterior, Text(skips=False, attention=attention))
    full, padded, late = text([6] * 4), text([6, 3, 5, 4, 2]), text([6, 6, 6, 6, 6, 2])  # the first examples do not tell
    for x in (full, late, full, padded):
        assert distance(posterior.predict(x, how, **options), straight.predict(x, how, **options)) < 1e-4
    assert len(posterior.streamlined.traces) == 2
    assert all(made.dynamic for _, made in posterior.streamlined.traces)
    assert [guard.value.item() for _, made in posterior.streamlined.traces for guard in made.guards] == [False, True]


def test_padding_against_draws(around):
    posterior, x = around(Text(), variance=0.0003), text([6, 3, 5, 4, 2])
    truth = posterior.predict(x, "sampled", draws=4000)
    adjoint, forward = posterior.predict(x, "adjoint"), posterior.predict(x, "streamlined", rank=0)
    torch.testing.assert_close(adjoint.f_mean, truth.f_mean, rtol=0, atol=0.1 * float(truth.f_var.max().sqrt()))
    assert float(((adjoint.f_var / truth.f_var).sqrt() - 1).abs().mean()) < 0.03
    assert float(((forward.f_var / truth.f_var).sqrt() - 1).abs().mean()) < 0.25


def test_tied_weights(around):
    posterior, x = around(Text(tied=True), variance=0.0003), text([6, 3, 5, 4, 2])
    truth = posterior.predict(x, "sampled", draws=4000)
    assert float(((posterior.predict(x, "adjoint").f_var / truth.f_var).sqrt() - 1).abs().mean()) < 0.04


# --- all the ways to ask ----------------------------------------------------------------------------------------------

READINGS: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda x: bool((x > 0).any()),
    "all": lambda x: (x > 0).all(),
    "item": lambda x: x.mean().item() > 0,
    "tolist": lambda x: x.mean(0).tolist()[0] > 0,
    "numpy": lambda x: x.mean().numpy() > 0,
    "detached": lambda x: x.detach().cpu().numpy().mean() > 0,
    "asarray": lambda x: np.asarray(x).mean() > 0,
    "array": lambda x: np.mean(x.__array__()) > 0,
    "float": lambda x: float(x.mean()) > 0,
    "int": lambda x: int(x.sum()) > 0,
    "range": lambda x: len(range((x > 0).sum())) > 0,
    "contains": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, x.abs()),
    "allclose": lambda x: torch.allclose(x, x.abs()),
    "nonzero": lambda x: len((x > 0).nonzero()) > 0,
}


class Decides(nn.Module):
    def __init__(self, read: Callable[[Tensor], object], random: bool = False):
        super().__init__()
        self.layer, self.read, self.random = nn.Linear(3, 2), read, random

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h if self.read(h if self.random else x) else -2 * h


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
@pytest.mark.parametrize("name", READINGS)
def test_every_way_to_ask(name, how, around):
    """By way of NumPy or lists too: the branch of the first batch is not kept for all others."""
    posterior = around(Decides(READINGS[name]))
    plain = around(copy.deepcopy(posterior.model.network.layer))
    for x in (torch.ones(4, 3), -torch.ones(5, 3), torch.ones(2, 3), -torch.ones(1, 3)):
        found, layer = posterior.predict(x, how), plain.predict(x, how)
        by = 1 if x[0, 0] > 0 else -2
        torch.testing.assert_close(found.f_mean, by * layer.f_mean)
        torch.testing.assert_close(found.f_var, by**2 * layer.f_var)


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
@pytest.mark.parametrize("name", READINGS)
def test_random_numbers_must_not_decide(name, how, around):
    with pytest.raises(ValueError, match=r"decides by the values of its data, in which something random has a part.*sampled"):
        around(Decides(READINGS[name], random=True)).predict(torch.ones(2, 3), how)


def test_certain_weights_may_decide(around):
    network = nn.Sequential(Decides(READINGS["item"], random=True), nn.Linear(2, 2))
    posterior, x = around(network, only=r"^1\."), torch.randn(5, 3)
    with torch.no_grad():
        hidden = network[0](x)
    torch.testing.assert_close(
        posterior.predict(x, "adjoint").f_var, 0.004 * (hidden.square().sum(-1, keepdim=True) + 1).expand(5, 2)
    )


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_uncertain_inputs_must_not_decide(how, around):
    posterior, x = around(Decides(READINGS["item"])), torch.ones(2, 3)
    posterior.predict(x, how)
    with pytest.raises(ValueError, match="decides by the values of its data"):
        posterior.predict(x, how, x_var=torch.ones(2, 3))


# --- numbers for every example ----------------------------------------------------------------------------------------


class Lengths(nn.Module):
    """Sums each row up to its own length, found one by one."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.layer, self.last = way, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.way == "plain":
            return self.last((h * mask.unsqueeze(-1)).sum(1))
        if self.way == "lists":
            return self.last(torch.stack([row[:n].sum(0) for row, n in zip(h, mask.sum(1).tolist(), strict=True)]))
        if self.way == "index":
            rows = h[mask]
        elif self.way == "select":
            rows = torch.masked_select(h, mask.unsqueeze(-1)).view(-1, 4)
        else:
            rows = h[mask.nonzero(as_tuple=True)]
        owner = torch.arange(len(x)).repeat_interleave(mask.sum(1))
        return self.last((owner == torch.arange(len(x)).unsqueeze(1)).to(x.dtype) @ rows)


@pytest.mark.parametrize("way", ["lists", "index", "nonzero"])
@pytest.mark.parametrize(("how", "options"), WAYS)
def test_numbers_for_every_example(way, how, options, around):
    posterior = around(Lengths(way))
    straight = twin(posterior, Lengths("plain"))
    for lengths in ([4, 2, 1], [1, 4], [3, 3, 3, 3], [4, 2, 1]):
        x, mask = torch.randn(len(lengths), 4, 3), torch.arange(4) < torch.tensor(lengths)[:, None]
        found, expected = posterior.predict((x, mask), how, **options), straight.predict((x, mask), how, **options)
        torch.testing.assert_close(found.f_mean, expected.f_mean)
        torch.testing.assert_close(found.f_var, expected.f_var, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="no module serves all"):
        as_module(posterior, (x, mask))


def test_what_is_kept_is_bounded(around, monkeypatch):
    monkeypatch.setattr(engine, "KEPT", 3)
    posterior = around(Decides(lambda x: round(x.sum().item()) % 2 == 0))
    for i in range(8):
        posterior.predict(torch.full((1, 3), float(i)), "streamlined")
        posterior.predict(torch.full((1, 3), float(i)), "adjoint")
    found = posterior.streamlined
    assert len(found.traces) == 3
    kept = {made for _, made in found.traces}
    assert {key[0] for key in found.programs} <= kept
    assert set(found.chains) <= kept


# --- deployed ---------------------------------------------------------------------------------------------------------


def classes(network: nn.Module, variance: float = 0.001, only: str = "") -> Posterior:
    model = Model(network.eval(), Categorical(), only=only)
    mean = model.parameters()
    return Posterior.diagonal(model, mean, {name: torch.full_like(leaf, variance) for name, leaf in mean.items()})


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_a_module_asks_for_no_shortcut(how):
    """A network that has none while it is exported has one program for all masks."""
    only = "" if how == "streamlined" else "q|k|v|up|down|last"  # the adjoint's graph has no random embeddings
    posterior, full, padded = classes(Text(), only=only), text([6] * 4), text([6, 3, 5, 4, 2])
    module = as_module(posterior, full, how=how)
    for x in (padded, full):
        found, p = module(**x), posterior.predict(x, how)
        torch.testing.assert_close(found["f_mean"], p.f_mean)
        torch.testing.assert_close(found["f_cov"], p.cov[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_a_module_keeps_its_decisions_and_says_so(how):
    posterior, up, down = classes(Decides(READINGS["all"])), torch.ones(4, 3), -torch.ones(4, 3)
    module = as_module(posterior, up, how=how)
    torch.testing.assert_close(module(2 * up)["f_mean"], posterior.predict(2 * up, how).f_mean)
    with pytest.raises((ValueError, RuntimeError), match="decides by the values of its data, and for these inputs otherwise"):
        module(down)
    program = torch.export.export(module, (up,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(program(torch.ones(7, 3))["f_mean"], posterior.predict(torch.ones(7, 3), how).f_mean)
    with pytest.raises(RuntimeError, match="decides by the values of its data"):
        program(down)


def test_a_compiled_module_checks_too():
    module = as_module(classes(Decides(READINGS["item"])), torch.ones(4, 3))
    compiled = torch.compile(lambda x: module(x)["mean"], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(torch.ones(4, 3)), module(torch.ones(4, 3))["mean"])
    with pytest.raises(RuntimeError, match="decides by the values of its data"):
        compiled(-torch.ones(4, 3))


def test_nothing_stays_switched_on():
    with pytest.raises(ValueError, match="decides"):
        as_module(classes(Decides(READINGS["item"], random=True)), torch.ones(4, 3))
    assert not torch.compiler.is_compiling()


def test_dropout_decides_nothing(around):
    """What dropout has a part in is random too."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.dropout(x)
            return self.layer(h) if h.sum() > 0 else -self.layer(h)

    x = torch.ones(8, 3)
    posterior = dubito.fit(Model(Dropped(), dubito.Gaussian(scale=1.0)), dubito.MCDropout(epochs=1), (x, torch.ones(8, 2)))
    with pytest.raises(ValueError, match="decides by the values of its data"):
        posterior.predict(x, "streamlined")
