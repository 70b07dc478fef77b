"""An independent answer for every likelihood, prior, density of scales, and kernel of the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from dubito import (
    Bernoulli,
    BetaNLL,
    Categorical,
    CensoredGaussian,
    CensoredLogNormal,
    CensoredWeibull,
    Gaussian,
    GaussianMixture,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Model,
    MultiTask,
    NaturalGaussian,
    NegativeBinomial,
    NextToken,
    Ordinal,
    Poisson,
    StudentT,
    priors,
)
from dubito.apps.active import bald
from dubito.apps.active.pool import expected_log_noise
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.covariances import Diagonal
from dubito.testing import check_likelihood, check_prior, require

DOUBLE = torch.float64
Oracle = Callable[[], None]


def close(found: Tensor, exact: Tensor, tolerance: float = 1e-6) -> None:
    gap = float((found - exact).abs().max())
    require(gap <= tolerance * (1 + float(exact.abs().max())), f"off by {gap:.3g}: {found} is not {exact}")


# ---- likelihoods


def several(*cases: tuple) -> Oracle:
    def check() -> None:
        for likelihood, outputs in cases:
            check_likelihood(likelihood, outputs)

    return check


def both(*oracles: Oracle) -> Oracle:
    def check() -> None:
        for oracle in oracles:
            oracle()

    return check


def ignored() -> None:
    """Targets equal to `ignore_index` count nothing."""
    likelihood, f = Categorical(ignore_index=7), torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    score = likelihood.log_prob(f, torch.tensor([0, 7, 2]), {})
    close(score, torch.stack([f.log_softmax(-1)[0, 0], torch.zeros((), dtype=DOUBLE), f.log_softmax(-1)[2, 2]]))
    missing = HeteroscedasticGaussian(missing=True)
    y = torch.tensor([[0.3], [math.nan]], dtype=DOUBLE)
    close(missing.log_prob(torch.zeros(2, 2, dtype=DOUBLE), y, {})[1], torch.zeros((), dtype=DOUBLE))


def noise_levels() -> None:
    """Logits are divided by the square of a noise level, which may be learned."""
    f, learned = (
        torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=DOUBLE),
        {"likelihood:log_scale": torch.tensor([-0.3], dtype=DOUBLE)},
    )
    for kind, link in ((Categorical, partial(torch.softmax, dim=-1)), (Bernoulli, torch.sigmoid)):
        close(kind().mean(f, {}), link(f))
        close(kind(scale=1.5).mean(f, {}), link(f / 1.5**2))
        close(kind(scale=None).mean(f, learned), link(f / math.exp(-0.3) ** 2))


def noisy_logits() -> None:
    """E softmax(m + e^(s/2) eps) over standard normal noise, by Monte Carlo."""
    source = torch.Generator().manual_seed(0)
    f = torch.randn(3, 6, generator=source, dtype=DOUBLE)
    eps = torch.randn(200_000, 1, 3, generator=source, dtype=DOUBLE)
    exact = torch.softmax(f[:, :3] + (0.5 * f[:, 3:]).exp() * eps, -1).mean(0)
    close(HeteroscedasticCategorical(samples=512).mean(f, {}), exact, 0.01)


def huge_noise() -> None:
    """A variance that is more than a float holds becomes one to which as much can be added."""
    f = torch.tensor([[0.0, 900.0]], dtype=DOUBLE)
    value = HeteroscedasticGaussian().noise_variance(f, torch.zeros_like(f), {})
    assert value is not None
    require(bool((value + value).isfinite().all()), "twice the largest noise is infinite")


def tasks() -> None:
    """The log likelihood, mean, Fisher matrix and uncertainty of tasks are theirs side by side; of two numbers it is one density."""
    parts = {"a": (Gaussian(), 1), "b": (Categorical(), 3), "c": (HeteroscedasticGaussian(), 2)}
    both, generator = MultiTask(parts), torch.Generator().manual_seed(0)
    f = torch.randn(4, 6, generator=generator, dtype=DOUBLE)
    params = {name: leaf.double() - 0.4 for name, leaf in both.parameters().items()}
    a, b, c = f.split([1, 3, 2], -1)
    y = {"a": torch.randn(4, 1, dtype=DOUBLE, generator=generator), "b": torch.arange(4) % 3, "c": torch.randn(4, 1).double()}
    scale = math.exp(-0.4)
    exact = torch.distributions.Normal(a, scale).log_prob(y["a"]).squeeze(-1)
    exact = exact + torch.distributions.Categorical(logits=b).log_prob(y["b"])
    exact = exact + torch.distributions.Normal(c[:, :1], (0.5 * c[:, 1:]).exp()).log_prob(y["c"]).squeeze(-1)
    close(both.log_prob(f, both.target(y, f), params), exact)
    close(both.mean(f, params), torch.cat([a, b.softmax(-1), c[:, :1]], -1))
    inner = {"likelihood:log_scale": params["likelihood:a.log_scale"]}
    blocks = [
        torch.full((1, 1), scale**-2, dtype=DOUBLE),
        Categorical().fisher(b, {})[0],
        HeteroscedasticGaussian().fisher(c, {})[0],
    ]
    close(both.fisher(f, params)[0], torch.block_diag(*blocks))
    draws = torch.stack([f, f + 0.3])
    shares = torch.tensor([0.4, 0.6], dtype=DOUBLE)
    split = both.uncertainty(draws, shares, params)
    own = Gaussian().uncertainty(draws[..., :1], shares, inner)
    close(split.total[..., :1], own.total)
    stacked = {name: leaf.expand(2, 1) for name, leaf in params.items()}
    spread = torch.full_like(draws, 0.1)
    mixed = LatentMixture(both, draws, spread, weights=shares, params=stacked).uncertainty
    label = LatentMixture(Categorical(), draws[..., 1:4], spread[..., 1:4], weights=shares).uncertainty
    close(mixed.total[..., 1], label.total, 0.01)
    close(mixed.aleatoric[..., 1], label.aleatoric, 0.01)
    close(mixed.aleatoric[..., 0], torch.full((4,), scale**2, dtype=DOUBLE))
    close(mixed.epistemic[..., 0], 0.1 + torch.full((4,), 0.24 * 0.3**2, dtype=DOUBLE))
    close(split.aleatoric[..., 1], Categorical().uncertainty(draws[..., 1:4], shares, {}).aleatoric)


def outputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def of_scipy(likelihood, frozen: Callable[[np.ndarray, dict[str, float]], stats.distributions.rv_frozen], y: np.ndarray) -> None:
    """Log density or probability, moments, distribution function and quantiles are those of SciPy's distribution at outputs f."""
    f = outputs(5, likelihood_outputs(likelihood))
    params = {name: leaf.double() - 0.2 for name, leaf in likelihood.parameters().items()}
    exact = frozen(f.numpy(), {name.removeprefix("likelihood:"): leaf.item() for name, leaf in params.items()})
    column = np.full((5, 1), 1.0)
    p = LatentMixture(likelihood, f.unsqueeze(0), params={name: leaf[None] for name, leaf in params.items()})
    log_density = exact.logpmf if hasattr(exact.dist, "pmf") else exact.logpdf
    for value in y:
        at = torch.full((5, 1), float(value), dtype=DOUBLE)
        close(p.log_prob(at), torch.from_numpy(log_density(column * value)[:, 0]))
        close(p.cdf(at), torch.from_numpy(exact.cdf(column * value)), 1e-7)
    close(p.mean, torch.from_numpy(exact.mean() * column))
    close(p.uncertainty.aleatoric, torch.from_numpy(exact.var() * column))
    for level in (0.05, 0.5, 0.95):
        close(p.quantile(level), torch.from_numpy(exact.ppf(column * level)), 1e-5)


def likelihood_outputs(likelihood) -> int:
    return 2 if likelihood.__class__.__name__.startswith("Heteroscedastic") else 1


Y = np.array([-2.5, -0.3, 0.1, 1.7, 30.0])
COUNTS = np.array([0.0, 1.0, 4.0, 17.0])


def tails() -> None:
    def shifted(f: np.ndarray, learned: dict[str, float]):
        return stats.t(2 + math.exp(learned["log_dof"]), f[:, :1], math.exp(learned["log_scale"]))

    def predicted(f: np.ndarray, learned: dict[str, float]):
        return stats.t(4.5, f[:, :1], np.exp(0.5 * f[:, 1:]))

    of_scipy(StudentT(), shifted, Y)
    of_scipy(HeteroscedasticStudentT(dof=4.5), predicted, Y)


def counts() -> None:
    def negative_binomial(scale: float):
        return lambda f, learned: stats.nbinom(scale**-2, 1 / (1 + scale**2 * np.exp(f)))

    of_scipy(Poisson(), lambda f, learned: stats.poisson(np.exp(f)), COUNTS)
    for scale in (3.0, 0.5, 0.02):
        of_scipy(NegativeBinomial(scale), negative_binomial(scale), COUNTS)
    many = LatentMixture(NegativeBinomial(0.1), torch.tensor([[[8.0]]], dtype=DOUBLE))
    close(many.cdf(torch.tensor([[3100.0]])), torch.from_numpy(stats.nbinom(100, 1 / (1 + 0.01 * np.exp([[8.0]]))).cdf(3100)))
    f, y = outputs(3, 1), torch.tensor([[0.0], [2.0], [9.0]], dtype=DOUBLE)
    close(NegativeBinomial(1e-9).log_prob(f, y, {}), Poisson().log_prob(f, y, {}))  # its limit
    close(NegativeBinomial(1e-9).log_prob(f.float(), y.float(), {}), Poisson().log_prob(f.float(), y.float(), {}), 1e-3)


def ordered() -> None:
    """Differences of logistic distribution functions between the cutpoints; and a uniform prior of the probabilities at f = 0."""
    likelihood, f = Ordinal(4), outputs(6, 1)
    params = {"likelihood:cuts": torch.tensor([-1.2, 0.3, -0.7], dtype=DOUBLE)}
    cuts = np.cumsum([-1.2, math.exp(0.3), math.exp(-0.7)])
    below = np.concatenate([np.zeros((6, 1)), stats.logistic(f.numpy()).cdf(cuts), np.ones((6, 1))], 1)
    close(likelihood.mean(f, params), torch.from_numpy(np.diff(below)))
    far = likelihood.log_probs(torch.tensor([[60.0], [-60.0]], dtype=DOUBLE), params)
    require(bool(far.isfinite().all()), "probabilities far from the cutpoints are lost")
    y = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    start = likelihood.mean(torch.zeros(1, 1), likelihood.parameters(y))
    close(start.double(), torch.tensor([[3.0, 2.0, 4.0, 2.0]], dtype=DOUBLE) / 11)
    # of three classes: the density of the first cutpoint and of the log gap, as a change of variables from two probabilities
    free = torch.tensor([0.4, -0.5], dtype=DOUBLE)

    def two(free: Tensor) -> Tensor:
        return Ordinal(3).mean(torch.zeros(1, 1, dtype=DOUBLE), {"likelihood:cuts": free})[0, :2]

    jacobian = torch.autograd.functional.jacobian(two, free)
    assert isinstance(jacobian, Tensor)
    close(Ordinal(3).log_prior({"likelihood:cuts": free}), math.log(2) + torch.linalg.slogdet(jacobian).logabsdet)


def censored() -> None:
    """Densities and probabilities of intervals by SciPy, their slopes by differences, and how much intervals tell."""
    families: dict[type, Callable[[np.ndarray], stats.distributions.rv_frozen]] = {
        CensoredGaussian: lambda f: stats.norm(f, 0.6),
        CensoredLogNormal: lambda f: stats.lognorm(0.6, scale=np.exp(f)),
        CensoredWeibull: lambda f: stats.weibull_min(1 / 0.6, scale=np.exp(f)),
    }
    ends = np.array([[1.0, 1.0], [1.3, np.inf], [0.0, 0.4], [0.9, 1.1], [6.0, 7.0], [5.0, 5.001], [0.01, 0.02], [0.0, np.inf]])
    f = outputs(len(ends), 1)
    for made, frozen in families.items():
        likelihood, exact = made(0.6), frozen(f.numpy()[:, 0])
        y = ends.copy()
        if made is CensoredGaussian:
            y[y == 0] = -np.inf
        low, high = y.T
        inside = np.where(low > 2, exact.sf(low) - exact.sf(high), exact.cdf(high) - exact.cdf(low))
        with np.errstate(divide="ignore", invalid="ignore"):
            score = np.where(low == high, exact.logpdf(high), np.log(inside))
        targets = torch.from_numpy(y)
        likelihood.check(f, targets)
        found = likelihood.log_prob(f, likelihood.target(targets, f), {})
        close(found, torch.from_numpy(score), 1e-5)
        step = 1e-5
        slope = likelihood.slope(f, targets, {}).squeeze(-1)
        differences = [likelihood.log_prob(f + d, targets, {}) for d in (step, -step)]
        close(slope, (differences[0] - differences[1]) / (2 * step), 1e-5)
        share = likelihood.seen_share(f, targets, {})
        slopes = [likelihood.slope(f + d, targets, {}).squeeze(-1) for d in (step, -step)]
        curvature = -(slopes[0] - slopes[1]) / (2 * step) * 0.6**2
        assert share is not None
        close(share.squeeze(-1)[1:], curvature[1:], 1e-4)
        require(float(share[0]) == 1 and float(share[-1]) == 0, "a number tells all there is, and (0, inf) nothing")
        spread = outputs(len(ends), 1, seed=1).square() * 0.1
        convolved = likelihood.convolve(f, spread, {})
        if convolved is not None:
            draws = f + spread.sqrt() * outputs(100_000, 1, 1, seed=2)
            inside = likelihood.log_prob(draws, targets.expand(100_000, -1, -1), {}).exp()
            gap = (convolved.log_prob(targets).exp() - inside.mean(0)).abs() / (inside.std(0) / 100_000**0.5 + 1e-9)
            require(float(gap.max()) < 5, "the probability of an interval under an uncertain f is off")


def natural() -> None:
    """The heteroscedastic Gaussian at mean f1 e^-f2 and log variance -f2, and the moments of products with log-normal numbers."""
    f, y = outputs(5, 4), outputs(5, 2, seed=1)
    plain = torch.cat([f[:, :2] * (-f[:, 2:]).exp(), -f[:, 2:]], -1)
    both = NaturalGaussian(), HeteroscedasticGaussian()
    close(both[0].log_prob(f, y, {}), both[1].log_prob(plain, y, {}))
    first, second, log_precision = f[:, :2], y, f[:, 2:]
    formula = (
        first * second - 0.5 * log_precision.exp() * second**2 - 0.5 * first**2 * (-log_precision).exp() + 0.5 * log_precision
    )
    close(both[0].log_prob(f, y, {}), (formula - 0.5 * math.log(2 * math.pi)).sum(-1))
    m, cov = torch.tensor([[[0.7, 0.4]]], dtype=DOUBLE), torch.tensor([[[[0.3, -0.1], [-0.1, 0.2]]]], dtype=DOUBLE)
    p = LatentMixture(NaturalGaussian(), m, cov, quadrature=4096)
    mean = (0.7 + 0.1) * math.exp(-0.4 + 0.1)
    square = ((0.7 + 0.2) ** 2 + 0.3) * math.exp(-0.8 + 0.4)
    close(p.mean, torch.tensor([[mean]], dtype=DOUBLE), 0.01)
    close(p.uncertainty.epistemic, torch.tensor([[square - mean**2]], dtype=DOUBLE), 0.01)
    close(p.uncertainty.aleatoric, torch.tensor([[math.exp(-0.3)]], dtype=DOUBLE), 0.01)
    moved = NaturalGaussian().rescaled(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0]), {})[0]
    again = moved.rescaled(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 1.0]), {})[0]
    exact = (y * torch.tensor([0.5, 3.0]) + torch.tensor([1.0, 2.0])) * torch.tensor([2.0, 1.0]) + torch.tensor([-1.0, 0.0])
    close(again.log_prob(f, exact, {}) + math.log(3.0), both[0].log_prob(f, y, {}))


def next_tokens() -> None:
    """Positions are compared with the token that follows them, and what is left out says nothing."""
    f, y = outputs(2, 5, 3), torch.tensor([[0, 2, 1, 1, 0], [2, 2, 0, -100, 1]])
    for scale in (1.0, 1.5):
        shifted, plain = NextToken(scale=scale), Categorical(scale=scale)
        found = shifted.log_prob(f, shifted.target(y, f), {})
        close(found[:, :-1], plain.log_prob(f[:, :-1], y[:, 1:], {}))
        require(
            not bool(found[:, -1].any()) and not bool(found[1, 2]), "nothing follows the end, and ignored tokens do not count"
        )
        close(shifted.slope(f, shifted.target(y, f), {})[:, -1], torch.zeros(2, 3, dtype=DOUBLE))
        close(shifted.fisher(f, {}), plain.fisher(f, {}))


def weighted_gradients() -> None:
    """The value is the log likelihood, and its gradient is multiplied by e^(beta s); where a target is missing it is 0."""
    f, y = outputs(5, 4).requires_grad_(), outputs(5, 2, seed=1)
    y[2, 1] = math.nan
    likelihood = BetaNLL(beta=0.4, missing=True)
    value, plain = likelihood.objective(f, y, {}), HeteroscedasticGaussian(missing=True).log_prob(f, y, {})
    close(value.detach(), plain.detach())
    found, exact = (torch.autograd.grad(each.sum(), f)[0] for each in (value, plain))
    close(found, exact * (0.4 * f.detach()[:, 2:]).exp().repeat(1, 2))
    batched = torch.func.vmap(torch.func.grad(lambda f, y: likelihood.objective(f[None], y[None], {}).sum()))(f.detach(), y)
    close(batched, found)


def mixtures() -> None:
    """Sums of SciPy's normal densities, and a spread of the means that adds to the noise of each."""
    f, y = outputs(4, 12), outputs(4, 2, seed=1)
    mean, log_variance, logits = f.numpy().reshape(4, 3, 2, 2).transpose(1, 0, 2, 3)
    share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    density = (share * stats.norm(mean, np.exp(0.5 * log_variance)).pdf(y.numpy()[..., None])).sum(-1)
    close(GaussianMixture(2).log_prob(f, y, {}), torch.from_numpy(np.log(density).sum(-1)))
    spread = torch.cat([torch.full((4, 4), 0.3, dtype=DOUBLE), torch.zeros(4, 8, dtype=DOUBLE)], -1)
    wide = (share * stats.norm(mean, np.sqrt(np.exp(log_variance) + 0.3)).pdf(y.numpy()[..., None])).sum(-1)
    convolved = GaussianMixture(2).convolve(f, spread, {})
    assert convolved is not None
    close(convolved.log_prob(y), torch.from_numpy(np.log(wide).sum(-1)))
    below = (share * stats.norm(mean, np.exp(0.5 * log_variance)).cdf(y.numpy()[..., None])).sum(-1)
    p = LatentMixture(GaussianMixture(2), f.unsqueeze(0))
    close(p.cdf(y), torch.from_numpy(below))
    close(p.cdf(p.quantile(0.2)), torch.full((4, 2), 0.2, dtype=DOUBLE))


def learned_tails() -> None:
    """Priors of learned numbers are densities in their coordinates."""
    line = torch.linspace(-14, 14, 8001, dtype=DOUBLE)
    for likelihood, name in (
        (StudentT(1.0), "log_dof"),
        (NegativeBinomial(), "log_scale"),
        (HeteroscedasticStudentT(), "log_dof"),
    ):
        density = torch.stack([likelihood.log_prior({f"likelihood:{name}": value[None]}) for value in line]).exp()
        close(torch.trapezoid(density, line), torch.ones((), dtype=DOUBLE), 1e-3)


def predicted_noise() -> None:
    """Whatever has a closed form under a Gaussian posterior is that of many draws of it, where the noise is predicted too."""
    f = torch.tensor([[[0.0, -1.0]], [[0.6, 0.3]]], dtype=DOUBLE)
    cov = torch.tensor([[[[0.3, 0.2], [0.2, 1.5]]], [[[0.5, -0.3], [-0.3, 0.4]]]], dtype=DOUBLE)
    shares, y = torch.tensor([0.3, 0.7], dtype=DOUBLE), torch.tensor([[0.4]], dtype=DOUBLE)
    draws = 100_000
    unit = outputs(2, draws, 1, 2, seed=3)
    drawn = f.unsqueeze(1) + torch.einsum("sbcd,snbd->snbc", torch.linalg.cholesky(cov), unit)
    weights = (shares / draws).repeat_interleave(draws)
    for likelihood in (HeteroscedasticGaussian(), NaturalGaussian(), HeteroscedasticStudentT(dof=5.0)):
        closed = LatentMixture(likelihood, f, cov, weights=shares, quadrature=4096)
        many = LatentMixture(likelihood, drawn.flatten(0, 1), weights=weights)
        close(closed.log_prob(y), many.log_prob(y), 0.01)
        close(closed.cdf(y), many.cdf(y), 0.01)
        close(closed.mean, many.mean, 0.02)
        for part in ("total", "aleatoric", "epistemic"):
            close(getattr(closed.uncertainty, part), getattr(many.uncertainty, part), 0.04)
        close(bald(closed), bald(many), 0.02)
        logs, exact = expected_log_noise(closed), expected_log_noise(many)
        close(logs, exact, 0.01)  # E ln, which is not ln E
        require(
            float((logs - many.uncertainty.aleatoric.log()).abs()) > 0.1, "the two are alike here, so that this tells nothing"
        )


LIKELIHOODS: dict[str, Oracle] = {
    "Gaussian": several(
        (Gaussian(scale=0.3), 1),
        (Gaussian(scale=(0.3, 0.7)), 2),
        (Gaussian(), 1),
        (Gaussian(outputs=2), 2),
        (Gaussian(prior=torch.distributions.LogNormal(*torch.tensor([[0.2], [0.8]], dtype=DOUBLE))), 1),
        (Gaussian(prior=torch.distributions.Gamma(*torch.tensor([[3.0], [5.0]], dtype=DOUBLE))), 1),
    ),
    "HeteroscedasticGaussian": several((HeteroscedasticGaussian(), 2), (HeteroscedasticGaussian(), 4)),
    "BetaNLL": both(several((BetaNLL(), 2)), weighted_gradients),
    "NaturalGaussian": both(several((NaturalGaussian(), 4)), natural),
    "StudentT": both(several((StudentT(0.3, dof=4.0), 1), (StudentT((0.3, 0.7), dof=5.0), 2), (StudentT(), 1)), tails),
    "HeteroscedasticStudentT": several((HeteroscedasticStudentT(dof=6.0), 2), (HeteroscedasticStudentT(), 2)),
    "Poisson": both(several((Poisson(), 1), (Poisson(), 2)), counts),
    "NegativeBinomial": several((NegativeBinomial(0.5), 1), (NegativeBinomial(), 1), (NegativeBinomial(outputs=2), 2)),
    "Ordinal": both(several((Ordinal(2), 1), (Ordinal(4), 1)), ordered),
    "CensoredGaussian": both(several((CensoredGaussian(0.4), 1), (CensoredGaussian((0.4, 0.6)), 2)), censored),
    "CensoredLogNormal": several((CensoredLogNormal(0.4), 1)),
    "CensoredWeibull": several((CensoredWeibull(0.4), 1), (CensoredWeibull(), 1)),
    "GaussianMixture": both(several((GaussianMixture(1), 3), (GaussianMixture(2), 6), (GaussianMixture(3), 9)), mixtures),
    "Categorical": several((Categorical(), 3), (Categorical(scale=1.5), 3), (Categorical(scale=None), 2)),
    "NextToken": next_tokens,
    "Bernoulli": several((Bernoulli(), 1), (Bernoulli(scale=1.5), 2), (Bernoulli(scale=None), 2)),
    "HeteroscedasticCategorical": several((HeteroscedasticCategorical(), 6), (HeteroscedasticCategorical(samples=256), 4)),
    "MultiTask": tasks,
}
FURTHER: dict[str, Oracle] = {
    "missing targets": ignored,
    "noise levels": noise_levels,
    "noisy logits": noisy_logits,
    "huge noise": huge_noise,
    "priors of tails and dispersions": learned_tails,
    "predicted noise": predicted_noise,
}


# ---- priors


def held(prior: priors.Prior, like: dict[str, Tensor] | None = None, *, bounded: bool = False) -> Oracle:
    return partial(check_prior, prior, like, bounded=bounded)


def density(prior: priors.Prior, pdf: Callable[[np.ndarray], np.ndarray]) -> Oracle:
    """The density of one weight is a known one."""

    def check() -> None:
        values = np.array([-3.1, -0.6, 0.05, 0.25, 0.9, 4.0, 12.0])
        found = torch.stack([prior.log_prob({"w": torch.tensor(value, dtype=DOUBLE)}) for value in values])
        with np.errstate(divide="ignore"):
            exact = torch.from_numpy(np.log(pdf(values)))
        inside = exact.isfinite()
        require(bool((found[~inside] == -torch.inf).all()), "outside of the support the log density is minus infinity")
        close(found[inside], exact[inside])

    return check


def expected(prior: priors.Prior, log_pdf: Callable[[Tensor], Tensor]) -> Oracle:
    """E[log p(w)] for one weight w ~ N(mean, variance), by the trapezoidal rule."""

    def check() -> None:
        z = torch.linspace(-12, 12, 200_001, dtype=DOUBLE)
        for mean, variance in ((0.7, 0.4), (-0.1, 0.3), (2.0, 0.05)):
            density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
            exact = torch.trapezoid(density * log_pdf(mean + math.sqrt(variance) * z), z)
            params = [{"w": torch.tensor([value], dtype=DOUBLE)} for value in (mean, variance)]
            found = prior.expected_log_prob(*params, independent=True)
            assert found is not None
            close(found, exact, 1e-9)

    return check


def two_values() -> None:
    """Discrete weights are the second value with the given probability; relaxed ones lie between the values, in float32 as well."""
    drawn = priors.Bernoulli(0.3, values=(-1.0, 2.0)).sample({"w": torch.zeros(5000)}, torch.Generator().manual_seed(0))["w"]
    require(set(drawn.tolist()) == {-1.0, 2.0}, "draws have other values")
    require(abs(float((drawn == 2).double().mean()) - 0.3) < 0.03, "the share of the second value is off")
    for values in ((0.0, 1.0), (-1.0, 1.0), (100.0, 101.0)):
        prior = priors.Bernoulli(values=values, temperature=0.3)
        drawn = prior.sample({"w": torch.zeros(100_000)}, torch.Generator().manual_seed(0))
        require(bool(prior.log_prob(drawn).isfinite()), "a draw was rounded to a value, where there is no density")


def relaxed(w: np.ndarray) -> np.ndarray:
    """The binary concrete density of (w + 1) / 2."""
    law = torch.distributions.RelaxedBernoulli(torch.tensor(0.7, dtype=DOUBLE), probs=torch.tensor(0.3, dtype=DOUBLE))
    inside = np.abs(w) < 1
    x = torch.from_numpy(np.where(inside, (w + 1) / 2, 0.5))
    return np.where(inside, law.log_prob(x).exp().numpy() / 2, 0.0)


def refuses(prior: priors.Prior) -> Oracle:
    """A prior that is no density says so when it is scored."""

    def check() -> None:
        try:
            prior.log_prob({"w": torch.ones(2, dtype=DOUBLE)})
        except ValueError as error:
            require(len(str(error)) > 30, "the message says nothing")
        else:
            raise AssertionError("a prior without a density was scored")

    return check


def covariance(prior: priors.Prior, like: dict[str, Tensor], exact: Tensor) -> Oracle:
    """The density of all weights together is N(0, covariance)."""

    def check() -> None:
        params = {
            name: torch.randn(leaf.shape, generator=torch.Generator().manual_seed(2), dtype=DOUBLE) for name, leaf in like.items()
        }
        flat = torch.cat([leaf.reshape(-1) for leaf in params.values()])
        law = torch.distributions.MultivariateNormal(torch.zeros(len(flat), dtype=DOUBLE), exact)
        close(prior.log_prob(params), law.log_prob(flat))

    return check


def mixture(w: np.ndarray) -> np.ndarray:
    return 0.25 * stats.norm.pdf(w, scale=1.3) + 0.75 * stats.norm.pdf(w, scale=0.2)


def log_uniform(w: np.ndarray) -> np.ndarray:
    return stats.loguniform(0.1, 10.0).pdf(abs(w)) / 2


def at_distance() -> Tensor:
    """s^2 exp(-d / length) for the four places of a 2 x 2 kernel."""
    places = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
    return 0.49 * (-torch.cdist(places, places) / 1.5).exp()


def zeros(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in shapes.items()}


ROWS, COLUMNS = (torch.eye(2, dtype=DOUBLE) + shift for shift in (0.5, 1.0))
LAYER = {"0.weight": torch.zeros(1, 2, dtype=DOUBLE), "0.bias": torch.zeros(1, dtype=DOUBLE)}
PRIORS: dict[str, Oracle] = {
    "Normal": both(
        held(priors.Normal(scale=0.7)),
        held(priors.Normal(scale={"weight": 0.3, "bias": 2.0})),
        density(priors.Normal(scale=0.7), stats.norm(scale=0.7).pdf),
        expected(priors.Normal(scale=0.7), torch.distributions.Normal(0.0, torch.tensor(0.7, dtype=DOUBLE)).log_prob),
    ),
    "Laplace": both(
        held(priors.Laplace(0.7)),
        density(priors.Laplace(0.7), stats.laplace(scale=0.7 / math.sqrt(2)).pdf),
        expected(priors.Laplace(0.7), torch.distributions.Laplace(0.0, torch.tensor(0.7 / math.sqrt(2), dtype=DOUBLE)).log_prob),
    ),
    "StudentT": both(
        held(priors.StudentT(0.7, df=3.0)),
        density(priors.StudentT(0.7, df=3.0), stats.t(3.0, scale=0.7).pdf),
        density(priors.StudentT(0.7, df=1.0), stats.cauchy(scale=0.7).pdf),
    ),
    "ScaleMixture": both(
        held(priors.ScaleMixture(0.25, scales=(1.3, 0.2))), density(priors.ScaleMixture(0.25, scales=(1.3, 0.2)), mixture)
    ),
    "SpikeAndSlab": both(
        held(priors.SpikeAndSlab((3.0, 5.0), scale=1.3, spike=0.2)),
        density(priors.SpikeAndSlab(0.25, scale=1.3, spike=0.2), mixture),
        refuses(priors.SpikeAndSlab(0.25, spike=0.0)),
    ),
    "LogUniform": both(
        held(priors.LogUniform(bounds=(0.1, 10.0)), bounded=True),
        density(priors.LogUniform(bounds=(0.1, 10.0)), log_uniform),
        refuses(priors.LogUniform()),
    ),
    "Bernoulli": both(
        held(priors.Bernoulli(0.3, values=(-1.0, 1.0), temperature=0.7), bounded=True),
        density(priors.Bernoulli(0.3, values=(-1.0, 1.0), temperature=0.7), relaxed),
        two_values,
        refuses(priors.Bernoulli(0.3)),
    ),
    "Centered": both(
        held(priors.Centered({"0.weight": torch.ones(1, 2, dtype=DOUBLE)}, priors.Laplace(0.7))),
        density(priors.Centered({"w": torch.tensor(0.4)}, priors.Laplace(0.7)), stats.laplace(0.4, 0.7 / math.sqrt(2)).pdf),
    ),
    "ByName": held(priors.ByName({"bias": priors.StudentT(0.3), "": priors.Laplace(0.1)})),
    "MatrixNormal": both(
        held(priors.MatrixNormal(ROWS, columns=COLUMNS), zeros(w=(2, 2))),
        covariance(priors.MatrixNormal(ROWS, columns=COLUMNS), zeros(w=(2, 2)), torch.kron(ROWS, COLUMNS)),
    ),
    "ConvCorrelated": both(
        held(priors.ConvCorrelated(0.7, length=1.5), zeros(w=(1, 1, 2, 2))),
        covariance(priors.ConvCorrelated(0.7, length=1.5), zeros(w=(1, 1, 2, 2)), at_distance()),
    ),
    "MultivariateNormal": held(
        priors.MultivariateNormal(
            {name: leaf + 0.2 for name, leaf in LAYER.items()}, Diagonal.of({name: leaf + 0.3 for name, leaf in LAYER.items()})
        )
    ),
    "Hierarchical": both(
        held(priors.Hierarchical(priors.HalfCauchy(1.0))),
        held(priors.Hierarchical(priors.InverseGamma(3.0, 2.0))),
        held(priors.Hierarchical(priors.Gamma(2.0, 2.0))),
    ),
    "Horseshoe": held(priors.Horseshoe(0.5)),
    "ARD": held(priors.ARD()),
    "Jeffreys": both(held(priors.Jeffreys(bounds=(0.1, 10.0)), zeros(w=(1,)), bounded=True), refuses(priors.Jeffreys())),
    "Precisions": lambda: precisions(),
}


def precisions() -> None:
    """The prior inside `OnlineLaplace`: a Normal with a precision for each leaf."""
    from dubito.priors.prior import Prior

    (kind,) = (kind for kind in Prior.__subclasses__() if kind.__name__ == "Precisions")
    prior = kind({"0.weight": 4.0, "0.bias": 0.25})
    normal = priors.Normal(scale={"weight": 0.5, "bias": 2.0})
    params = normal.sample(LAYER, torch.Generator().manual_seed(0))
    close(prior.log_prob(params), normal.log_prob(params))
    check_prior(prior)


# ---- densities of scales: against scipy, in the coordinate log scale


def scale_law(scale, law, change: Callable[[np.ndarray], np.ndarray]) -> Oracle:
    """`log_prob` in the free coordinate s is that of the law at change(s), times |change'(s)|; draws have that law."""

    def check() -> None:
        s = np.linspace(-2, 2, 9)
        slope = np.abs((change(s + 1e-6) - change(s - 1e-6)) / 2e-6)
        close(scale.log_prob(torch.from_numpy(s)), torch.from_numpy(law.logpdf(change(s)) + np.log(slope)), 1e-5)
        drawn = scale.sample(torch.zeros(4000, dtype=DOUBLE), torch.Generator().manual_seed(0)).numpy()
        require(stats.kstest(change(drawn), law.cdf).pvalue > 1e-4, "draws do not have the law")

    return check


SCALES: dict[str, Oracle] = {
    "HalfCauchy": scale_law(priors.HalfCauchy(0.7), stats.halfcauchy(scale=0.7), np.exp),
    "Gamma": scale_law(priors.Gamma(2.0, 3.0), stats.gamma(2.0, scale=1 / 3.0), np.exp),
    "InverseGamma": scale_law(priors.InverseGamma(2.0, 3.0), stats.invgamma(2.0, scale=3.0), lambda s: np.exp(2 * s)),
    "Flat": PRIORS["Jeffreys"],
}


# ---- priors over functions


def rbf() -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    close(priors.RBF(0.7, length=1.3)(x), 0.49 * (-0.5 * torch.cdist(x, x).square() / 1.69).exp())


def process() -> None:
    """Moments and evidence of Gaussian process regression by dense linear algebra."""
    source = torch.Generator().manual_seed(0)
    x, y, at = (torch.randn(*shape, generator=source, dtype=DOUBLE) for shape in ((6, 2), (6,), (3, 2)))
    kernel = priors.RBF()
    found = priors.GaussianProcess(kernel, noise=0.3).given(x, y)
    noisy = kernel(x) + 0.09 * torch.eye(6, dtype=DOUBLE)
    mean, cov = found.moments(at)
    close(mean, kernel(at, x) @ torch.linalg.solve(noisy, y))
    close(cov, kernel(at) - kernel(at, x) @ torch.linalg.solve(noisy, kernel(x, at)))
    close(found.log_evidence(), torch.distributions.MultivariateNormal(torch.zeros(6, dtype=DOUBLE), noisy).log_prob(y))


def wide() -> None:
    """One hidden layer of the wide limit: E[phi(u) phi(v)] for Gaussian u, v, by Monte Carlo."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, dtype=DOUBLE, generator=source)
    for name, phi in {"relu": torch.relu, "erf": torch.erf}.items():
        root = torch.linalg.cholesky(priors.NNGP(0, name, scale=1.3, bias=0.4)(x))
        u = torch.randn(200_000, 3, dtype=DOUBLE, generator=source) @ root.mT
        close(priors.NNGP(1, name, scale=1.3, bias=0.4)(x), 0.16 + 1.69 * phi(u).mT @ phi(u) / len(u), 0.02)


def matched() -> None:
    """The scales found for a one-weight model of a process whose scale is known."""
    x = torch.linspace(-2, 2, 20).unsqueeze(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(nn.Linear(1, 1, bias=False), Gaussian(scale=0.1), priors.Normal(scale=3.0))
        target = priors.GaussianProcess(lambda a, b=None: 0.25 * a @ (a if b is None else b).mT, noise=0.1)
        found = priors.matching(model, target, x, steps=100, draws=128, learning_rate=0.1)
    scale = found.prior.scale_of("weight")
    require(0.35 < scale < 0.7, f"the scale is {scale}, not 0.5")


FUNCTIONS: dict[str, Oracle] = {"RBF": rbf, "GaussianProcess": process, "NNGP": wide, "matching": matched}
