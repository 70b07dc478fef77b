"""Where a fit begins: the network as it stands, weights that the user gives, or an earlier posterior."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dubito.inference.method import Start
from dubito.model import Model
from dubito.network.examples import Targets
from dubito.posteriors import Posterior
from dubito.tensors import tree
from dubito.tensors.checks import require, type_of
from dubito.tensors.tree import Buffers, Params

Weights = Params | Posterior | nn.Module  # a setting of the weights, or a posterior with one or several


def make_start(model: Model, start: Weights | Sequence[Weights] | None, y: Targets, *, many: bool = False) -> Start:
    """The start of a method, as copies on the model's device.

    Quantities that the likelihood or the prior learns, and that `start` does not hold, begin at the model's first guess from the
    targets `y`; they are `Start.unset`. With `many` a set of draws, or a list of starts, gives one for each chain, `Start.draws`.
    """
    params, buffers = model.parameters(y), model.buffers()
    if start is None:
        return Start(params, buffers, tuple(name for name in params if ":" in name))
    if isinstance(start, nn.Module):
        start = {**dict(start.named_parameters()), **dict(start.named_buffers())}
    if not isinstance(start, dict | Posterior | list | tuple):
        raise TypeError(f"start must be a network, weights by their names, a posterior, or a list of these; got {type_of(start)}")
    if isinstance(start, list | tuple):
        require(
            many and len(start),
            f"start is a list of {len(start)} settings; this method begins at one: give weights or a posterior",
        )
        settings = [make_start(model, one, y) for one in start]
        apart = (tree.stack([setting.params for setting in settings]), tree.stack([setting.buffers for setting in settings]))
        return _many(model, {}, *apart, y)._replace(unset=settings[0].unset)
    several = _several(start, params) if many else None
    if several is not None:
        return _many(model, start, *several, y)
    values, shared = _single(start)
    _check_fit(params, values, shared)
    known = {**shared, **values}
    return Start(
        tree.move(tree.clone({name: known.get(name, leaf) for name, leaf in params.items()}), model.device),
        tree.move(tree.clone({name: known.get(name, leaf) for name, leaf in buffers.items()}), model.device),
        tuple(name for name in params if ":" in name and name not in known),
        given=True,
    )


def _many(model: Model, start: Params | Posterior, draws: Params, own: Buffers, y: Targets) -> Start:
    """A start for every draw; `params` and `buffers` are those of the first."""
    params, buffers = model.parameters(y), model.buffers()
    draws, own = (tree.move(tree.clone(leaves), model.device) for leaves in (draws, own))
    own = {name: leaf for name, leaf in own.items() if name in buffers}
    shared = {name: leaf for name, leaf in getattr(start, "buffers", {}).items() if name in buffers}
    first = make_start(model, {**shared, **tree.select(own, 0), **tree.select(draws, 0)}, y)
    count = tree.count(draws)
    missing = tree.repeat({name: leaf for name, leaf in params.items() if name not in draws}, count)
    known = {**missing, **draws}
    return first._replace(draws={name: known[name] for name in params}, own=own)


def _single(start: Params | Posterior) -> tuple[Params, Buffers]:
    """The one setting of the weights, and the buffers, that a start stands for."""
    if isinstance(start, dict):
        return start, {}
    if start.center is None:
        raise ValueError(
            f"a {type(start).__name__} posterior has no single setting of the weights to start from: give one as a dict of weights"
        )
    return start.center


def _several(start: Params | Posterior, params: Params) -> tuple[Params, Buffers] | None:
    """The settings of a start that holds many, leaves [K, ...] (draws of a posterior, modes of a mixture, or stacked weights), and the
    buffers that each has for itself; None for a start that holds one."""
    if isinstance(start, dict):
        known = [name for name in start if name in params]
        stacked = known and all(start[name].shape[1:] == params[name].shape for name in known)
        return (start, {}) if stacked else None
    return start.modes()


def _check_fit(params: Params, values: Params, shared: Buffers) -> None:
    """Raise where a start does not fit the network."""
    wrong = [name for name, leaf in values.items() if name in params and leaf.shape != params[name].shape]
    missing = [name for name in params if ":" not in name and name not in values and name not in shared]
    require(not wrong, f"start does not fit the network: {wrong} have other shapes")
    require(not missing, f"start does not fit the network: {missing} are missing")
