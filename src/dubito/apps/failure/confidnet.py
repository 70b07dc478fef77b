r"""ConfidNet (Corbière et al. 2019): a head that learns from a network's features how probable the true class will be.

The maximum class probability is high for errors, too. The probability of the *true* class is not, but needs the truth; so it is
learned, as a function of the features that the network itself decides by.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dubito.apps.network import Network, examples, last_linear, only_network, posterior_of
from dubito.evaluation.metrics import aupr_error
from dubito.evaluation.reservoir import Reservoir
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.cuda_graphs import Steps
from dubito.network.examples import is_indexed, is_pair
from dubito.posteriors import Posterior
from dubito.posteriors.predict.dropout import Dropout, Masks
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, one_of, positive, require
from dubito.tensors.randomness import derive_seed, fork_rng, generator
from dubito.tensors.tree import Buffers, Params

POSITIONS = 2**22  # of dense outputs, that are kept for an epoch: a random part where there are more
ROWS = 512  # inputs in a pass without gradients


@dataclass(frozen=True)
class ConfidNet:
    r"""Learn :math:`c(x) \approx p(y \mid x)`, the true class probability, from the input of a network's last layer.

    .. math:: \min_c \frac1n \sum_i (c(x_i) - p(y_i \mid x_i))^2, \qquad c = \sigma(\mathrm{MLP}(\phi(x)))

    First the head alone, on features :math:`\phi` of the network as it is. The network's own dropout, if it has any, is on here, for
    features and targets alike: without it a network that fits its training data has a true class probability of nearly 1 for all of
    them, and there is little to learn from (`dropout=False`). Then head and a copy of the layers below it together, without dropout
    (`tune_epochs`, 0 for none). BatchNorm stays in eval mode throughout. After every epoch the head is judged on held-out data by
    the average precision of its errors (their loss, if the network makes none there), and the best is kept.

    The network must be one (a point, or the centre of a Gaussian or of dropout), and is not changed. `layer` names the layer whose
    input are the features: the linear one that runs last, if None. Any other will do, convolutions too. Dense outputs get a
    confidence for every position.

    >>> import dubito
    >>> from dubito.evaluation.data import digits
    >>> data = digits(seed=0)
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> confidence = ConfidNet((32,), epochs=2, tune_epochs=1).fit(net, (data.x_train, data.y_train))
    >>> confidence(data.x_test[:3]).shape
    torch.Size([3])
    """

    hidden: tuple[int, ...] = (400, 400, 400, 400)
    epochs: int = 100  # of the head
    learning_rate: float = 1e-4
    tune_epochs: int = 10  # of head and encoder together
    tune_rate: float = 1e-7
    batch_size: int = 128
    layer: str | None = None
    target: Literal["tcp", "ratio"] = "tcp"  # p(y | x), or its ratio to the largest probability
    dropout: bool = True  # whether the network's own dropout is on while the head learns
    held_out: float = 0.1  # of the data, where no validation data are given

    def __post_init__(self):
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(0, tune_epochs=self.tune_epochs)
        require(self.hidden, "hidden must name at least one layer; got ()")
        positive(learning_rate=self.learning_rate, tune_rate=self.tune_rate)
        between(0, 1, held_out=self.held_out)
        one_of(("tcp", "ratio"), target=self.target)

    def fit(
        self,
        posterior: Posterior | Model | nn.Module,
        data: Any,
        *,
        validation: Any = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Confidence:
        """Train on the data that the network was trained on (any data `fit` takes), choose on `validation`, which it has not seen.

        Without validation data a part of (x, y) is held out. The network was trained on these rows, so that few or none of them are
        errors: pass other data if there are some.
        """
        network = only_network(posterior_of(posterior), "ConfidNet")
        model = network.model
        require(model.likelihood.indexed, f"ConfidNet is for classifiers; {type(model.likelihood).__name__} predicts no class")
        if validation is None:
            data, validation = self._split(model, data, seed)
        with closing(examples(model, validation)) as batches:
            x, y = next(batches, (None, None))
        require(y is not None, "ConfidNet learns from labelled data: give batches of (x, y), at least one")
        layer = last_linear(network, x) if self.layer is None else self.layer
        held = _Held.of(network, network, layer, validation, self)
        with fork_rng(derive_seed(seed, "confidnet")):  # layers are initialized from the global generator
            head = _mlp(held.phi.shape[-1], self.hidden).to(held.phi)
        with torch.enable_grad(), Progress("ConfidNet", self.epochs + self.tune_epochs, show=progress) as bar:
            run = _Run(self, network, layer, data, held, head, bar, seed)
            run.train_head()
            encoder = run.tune()
        head = head.eval().requires_grad_(False)
        return Confidence(model, network.params, network.buffers, encoder, head, layer, tuple(run.history))

    def _split(self, model: Model, data: Any, seed: int) -> tuple[Any, Any]:
        pair = _pair(model, data)
        if pair is None:
            raise ValueError("only a tuple (x, y) can be split into training and validation data: give validation=...")
        x, y = pair
        n = len(y)
        kept = math.ceil(self.held_out * n)
        require(0 < kept < n, f"{n} examples are too few to hold some of them out: give validation=...")
        order = torch.randperm(n, generator=generator("cpu", seed, "held out"))
        return (_rows(x, order[kept:]), y[order[kept:]]), (_rows(x, order[:kept]), y[order[:kept]])

    def training_features(self, network: Network, layer: str, data: Any, seed: int) -> tuple[Tensor, Tensor, bool]:
        """Features [n, d] and targets [n] of all labelled positions, and whether they are random."""
        dropout = Dropout.find(network.model.network, None, 0.0)
        random, some = False, Reservoir(POSITIONS, seed=seed)
        with closing(examples(network.model, data, size=ROWS, seed=seed)) as batches:
            for i, (x, y) in enumerate(batches):
                masks = Masks(dropout, {**network.buffers, **network.params})
                with torch.no_grad(), fork_rng(derive_seed(seed, i)), masks if self.dropout else nullcontext():
                    phi, f = network.features(x, layer)
                random |= masks.dropped
                network.model.likelihood.check(f, y)
                target, _, kept = _truth(network, f, y, self.target)
                some.add(phi[kept], target[kept])
        require(some.count, "there is nothing to learn from: the loader gave no batch, or none with a label")
        phi, target = some.rows()
        return phi, target, random


@dataclass
class _Run:
    """The training of one head, and then of the head with a copy of the network below it."""

    settings: ConfidNet
    network: Network
    layer: str
    data: Any
    held: _Held
    head: nn.Module
    bar: Progress
    seed: int
    history: list[dict[str, float]] = field(default_factory=list)

    def train_head(self) -> None:
        """The head on features that are as they are, or new in every epoch where the network drops some of them."""
        device, best, settings = self.held.phi.device, _Best(), self.settings
        optimizer = torch.optim.Adam(self.head.parameters(), lr=settings.learning_rate, fused=True)
        shuffler, steps = generator(device, self.seed, "order"), Steps()

        def step(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            """One step of the optimizer."""
            return {"loss": self._step(optimizer, *batch)}

        random, phi, target = True, torch.empty(0), torch.empty(0)
        for epoch in range(settings.epochs):
            if random:
                phi, target, random = settings.training_features(
                    self.network, self.layer, self.data, derive_seed(self.seed, "masks", epoch)
                )
            total = torch.zeros((), device=device)
            for rows in torch.randperm(len(phi), generator=shuffler, device=device).split(settings.batch_size):
                total += steps(optimizer, (phi[rows], target[rows]), shuffler, (), step)["loss"] * len(rows)
            self._judge(best, epoch, float(total) / len(phi), self.held)
        require(best.state, "the loss is NaN after every epoch: lower learning_rate, or look for features that are not finite")
        best.restore(self.head)

    def _step(self, optimizer: torch.optim.Optimizer, phi: Tensor, target: Tensor, leaves: list[Tensor] | None = None) -> Tensor:
        """One step from features [n, d] towards targets [n]; the loss before it."""
        loss = F.mse_loss(torch.sigmoid(self.head(phi).squeeze(-1)), target)
        optimizer.zero_grad()
        loss.backward(inputs=leaves)
        optimizer.step()
        return loss.detach()

    def _judge(self, best: _Best, epoch: int, loss: float, held: _Held) -> bool:
        """Write an epoch into the history; whether its head is the best so far."""
        row = {"epoch": epoch, "loss": loss, **held.judge(self.head)}
        self.history.append(row)
        self.bar.update(epoch + 1, row)
        return best.see(row, self.head)

    def tune(self) -> Params:
        """A copy of the network's weights, tuned with the head: the best of all epochs, or as it was."""
        network, settings, best = self.network, self.settings, _Best()
        weights = {**network.buffers, **network.params}
        names = [name for name, leaf in network.model.network.named_parameters() if leaf.is_floating_point()]
        encoder = {name: weights[name].detach().clone().requires_grad_() for name in names}
        copy, saved = Network(network.model, encoder, network.buffers), tree.clone(encoder)
        best.see(self.held.judge(self.head), self.head)
        leaves = [*encoder.values(), *self.head.parameters()]
        optimizer = torch.optim.Adam(leaves, lr=settings.tune_rate, fused=True)
        for epoch in range(settings.tune_epochs):
            total, count = 0.0, 0
            order = derive_seed(self.seed, "tune", epoch)
            with closing(_shuffled(network.model, self.data, settings.batch_size, order)) as batches:
                for x, y in batches:
                    with torch.no_grad():
                        target, _, kept = _truth(network, network(x), y, settings.target)
                    if n := int(kept.sum()):
                        phi, _ = copy.features(x, self.layer)
                        total, count = total + self._step(optimizer, phi[kept], target[kept], leaves) * n, count + n
            held = _Held.of(network, copy, self.layer, self.held.data, settings)
            if self._judge(best, settings.epochs + epoch, float(total) / max(1, count), held):
                saved = tree.clone(encoder)
        best.restore(self.head)
        return saved


@dataclass(frozen=True)
class _Held:
    """Held-out data as the head sees them."""

    data: Any
    phi: Tensor  # [n, d]
    target: Tensor  # [n]
    wrong: Tensor  # [n]

    @staticmethod
    def of(network: Network, encoder: Network, layer: str, data: Any, settings: ConfidNet) -> _Held:
        """Features of an encoder, and targets and errors of the network: both of the same batch, whatever order a loader gives."""
        some = Reservoir(POSITIONS)
        with closing(examples(network.model, data, size=ROWS)) as batches:
            for x, y in batches:
                with torch.no_grad():
                    phi, f = encoder.features(x, layer)
                    f = f if encoder is network else network(x)
                    network.model.likelihood.check(f, y)
                    target, wrong, kept = _truth(network, f, y, settings.target)
                some.add(phi[kept], target[kept], wrong[kept])
        require(some.count, "no target of the validation data is a label: give some that are, or leave out `validation`")
        return _Held(data, *some.rows())

    def judge(self, head: nn.Module) -> dict[str, float]:
        """Average precision of the errors by the head (nan if there are none, or nothing else), and its loss."""
        with torch.no_grad():
            z = torch.cat([head(batch).squeeze(-1) for batch in self.phi.split(2**16)])
        if bool(z.isnan().any()):  # such a head is never the best
            return {"aupr_error": math.nan, "held_out_loss": math.nan}
        return {
            "aupr_error": float(aupr_error(torch.sigmoid(-z.double()), self.wrong)),
            "held_out_loss": float(F.mse_loss(torch.sigmoid(z), self.target)),
        }


class _Best:
    """The head of the best epoch."""

    def __init__(self):
        self.value, self.state = -math.inf, None

    def see(self, row: dict[str, float], head: nn.Module) -> bool:
        """Keep the head if it is the best so far; returns whether it is."""
        value = -row["held_out_loss"] if math.isnan(row["aupr_error"]) else row["aupr_error"]
        better = value > self.value
        if better:
            self.value, self.state = value, tree.clone(head.state_dict())
        return better

    def restore(self, head: nn.Module) -> None:
        """Put the weights of the best epoch back."""
        if self.state is not None:
            head.load_state_dict(self.state)


def _truth(network: Network, f: Tensor, y: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The confidence to learn, whether the network is wrong, and whether there is a label, [B, *D] each."""
    likelihood = network.model.likelihood
    y = likelihood.target(y, f)
    observed = likelihood.observed(y)
    kept = torch.ones_like(y, dtype=torch.bool) if observed is None else observed
    probs = likelihood.mean(f.detach(), likelihood_params(network.params))
    true = probs.gather(-1, torch.where(kept, y, 0).unsqueeze(-1)).squeeze(-1)
    largest, top = probs.max(-1)
    return true / largest if kind == "ratio" else true, top != y, kept


def _mlp(inputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    widths = (inputs, *hidden)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def _rows(value: Any, rows: Tensor) -> Any:
    return tree.apply_leaves(lambda leaf: leaf[rows.to(leaf.device)], value)


def _pair(model: Model, data: Any) -> tuple[Any, Any] | None:
    """x and y as tensors, if the data are a pair of them."""
    if not is_pair(data):
        return None
    return tree.tensors(data[0], next(model.network.parameters()).dtype), tree.tensors(data[1])


def _shuffled(model: Model, data: Any, size: int, seed: int) -> Generator[tuple[Any, Any]]:
    """Batches in random order; a loader keeps its own order."""
    if (pair := _pair(model, data)) is not None:
        x, y = pair
        order = torch.randperm(len(y), generator=generator("cpu", seed))
        for rows in order.split(size):
            yield from examples(model, (_rows(x, rows), y[rows.to(y.device)]), size=size)
        return
    if is_indexed(data):
        data = DataLoader(data, batch_size=size, shuffle=True)
    yield from examples(model, data, size=size, seed=seed)


@dataclass(frozen=True)
class Confidence:
    """A learned confidence: the score is one minus it, larger is less certain. `predict` gives the predictive of the network itself."""

    model: Model
    params: Params
    buffers: Buffers
    encoder: Params  # the copy of the network's weights that the features come from
    head: nn.Module
    layer: str
    history: tuple[dict[str, float], ...] = ()  # every epoch: loss, and loss and AUPR-error on held-out data

    def __call__(self, x: Any) -> Tensor:
        """One minus the learned confidence, [B, *D]."""
        copy = Network(self.model, self.encoder, self.buffers)
        with torch.no_grad():
            phi, _ = copy.features(copy.ready(x), self.layer)
            return torch.sigmoid(-self.head(phi).squeeze(-1).double())  # not 1 - sigmoid, which ties all that are certain

    def predict(self, x: Any) -> LatentMixture:
        """The predictive of the network itself, which is as it was."""
        return Network(self.model, self.params, self.buffers).predict(x)

    def save(self, path: str | os.PathLike) -> None:
        """Write head and encoder, and the network that they were made for, to one file, whole or not at all."""
        parts = {"params": self.params, "buffers": self.buffers, "encoder": self.encoder, "head": self.head.state_dict()}
        tensors = {f"{part}/{name}": leaf for part, leaves in parts.items() for name, leaf in leaves.items()}
        shapes = {name: list(p.shape) for name, p in self.model.network.named_parameters()}
        hidden = [layer.out_features for layer in self.head.modules() if hasattr(layer, "out_features")][:-1]
        meta = {"kind": "confidence", "parameters": shapes, "layer": self.layer, "hidden": hidden, "history": self.history}
        store.write(path, tensors, meta)

    @staticmethod
    def load(path: str | os.PathLike, model: Model | nn.Module) -> Confidence:
        """Read what `save` wrote; the network must have the architecture it was made for, its weights do not matter."""
        model = posterior_of(model).model
        tensors, meta = store.read(path)
        if meta.get("kind") != "confidence":
            raise store.FileError(f"{path}: written by dubito, but not a confidence of ConfidNet")
        if meta["parameters"] != {name: list(p.shape) for name, p in model.network.named_parameters()}:
            raise store.FileError(f"{path}: made for another network, whose parameters have other names or shapes")
        tensors = tree.move(tensors, model.device)

        def part(name: str) -> Params:
            """The tensors whose names begin with `name/`."""
            return {key.split("/", 1)[1]: leaf for key, leaf in tensors.items() if key.startswith(f"{name}/")}

        state = part("head")
        with fork_rng(0):
            head = _mlp(state["0.weight"].shape[1], tuple(meta["hidden"])).to(state["0.weight"])
        head.load_state_dict(state)
        parts = part("params"), part("buffers"), part("encoder")
        return Confidence(model, *parts, head.eval().requires_grad_(False), meta["layer"], tuple(meta["history"]))
