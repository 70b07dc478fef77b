"""Attention, against Monte Carlo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito import Gaussian, Laplace, Model, fit
from dubito.posteriors.predict.streamlined import Moments
from dubito.posteriors.predict.streamlined.moments import RULES

attention = F.scaled_dot_product_attention


def test_softmax(check, noisy):
    check(torch.softmax, noisy(3, 5), -1, mean=0.1, sd=0.02)
    check(torch.softmax, noisy(3, 5), 0, mean=0.1, sd=0.02)
    check(torch.log_softmax, noisy(3, 5), 1, mean=0.1, sd=0.02)
    with pytest.raises(ValueError, match="dim"):
        RULES["softmax"](noisy(3, 5))


def test_random_values_are_exact(check, noisy):
    q, k = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 3)
    check(attention, q, k, noisy(2, 2, 4, 3, sd=0.5))
    check(attention, q, k, noisy(2, 2, 4, 3, sd=0.5), is_causal=True)
    mask = torch.rand(4, 4) < 0.6
    check(attention, q, k, noisy(2, 2, 4, 3, sd=0.5), mask | torch.eye(4).bool())
    check(attention, q, k, noisy(2, 2, 4, 3, sd=0.5), torch.randn(4, 4), scale=0.3)
    check(attention, q, torch.randn(2, 1, 4, 3), noisy(2, 1, 4, 3, sd=0.5), enable_gqa=True)


def test_random_keys_are_right_to_first_order(check, noisy):
    q, v = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 3)
    check(attention, q, noisy(2, 2, 4, 3, sd=0.05), v, mean=0.1, sd=0.02)
    check(attention, q, noisy(2, 2, 4, 3, sd=0.05), v, is_causal=True, mean=0.1, sd=0.02)


@pytest.mark.parametrize("tokens", [2, 16, 60])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_random_queries_are_right_on_average(tokens, shift, noisy):
    """Noise of a query moves all of its scores together, which is not kept: single numbers are off, their mean square is not."""
    x = noisy(4, 4, tokens, 8, sd=0.1)
    k, v = shift + torch.randn(4, 4, tokens, 8), torch.randn(4, 4, tokens, 8)
    found = RULES["scaled_dot_product_attention"](x, k, v)
    draws = torch.stack([attention(x.mean + x.var.sqrt() * torch.randn(x.mean.shape), k, v) for _ in range(500)])
    assert float((found.var.mean() / draws.var(0).mean()).sqrt()) == pytest.approx(1, abs=0.05)


def test_dropped_attention_weights(noisy):
    q, k, v = torch.randn(3, 1, 2, 4, 3).unbind(0)
    found = RULES["scaled_dot_product_attention"](Moments(q, torch.zeros_like(q)), k, v, dropout_p=0.3)
    many = [t.expand(100_000, *t.shape[1:]) for t in (q, k, v)]
    truth = (F.dropout(torch.softmax(many[0] @ many[1].mT / 3**0.5, -1), 0.3) @ many[2]).std(0)
    torch.testing.assert_close(found.var[0].sqrt(), truth, rtol=0.02, atol=0.005)


def test_directions():
    mean, factor = torch.randn(3, 2, 2, 4, 3), 0.03 * torch.randn(3, 5, 2, 2, 4, 3)
    given = [Moments(m, u.square().sum(0), u) for m, u in zip(mean, factor, strict=True)]
    found = RULES["scaled_dot_product_attention"](*given)
    z = torch.randn(100_000, 5)
    truth = attention(*(m + torch.tensordot(z, u, 1) for m, u in zip(mean, factor, strict=True)))
    torch.testing.assert_close(found.var.sqrt(), truth.std(0), rtol=0.05, atol=0.003)


# -- where values come from


class Packed(nn.Module):
    """As in timm."""

    def __init__(self, width: int = 8, heads: int = 2, causal: bool = False, plain: bool = False):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal, self.plain = heads, causal, plain

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.plain:
            found = (q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5).softmax(-1) @ v
        else:
            found = attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).reshape(b, n, c))


class Separate(nn.Module):
    """One layer for each of q, k and v; keys and values have fewer heads."""

    def __init__(self, width: int = 8, heads: int = 4, groups: int = 2):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width // heads * groups)
        self.v, self.out = nn.Linear(width, width // heads * groups), nn.Linear(width, width)
        self.heads, self.groups = heads, groups

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], n, -1).transpose(1, 2)
            for layer, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        return self.out(attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    def __init__(self, need_weights: bool, batch_first: bool = True):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.need_weights, self.batch_first = need_weights, batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        found = self.inner(x, x, x, need_weights=self.need_weights)[0]
        return found if self.batch_first else found.transpose(0, 1)


class Values(nn.Module):
    """Noise in the weights of the values alone, at one position."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, 0]


ATTENTIONS = {
    "packed": (Packed, "qkv.weight"),
    "causal": (lambda: Packed(causal=True), "qkv.weight"),
    "plain": (lambda: Packed(plain=True), "qkv.weight"),
    "one head": (lambda: Packed(heads=1), "qkv.weight"),
    "separate, grouped": (Separate, "v.weight"),
    "torch": (lambda: Multihead(False), "in_proj_weight"),
    "torch, with weights": (lambda: Multihead(True), "in_proj_weight"),
    "torch, tokens first": (lambda: Multihead(False, False), "in_proj_weight"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_weights_of_values_are_shared_by_tokens(name, around, ratio):
    """Inputs that are much alike: noise of the weights does not average out over tokens."""
    make, weight = ATTENTIONS[name]
    posterior = around(Values(make()), only=weight + "$", variance=1e-3)
    name = next(iter(posterior.covariance.shapes))
    var = torch.full_like(posterior.params[name], 1e-3)
    if var.shape[0] == 24:
        var[:16] = 1e-9  # those of queries and keys
    posterior = type(posterior).diagonal(posterior.model, {name: posterior.params[name]}, {name: var})
    x = 1 + 0.3 * torch.randn(3, 6, 8)
    forward, adjoint = ratio(posterior, x, {"how": "streamlined", "rank": 0}, {"how": "adjoint"})
    # heads that share their values move together, which the output layer after them does not know
    assert forward == pytest.approx(1, abs=0.1 if "v." in name else 0.03)
    assert adjoint == pytest.approx(1, abs=0.03)


def test_shared_weights_of_values_with_a_kronecker_posterior():
    network = Values(Packed())
    model = Model(network, Gaussian(scale=1.0), only=r"qkv")
    x = 1 + 0.3 * torch.randn(64, 6, 8)
    posterior = fit(model, Laplace(optimize_evidence=False, check=False), [(x, torch.randn(64, 8))], seed=0)
    posterior = posterior.with_prior(300.0)
    truth = posterior.predict(x[:3], "sampled", draws=20_000).f_var.sqrt()
    found = posterior.predict(x[:3], "streamlined", rank=0).f_var.sqrt()
    assert float((found / truth).mean()) == pytest.approx(1, abs=0.08)


# -- whole networks


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.attention = nn.Conv2d(1, 8, 4, 4), Packed()
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(2)])
        self.mlp, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x.mean(1))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.attention = nn.Embedding(11, 8), Packed(causal=True)
        self.first, self.last, self.head = nn.RMSNorm(8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index)
        x = x + self.attention(self.first(x))
        return self.head(self.last(x)[:, -1])


class Encoder(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kwargs), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[:, 0])


NETWORKS = {
    "vision": (Vision, lambda: torch.randn(3, 1, 8, 8), 0.25),
    "decoder": (Decoder, lambda: torch.randint(11, (3, 5)), 0.05),
    "encoder": (Encoder, lambda: torch.randn(3, 5, 8), 0.05),
    "encoder, norm first": (lambda: Encoder(norm_first=True, activation="gelu"), lambda: torch.randn(3, 5, 8), 0.1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(name, around, ratio):
    make, inputs, forward = NETWORKS[name]
    ways = {"how": "adjoint"}, {"how": "streamlined", "rank": 0}
    adjoint, streamlined = ratio(around(make(), variance=0.002), inputs(), *ways)
    assert adjoint == pytest.approx(1, abs=0.03)
    assert streamlined == pytest.approx(1, abs=forward)  # noise that positions share is not all kept


def test_a_trace_holds_for_other_numbers_of_examples(around):
    posterior, x = around(Encoder()), torch.randn(7, 5, 8)
    whole = posterior.predict(x, "streamlined", rank=0).f_var
    torch.testing.assert_close(posterior.predict(x[:2], "streamlined", rank=0).f_var, whole[:2])
