"""What every method promises, whoever wrote it: one function a promise, and `check_method` for all of them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dubito
from dubito import Categorical, Gaussian, Model
from dubito.posteriors import Mixture, Stochastic
from dubito.testing.known import TEMPERATURES, Case, exact, mean_field, mode
from dubito.testing.moments import check_functions, require
from dubito.testing.regression import BATCH, Law, Regression
from dubito.testing.snapshots import check_same, same_bits, snapshot, tensors

NOISE = 0.3  # of the likelihood of the small network
LAWS: dict[str, Callable[[Regression], Law]] = {"exact": exact, "mean_field": mean_field, "mode": mode}


def small_network(outputs: int = 1) -> nn.Module:
    """Three inputs, eight hidden units, and BatchNorm, so that buffers and modes matter."""
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def small_data(n: int = 40) -> tuple[Tensor, Tensor]:
    """Inputs [n, 3] and targets [n, 1] for `small_network`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=generator)


def small_model(outputs: int = 1, dtype: torch.dtype = torch.float32) -> Model:
    """`small_network`, always initialized alike, for a regression with one output or for several classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = small_network(outputs).to(dtype)
    return Model(network, Gaussian(scale=NOISE) if outputs == 1 else Categorical())


def check_samples(method: Any, dtype: torch.dtype = torch.float32) -> None:
    """Draws have the shapes, the dtype and the device of the weights, and the same generator gives the same draws."""
    model, (x, y) = small_model(dtype=dtype), small_data()
    posterior = dubito.fit(model, method, (x.to(dtype), y.to(dtype)))
    drawn = posterior.sample(5, torch.Generator().manual_seed(1))
    first = posterior.members[0] if isinstance(posterior, Mixture) else posterior
    if isinstance(first, Stochastic):  # its draws are functions, given by the seeds of their masks
        require(drawn["dropout:seed"].shape == (5,), "sample(5) must give five seeds of dropout masks")
        return
    for name, weight in model.network.named_parameters():
        require(name in drawn, f"sample(5) lacks the weight {name!r}")
        shape, expected = list(drawn[name].shape), [5, *weight.shape]
        require(shape == expected, f"sample(5) of {name!r} has the shape {shape}; expected {expected}")
        require(drawn[name].dtype == dtype, f"draws of {name!r} are {drawn[name].dtype}, but the weights are {dtype}")
        require(drawn[name].device == weight.device, f"draws of {name!r} are on {drawn[name].device}, not on {weight.device}")
    again = posterior.sample(5, torch.Generator().manual_seed(1))
    require(
        all(torch.equal(drawn[name], again[name]) for name in drawn), "sample() with the same generator must give the same draws"
    )


def check_uncertainty(method: Any, outputs: int = 1) -> None:
    """A prediction splits into total = aleatoric + epistemic, both at least 0, with the noise inside; probabilities sum to 1."""
    x, y = small_data()
    y = y if outputs == 1 else (y.squeeze(1) > 0).long()
    p = dubito.fit(small_model(outputs), method, (x, y)).predict(x)
    u = p.uncertainty
    require(torch.allclose(u.total, u.aleatoric + u.epistemic, rtol=1e-5, atol=1e-7), "total is not aleatoric + epistemic")
    require((u.epistemic >= 0).all() and (u.aleatoric >= 0).all(), "a part of the uncertainty is negative")
    if outputs == 1:
        noise = torch.tensor(NOISE**2)
        require(torch.allclose(u.aleatoric, noise, rtol=1e-4), "the aleatoric variance is not the variance of the noise")
        require(torch.allclose(p.mean, p.f_mean, atol=1e-5), "the mean of y is not the mean of f")
        highest = torch.distributions.Normal(0, NOISE).log_prob(torch.tensor(0.0)) + 1e-5
        require((p.log_prob(y) <= highest).all(), "a density is higher than that of the noise alone")
    else:
        require(torch.allclose(p.mean.sum(-1), torch.ones(len(x)), atol=1e-5), "class probabilities do not sum to 1")
        require((u.total <= torch.tensor(float(outputs)).log() + 1e-5).all(), "an entropy is above log C")


def check_seed(method: Any, *, deterministic: bool = False) -> None:
    """The same seed gives the same bits, from tensors and from a loader; another seed gives others, unless nothing is random."""
    (x, y), loader = small_data(48), DataLoader(TensorDataset(*small_data(48)), batch_size=16, shuffle=True)
    for source in ((x, y), loader):
        a, b, other = (dubito.fit(small_model(), method, source, seed=seed, batch_size=16) for seed in (3, 3, 4))
        require(same_bits(a, b), "two fits with the same seed differ: some randomness does not come from the generator")
        if deterministic:
            require(torch.allclose(a.predict(x).f_var, other.predict(x).f_var, rtol=1e-4), "the method is not deterministic")
        else:
            require(
                not same_bits(a, other), "another seed gives the same posterior: pass deterministic=True if nothing is random"
            )


def check_resume(method: Any, at: int = 1) -> None:
    """A fit that stops after step `at` and is resumed from its checkpoint equals one that was never stopped, bit for bit."""
    whole = dubito.fit(small_model(), method, small_data(48), seed=3, batch_size=16)
    options: dict[str, Any] = {"seed": 3, "batch_size": 16}
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        run = Path(folder) / "run"
        dubito.fit(small_model(), method, small_data(48), checkpoint=run, callbacks=[lambda e: e.step == at], **options)
        torch.manual_seed(99)  # nothing may depend on the global state at the time of resumption
        resumed = dubito.fit(small_model(), method, small_data(48), checkpoint=run, resume=True, **options)
        require(same_bits(whole, resumed), f"stopping after step {at} and resuming changes the result: the state lacks something")


def check_saved(method: Any) -> None:
    """A posterior that is saved and loaded predicts the same bits."""
    x, y = small_data()
    posterior = dubito.fit(small_model(), method, (x, y))
    with tempfile.TemporaryDirectory() as folder:
        dubito.save(posterior, Path(folder) / "posterior.safetensors")
        same = dubito.load(Path(folder) / "posterior.safetensors", small_model())
        require(type(same) is type(posterior), f"a {type(posterior).__name__} is loaded as a {type(same).__name__}")
        p, q = posterior.predict(x), same.predict(x)
    for name in ("means", "f_var", "mean"):
        require(torch.equal(getattr(p, name), getattr(q, name)), f"a loaded posterior predicts another {name}")


def check_untouched(method: Any, *, training: bool = True) -> None:
    """A fit and predictions leave the network, its modes and gradients, the random generators and the loader as they were."""
    model, (x, y) = small_model(), small_data()
    model.network.train(training)
    model.network[1].train(not training)  # pyright: ignore[reportIndexIssue]  # a mixed state is kept as well
    model.network(x).sum().backward()
    source = torch.Generator().manual_seed(7)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=source)
    state, before = source.get_state(), snapshot(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network seems to be trained")  # its BatchNorm has counted the pass above
        posterior = dubito.fit(model, method, loader, validation=None)
    posterior.predict(x)
    posterior.sample(3)
    posterior.predict_loader(DataLoader(TensorDataset(x, y), batch_size=16))
    check_same(before, snapshot(model))
    require(torch.equal(state, source.get_state()), "the fit changed the generator of the user's loader")
    require(not any(leaf.requires_grad for leaf in tensors(posterior)), "a tensor of the posterior requires gradients")


class _Fragile(nn.Module):
    """A network that raises from its `limit`-th call on."""

    def __init__(self, limit: int):
        super().__init__()
        self.inner, self.meter = small_network(), _Meter(limit)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the network inside."""
        self.meter.count += 1
        if self.meter.count >= self.meter.limit:
            raise OSError("the disk is full")
        return self.inner(x)


class _Meter:
    """A count that is not an attribute of the module itself."""

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Meter:
        return self


def check_untouched_by_errors(method: Any) -> None:
    """An error inside the network, in a fit or in a prediction, reaches the user, and the network is as it was before."""
    network = _Fragile(4)
    model, (x, y) = Model(network, Gaussian(scale=NOISE)), small_data()
    before = snapshot(model)

    def fails(call: Callable[[], Any], what: str) -> None:
        """The call must raise, and leave the model as it was."""
        try:
            call()
        except OSError:
            check_same(before, snapshot(model), f"a {what} that failed")
        else:
            raise AssertionError(f"an error of the network during a {what} did not reach the user")

    fails(lambda: dubito.fit(model, method, (x, y), batch_size=16), "fit")
    network.meter.limit = 10**9
    posterior = dubito.fit(model, method, (x, y), batch_size=16)
    network.meter.limit = 0
    fails(lambda: posterior.predict(x), "prediction")


class _Stream(IterableDataset[Any]):
    """Examples without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*small_data(), strict=True)


class _Counted(Exception):
    """Carries the number of data out of a fit."""


class _Spy:
    """A method that stops after `init` and tells how many data it was given."""

    def __init__(self, method: Any):
        self.method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def with_budget(self, n_batches: int) -> _Spy:
        """The spy itself: it makes no steps."""
        return self

    def init(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The method's own `init`, and then the count."""
        self.method.init(target, *args, **kwargs)
        raise _Counted(target.n_data)


def check_counts(method: Any) -> None:
    """The number of data is right for tensors and all kinds of loaders, and asked for where it cannot be known."""

    def count(source: Any, **options: Any) -> int:
        """The number of examples that the method was told."""
        try:
            spy: Any = _Spy(method)
            dubito.fit(small_model(), spy, source, **options)
        except _Counted as counted:
            return counted.args[0]
        raise AssertionError("fit did not call init")

    dataset = TensorDataset(*small_data())
    for loader, n in (
        (DataLoader(dataset, batch_size=16, drop_last=True), 32),
        (DataLoader(dataset, batch_size=16), 40),
        (DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 4]]), 5),
        ([small_data(16), small_data(24)], 40),
    ):
        require(count(loader) == n, f"a loader of {n} examples is counted as {count(loader)}")
    require(count(DataLoader(_Stream(), batch_size=16), n_data=40) == 40, "n_data=40 is not taken over")
    for source, error, words in (
        (DataLoader(_Stream(), batch_size=16), ValueError, "n_data="),
        (iter([small_data()]), TypeError, "only once"),
    ):
        try:
            count(source)
        except error as said:
            require(words in str(said), f"the message {said} does not say {words!r}")
        else:
            raise AssertionError(f"{type(source).__name__} without a length is not refused")


def check_frozen(method: Any) -> None:
    """A method is a frozen dataclass: it has a hash and a repr, and its fields cannot be set."""
    hash(method)
    try:
        method.steps = None
    except AttributeError:
        pass
    else:
        raise AssertionError("a method must be a frozen dataclass, but its attributes can be set")
    require(isinstance(repr(method), str), "a method has no repr")


def check_method(
    method: Any,
    law: str | Callable[[Regression], Law] = "exact",
    *,
    short: Any = None,
    tolerance: float = 1e-6,
    bias: float = 0.0,
    temperatures: tuple[float, ...] = TEMPERATURES,
    from_mode: bool = False,
    batch_size: int = BATCH,
    classes: bool = True,
    deterministic: bool = False,
) -> None:
    """Hold a method to the whole contract; raises an `AssertionError` that says what is wrong.

    Its posterior on Bayesian linear regression must have the mean and covariance of `law` at every temperature: "exact" (the
    posterior), "mean_field", "mode", or a function that maps a `Regression` to a `Law`, for a bias that is known. Draws are judged by
    their effective sample size, so a sampler needs some hundreds of effective draws; other forms are compared to `tolerance`, in
    standard deviations.

    Then come the promises of form: shapes of draws, total = aleatoric + epistemic, the same seed the same bits, stop and resume bit
    for bit, save and load, nothing of the user's changed, the number of data. These need only a few steps: `short` is a copy of the
    method for them, such as `dataclasses.replace(method, epochs=3)`.

    Arguments:
        method: the method to check.
        law: what its posterior must be on linear regression.
        short: the method with few steps, for the checks of form; by default the method itself.
        tolerance: how far means and covariances may be off where they are not judged by draws.
        bias: how far moments of draws may be off besides their standard error, in standard deviations.
        temperatures: at which the law is checked.
        from_mode: whether the fit starts at the mode, for methods that expect a trained network.
        batch_size: of the regression, which has 29 rows.
        classes: whether the method takes classes as well as numbers.
        deterministic: whether the method draws nothing.

    >>> import dubito
    >>> check_method(dubito.Laplace("dense", check=False), from_mode=True, deterministic=True)
    """
    known = LAWS[law] if isinstance(law, str) else law
    case = Case(
        method, known, tolerance=tolerance, bias=bias, from_mode=from_mode, batch_size=batch_size, further=(check_functions,)
    )
    for temperature in temperatures:
        try:
            case.check(temperature)
        except AssertionError as error:
            raise AssertionError(
                f"{type(method).__name__} on linear regression at temperature {temperature:g}: {error}"
            ) from None
    quick = method if short is None else short
    check_frozen(quick)
    check_samples(quick)
    check_uncertainty(quick)
    if classes:
        check_uncertainty(quick, 3)
    check_seed(quick, deterministic=deterministic)
    check_resume(quick)
    check_saved(quick)
    check_untouched(quick)
    check_untouched_by_errors(quick)
    check_counts(quick)
