"""Text from a posterior over a language model, with the doubt at every token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.model.likelihoods import Classes, Uncertainty, entropy
from dubito.network.examples import Inputs
from dubito.posteriors.functions import Functions, Mixed
from dubito.tensors.checks import require

IDS, MASK = "input_ids", "attention_mask"
GIGABYTE = 2**30
COPIES = 3  # of the logits that a pass holds at a time, roughly

Way = Literal["tokens", "sequences"]


@dataclass(frozen=True)
class Generation:
    """Texts that a posterior wrote after B prompts. What stands behind the end of a text is 0, among the tokens `stop`."""

    tokens: Tensor  # [B, n]
    log_probs: Tensor  # [B, n] of each token, given those before it
    uncertainty: Uncertainty  # about each token before it was chosen, [B, n], in nats
    lengths: Tensor  # [B], `stop` included
    doubted: Tensor  # [B]: the text ended because the next token, or the text with it, was too doubtful
    weights: Tensor  # [B, S] of the functions after the last token

    @property
    def log_prob(self) -> Tensor:
        """The log probability of each text given its prompt, [B]."""
        return self.log_probs.sum(1)

    @property
    def text_uncertainty(self) -> Uncertainty:
        """Of each text, [B]: the sums over its tokens. With `way="sequences"` their means over many texts are the entropy of texts and
        the mutual information of text and weights, by the chain rule."""
        return Uncertainty(*(part.sum(1) for part in vars(self.uncertainty).values()))


def write(
    functions: Functions | Mixed,
    x: Inputs,
    n: int,
    way: Way,
    *,
    source: torch.Generator,
    greedy: bool = False,
    stop: int | None = None,
    doubt: float | None = None,
    text_doubt: float | None = None,
    memory: float = 1.0,
) -> Generation:
    """What `Posterior.generate` gives."""
    prompt = _prompt(x)
    bounds = tuple(math.inf if bound is None else bound for bound in (doubt, text_doubt))
    writing = _Writing(len(prompt), functions.shares.to(prompt.device), way, bounds)
    pieces: list[Functions] | None = None
    for _ in range(n):
        if pieces is None:
            pieces, logs = _first(functions, x, memory)
        else:
            logs = torch.cat([_next_token(piece, x) for piece in pieces])
        token = writing.step(logs, source, greedy, stop)
        if bool(writing.ended.all()):
            break
        x = _extended(x, token)
    return writing.result(0 if stop is None else stop)


class _Writing:
    """The texts so far."""

    def __init__(self, texts: int, shares: Tensor, way: Way, bounds: tuple[float, ...]):
        self.way, self.bounds = way, bounds  # of the epistemic uncertainty of a token, and of a text
        self.doubt = torch.zeros(texts, dtype=torch.float64, device=shares.device)
        self.log_weights = shares.double().log().unsqueeze(1).repeat(1, texts)  # [S, B]
        self.ended = torch.zeros(texts, dtype=torch.bool, device=shares.device)
        self.doubted, self.lengths = self.ended, torch.zeros(texts, dtype=torch.long, device=shares.device)
        self.steps: list[tuple[Tensor, ...]] = []  # token, log probability, total, aleatoric and whether it counts, [B] each

    def step(self, logs: Tensor, source: torch.Generator, greedy: bool, stop: int | None) -> Tensor:
        """Choose a token for every text, given log probabilities [S, B, C]."""
        weights = self.log_weights.softmax(0).unsqueeze(-1)
        probs = torch.einsum("sbc,sbk->bc", logs.double().exp(), weights)
        split = Uncertainty.of(entropy(probs), (entropy(logs.double().exp()) * weights.squeeze(-1)).sum(0))
        self.doubt = self.doubt + split.epistemic
        over = (split.epistemic > self.bounds[0]) | (self.doubt > self.bounds[1])
        self.doubted = self.doubted | (~self.ended & over)
        self.ended = self.ended | self.doubted
        token = probs.argmax(-1) if greedy else torch.multinomial(probs.to(source.device), 1, generator=source).squeeze(1)
        token = token.to(probs.device)
        found = logs.gather(-1, token.expand(len(logs), -1).unsqueeze(-1)).squeeze(-1).double()  # [S, B]
        log_prob = (found + self.log_weights.log_softmax(0)).logsumexp(0)
        alive = ~self.ended
        self.steps.append((token, log_prob, split.total, split.aleatoric, alive))
        self.lengths = self.lengths + alive
        if self.way == "sequences":
            self.log_weights = torch.where(alive, self.log_weights + found, self.log_weights)
        if stop is not None:
            self.ended = self.ended | (token == stop)
        return token

    def result(self, fill: int) -> Generation:
        """All of it."""
        token, log_prob, total, aleatoric, alive = (torch.stack(parts, 1) for parts in zip(*self.steps, strict=True))
        total, aleatoric = (torch.where(alive, part, 0.0).float() for part in (total, aleatoric))
        return Generation(
            torch.where(alive, token, fill),
            torch.where(alive, log_prob, 0.0).float(),
            Uncertainty.of(total, aleatoric),
            self.lengths,
            self.doubted,
            self.log_weights.softmax(0).mT.float(),
        )


def _first(functions: Functions | Mixed, x: Inputs, memory: float) -> tuple[list[Functions], Tensor]:
    """The functions in pieces whose logits fit in the memory, and the log probabilities of the first token."""
    first, *rest = functions.split(1)
    logs = _next_token(first, x)
    size = int(memory * GIGABYTE / (4 * COPIES * _prompt(x).numel() * logs.shape[-1]))
    if rest and size > 1:
        pieces = functions.split(size)
        return pieces, torch.cat([_next_token(piece, x) for piece in pieces])
    return [first, *rest], torch.cat([logs, *(_next_token(piece, x) for piece in rest)])


def _next_token(functions: Functions, x: Inputs) -> Tensor:
    """The log probabilities of what follows the last token, [S, B, C]."""
    likelihood = functions.model.likelihood
    require(isinstance(likelihood, Classes), f"{type(likelihood).__name__} does not predict tokens: use dubito.NextToken()")
    assert isinstance(likelihood, Classes)
    with torch.no_grad():
        p = functions(x)  # pyright: ignore[reportArgumentType]
    prompt = _prompt(x)
    require(
        p.means.ndim == 4 and p.means.shape[1:3] == prompt.shape,
        f"the network must give logits [batch, tokens, words] for tokens {list(prompt.shape)}; got {list(p.means.shape[1:])}",
    )
    last = replace(p, means=p.means[:, :, -1])
    return likelihood.log_probs(last.means, last.aligned_params)


def _prompt(x: Any) -> Tensor:
    """The tokens [B, T] of what the network takes."""
    tokens = x if isinstance(x, Tensor) else x.get(IDS) if isinstance(x, dict) else None
    if tokens is None or tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
        got = type(x).__name__ if tokens is None else f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
        raise ValueError(f"prompts are whole numbers [batch, tokens], or a dict with these as {IDS!r}; got {got}")
    if isinstance(x, dict):
        require(set(x) <= {IDS, MASK}, f"generate takes {IDS!r} and {MASK!r}; leave out {sorted(set(x) - {IDS, MASK})}")
        require(MASK not in x or bool(x[MASK].bool().all()), "the prompts have padding: give prompts of one length at a time")
    return tokens


def _extended(x: Any, token: Tensor) -> Any:
    """The input with a further token."""
    token = token.unsqueeze(1)
    if isinstance(x, dict):
        new = {IDS: token, MASK: torch.ones_like(token)}
        return {name: torch.cat([leaf, new[name].to(leaf.dtype)], 1) for name, leaf in x.items()}
    return torch.cat([x, token.to(x.dtype)], 1)
