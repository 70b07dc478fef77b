r"""What several applications need: a posterior as plain networks, data batch by batch, methods in sequence, and values of actions.

A `Network` gives more than outputs: features, or gradients at the input. A posterior with a center (a point, a Gaussian, dropout) is
one network there, without noise. Draws and members of ensembles are one network each, and what is computed from them is averaged.
Features are the input of a layer, which a hook looks at while the network runs; afterwards the network has no hook more than before.

`fit_in_turn` fits several methods, each starting from the posterior of the one before. An `action_value_model` has one output for each
action, and is trained at the actions that were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dubito._moved import renamed
from dubito.inference.batches import batches
from dubito.inference.fit import fit_with
from dubito.inference.method import Method, traits_of
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.model.likelihoods import Categorical, likelihood_params
from dubito.network.examples import Inputs, arguments, pick_output, split_batch
from dubito.network.inspect import layers_of
from dubito.network.weights import in_mode
from dubito.posteriors import Point, Posterior
from dubito.posteriors.posterior import inputs_of
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.checks import of_type, require
from dubito.tensors.randomness import borrowed_generators, derive_seed, fork_rng
from dubito.tensors.tree import Buffers, Params

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SIZE = 500  # inputs at a time, where nobody cuts them into batches


@dataclass(frozen=True)
class Network:
    """A network at one setting of its weights, in eval mode; `weight` is its share among several."""

    model: Model
    params: Params
    buffers: Buffers
    weight: float = 1.0

    def __call__(self, x: Any) -> Tensor:
        """f with C last, [B, *D, C]; gradients pass."""
        with in_mode(self.model.network, False):
            return self.model.call(self.params, x, self.buffers)[0]

    def features(self, x: Any, layer: str) -> tuple[Tensor, Tensor]:
        """The input of a layer, [B, *D, d], and f, [B, *D, C]; gradients pass.

        Positions that the output does not have (those of a convolution, of the words of a text) are averaged over.
        """
        modules = dict(self.model.network.named_modules(remove_duplicate=False))
        require(layer in modules, f"the network has no layer {layer!r}; it has {[name for name in modules if name]}")
        with layer_inputs({layer: modules[layer]}) as inputs:
            f = self(x)
        require(inputs, f"the layer {layer!r} is not called when the network runs: name another one")
        phi = tree.full_precision(inputs[-1][1])  # distances and heads need more than half precision
        phi = phi.movedim(1, -1) if isinstance(modules[layer], CONVOLUTIONS) else phi
        if phi.shape[:-1] == f.shape[:-1]:
            return phi, f
        if f.ndim == 2 and len(phi) == len(f):
            return phi.flatten(1, -2).mean(1), f
        if phi.ndim == 2 and len(phi) == f.shape[:-1].numel():
            return phi.reshape(*f.shape[:-1], -1), f
        raise ValueError(
            f"the input of the layer {layer!r} is {list(phi.shape)} for an output {list(f.shape)} (channels last): name a layer whose "
            "input has the positions of the output"
        )

    def predict(self, x: Any) -> LatentMixture:
        """The predictive of this network alone."""
        with torch.no_grad():
            return LatentMixture(self.model.likelihood, self(self.ready(x)).unsqueeze(0), params=likelihood_params(self.params))

    def ready(self, x: Any) -> Any:
        """Inputs as tensors on the network's device."""
        return tree.move(tree.tensors(x, next(self.model.network.parameters()).dtype), self.model.device)


@contextmanager
def layer_inputs(layers: Mapping[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    """The name and the first input of every call of these layers while the block runs, in the order of the calls."""
    calls: list[tuple[str, Tensor]] = []

    def note(name: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remember a call."""
        calls.append((name, args[0] if args else next(iter(kwargs.values()))))

    hooks = [layer.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def call(network: nn.Module, x: Inputs) -> Any:
    """The network at x: a tensor, a tuple of arguments or a dict of them."""
    args, kwargs = arguments(x)
    return network(*args, **kwargs)


def check_real(x: Any, advice: str) -> None:
    """Raise unless x is one tensor of real numbers, as whoever takes its gradient needs."""
    require(isinstance(x, Tensor) and x.is_floating_point(), f"x must be one tensor of real numbers: {advice}")


def last_linear(network: Network, x: Any) -> str:
    """The name of the linear layer that runs last.

    >>> import dubito
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> last_linear(networks(posterior_of(net))[0], torch.zeros(1, 2))
    '2'
    """
    with torch.no_grad(), layer_inputs(layers_of(network.model.network, nn.Linear)) as inputs:
        network(network.ready(x))
    convolutions = list(layers_of(network.model.network, CONVOLUTIONS))
    example = f", such as {convolutions[-1]!r}" if convolutions else ""
    require(inputs, f"the network calls no nn.Linear, whose input could serve as features: name a layer with layer=...{example}")
    return inputs[-1][0]


def posterior_of(given: Posterior | Model | nn.Module) -> Posterior:
    """A posterior as it is; a model, or a classifier that returns logits, as a point at its present weights.

    >>> posterior_of(nn.Linear(2, 3)).predict(torch.zeros(1, 2)).mean.shape
    torch.Size([1, 3])
    """
    if isinstance(given, Posterior):
        return given
    model = model_of(given)
    weights = dict(model.network.named_parameters())  # also those that are frozen
    learned = tree.move(model.likelihood.parameters(None), model.device)
    return Point(model, tree.clone({**weights, **learned}), tree.clone(dict(model.network.named_buffers())))


def model_of(given: Model | nn.Module) -> Model:
    """A model as it is, or that of a classifier that returns logits."""
    model = Model(given, Categorical()) if isinstance(given, nn.Module) else given
    of_type(Model, "a posterior, a dubito.Model or a classifier (torch.nn.Module)", model=model)
    return model


def networks(posterior: Posterior, *, draws: int = 10) -> tuple[Network, ...]:
    """The networks that stand for a posterior, with weights that sum to 1: the one at its centre, or at most about `draws`.

    Draws of a sampler are taken evenly spaced, all of an ensemble if there are no more of them. Of draws with weights those without
    any are left out.
    """
    return tuple(Network(posterior.model, *setting) for setting in posterior.settings(draws))


def only_network(posterior: Posterior, name: str) -> Network:
    """The one network of a posterior that has a centre."""
    several = networks(posterior, draws=2)
    way_out = "give it one of them, as posteriors.Point(model, params, buffers)"
    require(len(several) == 1, f"{name} needs one network, and a {type(posterior).__name__} posterior is several: {way_out}")
    return several[0]


def average_over(networks: Sequence[Network], score: Callable[[Network, int], Tensor]) -> Tensor:
    """A score of each network and its number, averaged by their weights."""
    terms = (network.weight * score(network, i) for i, network in enumerate(networks))
    return sum(terms, start=next(terms))


def examples(model: Model, data: Any, *, size: int = SIZE, seed: int = 0) -> Generator[tuple[Any, Any]]:
    """(x, y) of every batch, on the model's device, in the order of the data; y is None where a batch has none.

    `data` is what `fit` takes, or inputs alone. The global generators are borrowed until the last batch: go through them inside
    `contextlib.closing`, by which they are given back also where something is raised on the way.
    """
    if isinstance(data, Tensor):
        data = list(data.split(size))
    with borrowed_generators(data), fork_rng(seed):  # a DataLoader draws from the global generator, even unshuffled
        for batch in batches(model, data, n_data=1, size=size, shuffle=False):
            x, y = inputs_of(model, tree.tensors(batch, next(model.network.parameters()).dtype))
            yield x, y


END = object()


def fetched(source: Iterable[Any], batches: Callable[[], Iterable[Any]] | None = None, *, seed: int = 0) -> Iterator[Any]:
    """The batches of a source, or those that `batches` makes of it.

    A loader draws from the global generators, even unshuffled. They are lent out for one batch at a time and given back before anybody
    sees it, so that one pass may stand still while another runs.
    """
    iterator = None
    for i in count():
        with borrowed_generators(source), fork_rng(derive_seed(seed, i)):
            iterator = iter(source if batches is None else batches()) if iterator is None else iterator
            batch = next(iterator, END)
        if batch is END:
            return
        yield batch


def joined(parts: list[Any]) -> Any:
    """Batches of inputs, one after another, as one.

    >>> joined([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {key: joined([batch[key] for batch in parts]) for key in first}
    if isinstance(first, list | tuple):
        return tuple(joined([batch[i] for batch in parts]) for i in range(len(first)))
    return torch.cat(parts)


def gathered(model: Model, data: Any) -> tuple[Any, Any]:
    """All inputs and targets on the model's device, of (x, y), of a batch as the model reads it, of a data set or of a loader."""
    several = isinstance(data, list) and data and isinstance(data[0], list | tuple | dict)
    if not several and not isinstance(data, DataLoader | Dataset):
        x, y = model.split(tree.tensors(data, next(model.network.parameters()).dtype))
        return tree.move(x, model.device), tree.move(y, model.device)
    with closing(examples(model, data)) as parts:
        x, y = zip(*parts, strict=True)
    return joined(list(x)), joined(list(y))


def score_loader(score: Callable[[Any], Tensor], data: Iterable[Any] | Tensor, *, size: int = SIZE) -> Tensor:
    """A score of all that a loader gives, or of inputs that are too many for one batch: [N], on the CPU.

    >>> score_loader(lambda x: x.sum(-1), torch.ones(1200, 3)).shape
    torch.Size([1200])
    """
    if isinstance(data, tuple):
        raise TypeError(
            "give inputs alone, score_loader(score, x), or a loader: a tuple may be several inputs, or inputs and targets"
        )
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=size)
    parts = []
    with borrowed_generators(data), fork_rng():
        for batch in data.split(size) if isinstance(data, Tensor) else data:
            model = getattr(score, "model", None)
            x = tree.as_tuple(batch)[0] if model is None else inputs_of(model, batch)[0]
            parts.append(score(x).cpu())
    require(parts, "there is no data: the loader gave no batch")
    return torch.cat(parts)


# a method, several of them, or a function of the number of examples that returns either
Methods = Method | Sequence[Method] | Callable[[int], Method | Sequence[Method]]


def chain(methods: Methods, n: int) -> list[Method]:
    """The methods to run one after another for n examples.

    >>> import dubito
    >>> [type(method).__name__ for method in chain(lambda n: [dubito.MAP(epochs=n), dubito.Laplace()], 5)]
    ['MAP', 'Laplace']
    """
    if callable(methods) and not hasattr(methods, "init"):
        methods = methods(n)
    return list(methods) if isinstance(methods, Sequence) else [methods]  # pyright: ignore[reportReturnType]


def fit_in_turn(model: Model, methods: Methods, data: tuple[Any, Any], options: FitOptions) -> Posterior:
    """Fit the methods one after another; the posterior of the last. The first starts at `options.start`, if it uses a start."""
    posterior: Posterior | None = None
    for method in chain(methods, len(data[1])):
        begin = options.start if posterior is None else posterior
        posterior = fit_with(model, method, data, replace(options, start=None if traits_of(method).starts_anew else begin))
    if posterior is None:
        raise ValueError("the list of methods is empty: give at least one method")
    return posterior


class ActionValues(nn.Module):
    """`network(x)` [B, K] at one action for each row, [B, 1]; without actions at all K.

    Layers and weights keep the names that they have in the network, so patterns of names in a prior, in `Model(only=...)` and in
    methods select the same weights.

    >>> [name for name, _ in ActionValues(nn.Sequential(nn.Linear(2, 3))).named_parameters()]
    ['0.weight', '0.bias']
    """

    def __init__(self, network: nn.Module, output: Callable[[Any], Tensor] = pick_output):
        super().__init__()
        self.network, self.output = network, output

    def forward(self, x: Tensor, action: Tensor | None = None) -> Tensor:
        """The values of the given actions, [B, 1], or of all actions, [B, K]."""
        f = self.output(self.network(x))
        return f if action is None else f.gather(-1, action.long().unsqueeze(-1))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """The modules of the network under their own names, after this one."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.network.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of the network with the given name."""
        return self.network.get_submodule(target)


def check_width(model: Model, x: Tensor, actions: int) -> None:
    """Raise unless the network of an `action_value_model` has one output for each action at inputs x, [B, ...]."""
    with torch.no_grad():
        width = model.forward(model.parameters(), (x,), model.buffers())[0].shape[-1]
    require(width == actions, f"the network must have one output for each action; got {width} outputs for {actions} actions")


def action_values(function: Callable[[Any], LatentMixture], x: Tensor) -> Tensor:
    """The values of all actions at one input x [...] by a function of an `action_value_model`, [K]."""
    return function((x.unsqueeze(0),)).means.reshape(-1)


def action_value_model(model: Model) -> Model:
    """The model of the rewards of the actions taken: inputs are (x, action) and targets [B]. Other actions do not enter the likelihood.

    >>> import dubito, torch
    >>> model = action_value_model(dubito.Model(nn.Linear(2, 3), dubito.Gaussian(scale=1.0)))
    >>> x, action = torch.zeros(4, 2), torch.tensor([0, 2, 1, 0])
    >>> model.forward(model.parameters(), (x, action), {})[0].shape, model.forward(model.parameters(), (x,), {})[0].shape
    (torch.Size([4, 1]), torch.Size([4, 3]))
    """
    likelihood = model.likelihood.gaussian
    single = likelihood is not None and not isinstance(likelihood.scale, tuple) and likelihood.outputs == 1
    require(
        single, f"the likelihood of rewards must be Gaussian(scale=s), or Gaussian() to learn the noise; got {model.likelihood!r}"
    )
    # agents pass batches (x, action) of their own, so the user's `split` is not needed
    return replace(model, network=ActionValues(model.network, model.output), split=split_batch, output=pick_output)


__getattr__ = renamed(__name__, {"Taken": "ActionValues", "taken": "action_value_model"})
