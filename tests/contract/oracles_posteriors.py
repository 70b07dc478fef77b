"""An independent answer for every covariance structure, variational family, posterior form, and link."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dubito
from contract.oracles_model import close
from dubito import Bernoulli, Categorical, families, posteriors
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Dense, Diagonal, Kronecker, LowRank
from dubito.testing import Law, Regression, check_draws, check_functions, check_law, require
from dubito.testing.regression import NOISES

DOUBLE = torch.float64
Oracle = Callable[[], None]
SHAPES = {"w": (3, 2), "b": (3,)}
LIKE = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
PRIOR = {"w": torch.tensor(0.7, dtype=DOUBLE), "b": torch.tensor(2.5, dtype=DOUBLE)}
SCALE, TEMPERATURE = torch.tensor([0.6], dtype=DOUBLE), 1.3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def positive(n: int, rank: int) -> Tensor:
    root = numbers(n, rank, seed=n)
    return root @ root.mT


# ---- covariance structures


def structured(covariance: Covariance, curvature: Tensor) -> None:
    """T (s H + P0)^-1 as a matrix: products, solutions, determinants, variances and draws; and under another prior."""
    shift = torch.cat([PRIOR[name[0]].expand(shape).reshape(-1) for name, shape in covariance.shapes.items()])
    precision = 0.6 * curvature + torch.diag(shift)
    dense, size = TEMPERATURE * torch.linalg.inv(precision), len(curvature)
    like = {name: torch.empty(shape, device="meta") for name, shape in covariance.shapes.items()}
    rows = numbers(4, size, seed=9)
    close(covariance.dense(), dense)
    close(tree.flatten(covariance.product(tree.unflatten(rows, like)), stacked=True), rows @ dense)
    close(tree.flatten(covariance.solve(tree.unflatten(rows, like)), stacked=True), rows @ precision / TEMPERATURE)
    close(covariance.logdet(), torch.logdet(dense))
    close(tree.flatten(covariance.variance()), dense.diagonal())
    drawn = tree.flatten(covariance.sample(4000, torch.Generator().manual_seed(0)), stacked=True)
    check_draws(drawn.unsqueeze(1), Law(torch.zeros(size, dtype=DOUBLE), dense))
    close(covariance.with_temperature(2.6).dense(), 2 * dense)
    wide = TEMPERATURE * torch.linalg.inv(0.6 * curvature + 3 * torch.diag(shift))
    close(covariance.times(3.0).dense(), wide)
    close(covariance.log_precision({name: PRIOR[name[0]] for name in covariance.shapes}, SCALE), torch.logdet(precision))


def diagonal() -> None:
    curvature = {name: numbers(1, *shape).square() for name, shape in SHAPES.items()}
    structured(Diagonal(curvature, PRIOR, SCALE, TEMPERATURE), torch.diag(tree.flatten(tree.select(curvature, 0))))
    close(Diagonal.of({"w": torch.tensor([2.0, 3.0])}).dense(), torch.diag(torch.tensor([2.0, 3.0])))


def dense() -> None:
    curvature = positive(9, 4)
    structured(
        Dense({name: list(shape) for name, shape in SHAPES.items()}, curvature[None], PRIOR, SCALE, TEMPERATURE), curvature
    )


def lowrank() -> None:
    rows, values = torch.linalg.qr(numbers(9, 3))[0].mT, torch.tensor([90.0, 5.0, 0.3], dtype=DOUBLE)
    directions = tree.unflatten(rows, LIKE)
    made = LowRank.precision(directions, values, PRIOR, scale=SCALE, temperature=TEMPERATURE)
    curvature = rows.mT * values @ rows
    precision = 0.6 * curvature + torch.diag(torch.cat([PRIOR[n].expand(s).reshape(-1) for n, s in SHAPES.items()]))
    exact = TEMPERATURE * torch.linalg.inv(precision)
    close(made.dense(), exact)
    close(made.logdet(), torch.logdet(exact))
    close(tree.flatten(made.variance()), exact.diagonal())
    close(tree.flatten(made.solve(tree.unflatten(rows, LIKE)), stacked=True), rows @ precision / TEMPERATURE)
    drawn = tree.flatten(made.sample(4000, torch.Generator().manual_seed(0)), stacked=True)
    check_draws(drawn.unsqueeze(1), Law(torch.zeros(9, dtype=DOUBLE), exact))
    parts = {"w": numbers(6).square().reshape(3, 2) + 0.1, "b": numbers(3).square() + 0.1}
    sums = LowRank.of(parts, tree.unflatten(numbers(2, 9, seed=4), LIKE))
    close(sums.dense(), torch.diag(tree.flatten(parts)) + numbers(2, 9, seed=4).mT @ numbers(2, 9, seed=4))


def kronecker() -> tuple[Kronecker, Tensor]:
    inputs, outputs = positive(3, 3), positive(3, 4)
    made = Kronecker.of("w", "b", [3, 2], outputs[None], inputs, PRIOR, scale=SCALE, count=10, temperature=TEMPERATURE)
    order = torch.arange(9).reshape(3, 3)
    order = torch.cat([order[:, :2].flatten(), order[:, 2:].flatten()])  # the bias is the last input
    return made, torch.kron(outputs, inputs)[order][:, order]


def blocks() -> None:
    first, curvature = kronecker()
    other = positive(2, 3)
    second = Dense({"wide": [2]}, other[None], {"wide": PRIOR["w"]}, SCALE, TEMPERATURE)
    structured(Blocks((first, second)), torch.block_diag(curvature, other))


COVARIANCES: dict[str, Oracle] = {
    "Diagonal": diagonal,
    "Dense": dense,
    "LowRank": lowrank,
    "Kronecker": lambda: structured(*kronecker()),
    "Blocks": blocks,
}


# ---- variational families


def leaves_of(family: families.Family) -> dict[str, Tensor]:
    """Parameters that are not at their start, so that all of them matter."""
    start = {name: numbers(*shape, seed=1) for name, shape in SHAPES.items()}
    scale = {name: 0.2 + numbers(*shape, seed=2).abs() for name, shape in SHAPES.items()}
    leaves = family.leaves(start, scale)
    return {name: leaf + 0.3 * numbers(*leaf.shape, seed=i) for i, (name, leaf) in enumerate(leaves.items())}


def drawn_from(family: families.Family, leaves: dict[str, Tensor], n: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        rows = tree.stack([family.sample(leaves, family.noise(leaves, generator)) for _ in range(n)])
    return tree.flatten({name: rows[name] for name in SHAPES}, stacked=True)


def gaussian(family: families.Family) -> None:
    """Draws have the covariance that the family states; its entropy and density are those of that Gaussian."""
    leaves = leaves_of(family)
    moments = family.moments(leaves)
    assert moments is not None
    mean, variance = (tree.flatten({name: part[name] for name in SHAPES}) for part in moments)
    covariance = family.covariance(leaves)
    assert covariance is not None
    full = covariance.dense().double()
    close(full.diagonal(), variance, 1e-4)
    check_draws(drawn_from(family, leaves, 2500).unsqueeze(1), Law(mean, full))
    q = torch.distributions.MultivariateNormal(mean, full)
    entropy = family.entropy(leaves)
    assert entropy is not None
    close(entropy, q.entropy(), 1e-4)
    point = {name: numbers(*shape, seed=7) for name, shape in SHAPES.items()}
    density = family.log_prob(leaves, point)
    if density is not None:
        close(density, q.log_prob(tree.flatten(point)), 1e-5)


def factorized() -> None:
    """Independent normal, Laplace and logistic weights, against the distributions of torch."""
    logistic = partial(
        torch.distributions.TransformedDistribution,
        torch.distributions.Uniform(torch.tensor(0.0, dtype=DOUBLE), torch.tensor(1.0, dtype=DOUBLE)),
    )
    for shape in ("normal", "laplace", "logistic"):
        family = families.Factorized(shape)
        leaves = leaves_of(family)
        scales = {name: F.softplus(leaves[f"rho/{name}"]) for name in SHAPES}
        point = {name: numbers(*size, seed=7) for name, size in SHAPES.items()}
        exact = torch.zeros((), dtype=DOUBLE)
        for name in SHAPES:
            mean, scale = leaves[f"mean/{name}"], scales[name]
            sigmoid = [torch.distributions.SigmoidTransform().inv, torch.distributions.AffineTransform(mean, scale)]
            law = {
                "normal": lambda m=mean, s=scale: torch.distributions.Normal(m, s),
                "laplace": lambda m=mean, s=scale: torch.distributions.Laplace(m, s),
                "logistic": lambda t=sigmoid: logistic(t),
            }[shape]()
            exact = exact + law.log_prob(point[name]).sum()
        found = family.log_prob(leaves, point)
        assert found is not None
        close(found, exact)
        rows = drawn_from(family, leaves, 2500)
        spread = {"normal": 1.0, "laplace": math.sqrt(2), "logistic": math.pi / math.sqrt(3)}[shape]
        mean = torch.cat([leaves[f"mean/{name}"].reshape(-1) for name in SHAPES])
        width = spread * torch.cat([scales[name].reshape(-1) for name in SHAPES])
        require(float(((rows.mean(0) - mean) / (width / 50)).abs().max()) < 5, f"the mean of {shape} draws is off")
        require(float((rows.std(0) / width - 1).abs().max()) < 0.12, f"the spread of {shape} draws is off")


def grouped() -> None:
    """Weights times a factor for each input unit: E[w z] and Var[w z] of independent w and z ~ N(m, s^2)."""
    family = families.Grouped()
    leaves = leaves_of(family)
    found = family.weight_moments(leaves)
    assert found is not None
    mean, variance = (part["w"] for part in found)
    close(mean, leaves["mean/w"] * leaves["factor/w"])
    rows = drawn_from(family, leaves, 10_000)[:, :6].reshape(-1, 3, 2)
    require(float(((rows.mean(0) - mean) / (variance / 10_000).sqrt()).abs().max()) < 5, "the mean of draws is off")
    require(float((rows.var(0) / variance - 1).abs().max()) < 0.15, "the variance of draws is off")


def flow() -> None:
    """log q of the factors is the density of the noise over the Jacobian of the whole flow."""
    family = families.Flow(steps=3, hidden=4)
    leaves = leaves_of(family)
    noise = family.noise(leaves, torch.Generator().manual_seed(3))
    unit = noise["unit/w"]
    jacobian = torch.autograd.functional.jacobian(lambda e: family._factors(leaves, {"unit/w": e}, "w")[0], unit)
    exact = torch.distributions.Normal(0.0, 1.0).log_prob(unit).sum() - torch.linalg.slogdet(jacobian)[1]  # pyright: ignore
    close(family._factors(leaves, noise, "w")[1], exact)


def binary() -> None:
    """Discrete weights: moments of draws, and the divergence by a sum over both values."""
    family, prior = families.Binary((-1.0, 1.0), learn_scale=False), dubito.priors.Bernoulli(0.3, values=(-1.0, 1.0))
    leaves = leaves_of(family)
    p = torch.cat([torch.sigmoid(leaves[f"logit/{name}"]).reshape(-1) for name in SHAPES])
    rows = drawn_from(family, leaves, 2500)
    require(set(rows.unique().tolist()) == {-1.0, 1.0}, "draws have other values")
    error = (rows.mean(0) - (2 * p - 1)).abs() / (4 * p * (1 - p) / 2500).sqrt()
    require(float(error.max()) < 5, "the share of the second value is off")
    exact = (p * (p / 0.3).log() + (1 - p) * ((1 - p) / 0.7).log()).sum()
    found = family.divergence(leaves, family.noise(leaves, torch.Generator().manual_seed(0)), prior, {})
    assert found is not None
    close(found, exact)


FAMILIES: dict[str, Oracle] = {
    "MeanField": partial(gaussian, families.MeanField()),
    "LowRank": partial(gaussian, families.LowRank(rank=2)),
    "Layerwise": partial(gaussian, families.Layerwise()),
    "Full": partial(gaussian, families.Full()),
    "MatrixNormal": partial(gaussian, families.MatrixNormal(pseudo=2)),
    "Factorized": factorized,
    "Grouped": grouped,
    "Flow": flow,
    "Binary": binary,
}


# ---- posterior forms, on linear regression, where functions are linear in the weights


@lru_cache
def problem() -> Regression:
    return Regression()


def mode() -> dict[str, Tensor]:
    return problem().params(problem().exact.mean)


def laplace() -> posteriors.Gaussian:
    return dubito.fit(problem().model, dubito.Laplace("dense"), problem().data, start=mode())  # pyright: ignore


def samples(n: int = 400) -> posteriors.Samples:
    return posteriors.Samples(problem().model, problem().draws(n), {}, chains=n)


def point() -> None:
    form = posteriors.Point(problem().model, mode(), {})
    check_law(form, problem().mode)
    check_functions(problem(), form)
    require(torch.equal(form.sample(3)["weight"][1], mode()["weight"]), "a draw of a point is not the point")


def gaussian_form() -> None:
    """All ways to predict agree where the network is linear in its weights; the density is that of the Gaussian."""
    form, law = laplace(), problem().exact
    check_law(form, law)
    check_functions(problem(), form)
    x = numbers(4, 2, seed=3)
    design = problem().design(x)
    variance = torch.einsum("ncp,pq,ncq->nc", design, law.covariance, design)
    full = torch.einsum("ncp,pq,ndq->ncd", design, law.covariance, design)
    for how in ("linearized", "streamlined", "adjoint"):
        p = form.predict(x, how)
        close(p.f_mean, design @ law.mean)
        close(p.f_var, variance)
        close(p.uncertainty.epistemic, variance)
    close(form.predict(x, "linearized").covariances[0], full)
    many = form.predict(x, "sampled", draws=8000)
    require(float(((many.f_mean - design @ law.mean) / (variance / 8000).sqrt()).abs().max()) < 5, "sampled: the mean is off")
    require(float((many.f_var / variance - 1).abs().max()) < 0.1, "sampled: the variance is off")
    close(form.predict(x, "point").f_mean, design @ law.mean)
    rows = tree.flatten(form.sample(4000, torch.Generator().manual_seed(0)), stacked=True)
    check_draws(rows.unsqueeze(1), law)
    exact = torch.distributions.MultivariateNormal(law.mean, law.covariance)
    close(form.log_prob(problem().params(rows[0])), exact.log_prob(rows[0]))
    close(form.log_prob(problem().params(rows[:3])), exact.log_prob(rows[:3]))
    mean, joint = form.joint(x)
    close(mean, design @ law.mean)
    close(joint.reshape(8, 8), torch.einsum("ncp,pq,mdq->ncmd", design, law.covariance, design).reshape(8, 8))


def samples_form() -> None:
    form = samples()
    check_law(form, problem().exact)
    check_functions(problem(), form)
    x, y = numbers(4, 2, seed=3), numbers(4, 2, seed=4)
    f = problem().design(x) @ tree.flatten(form.params, stacked=True).mT  # [N, C, S]
    scale = torch.tensor(NOISES, dtype=DOUBLE).unsqueeze(1)
    inside = torch.distributions.Normal(f, scale).log_prob(y.unsqueeze(-1)).sum(1)
    close(form.predict(x).log_prob(y), inside.logsumexp(-1) - math.log(len(form)))


def stored_form() -> None:
    """Draws in files predict as draws in memory do."""
    p, x = problem(), numbers(4, 2, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        method = dubito.HMC(0.2, chains=2, draws=40, burn_in=5, path_length=0.6, tune=False)
        held = dubito.fit(p.model, method, p.data)
        dubito.fit(p.model, method, p.data, checkpoint=Path(folder) / "run")
        stored = posteriors.Stored.open(Path(folder) / "run", p.model)
        close(tree.flatten(stored.load().params, stacked=True), tree.flatten(held.params, stacked=True))  # pyright: ignore
        close(stored.predict(x).f_var, held.predict(x).f_var)
        close(stored.predict(x).f_mean, held.predict(x).f_mean)
        require(len(stored) == 80, f"80 draws are {len(stored)} in the files")


def stochastic_form() -> None:
    """Dropout on the inputs of a linear layer: E and Var of the function in closed form; the one-pass prediction is exact there."""
    method = dubito.MCDropout(epochs=0, at="", rate=0.3)
    form: Any = dubito.fit(problem().model, method, problem().data, start=mode())
    x, w, b = numbers(4, 2, seed=3), mode()["weight"], mode()["bias"]
    exact = 0.3 / 0.7 * x.square() @ w.square().mT
    for p, slack in (
        (form.predict(x, draws=8000), 0.1),
        (form.predict(x, "streamlined"), 1e-6),
        (form.predict(x, "adjoint"), 1e-6),
    ):
        require(float((p.f_var / exact - 1).abs().max()) < slack, "the variance over masks is off")
        gap = (p.f_mean - x @ w.mT - b).abs() / exact.sqrt()
        require(float(gap.max()) < max(slack, 0.06) if slack > 1e-3 else float(gap.max()) < 1e-6, "the mean over masks is off")


def drawn_form() -> None:
    """A family that is not Gaussian: the moments that it states are those of its draws and of its functions."""
    family = families.Factorized("laplace")
    start = mode()
    leaves = family.leaves(start, {name: torch.full_like(leaf, 0.2) for name, leaf in start.items()})
    form = posteriors.Drawn(problem().model, family, leaves, {}, {}, draws=4000)
    x = numbers(4, 2, seed=3)
    p, design = form.predict(x), problem().design(x)
    variance = 2 * 0.2**2 * design.square().sum(-1)  # of a Laplace density of scale b it is 2 b^2
    require(float((p.f_var / variance - 1).abs().max()) < 0.12, "the variance of the function is off")
    mean = design @ problem().exact.mean
    require(float(((p.f_mean - mean) / (variance / 4000).sqrt()).abs().max()) < 5, "the mean of the function is off")


def conjugate_form() -> None:
    """The neural linear model is Bayesian regression: exact with a known noise, a Student-t with a learned one."""
    p = problem()
    form: Any = dubito.fit(p.model, dubito.NeuralLinear(), p.data)
    check_law(form, p.exact)
    x = numbers(4, 2, seed=3)
    design = p.design(x)
    found = form.predict(x)
    close(found.f_mean, design @ p.exact.mean)
    close(found.f_var, torch.einsum("ncp,pq,ncq->nc", design, p.exact.covariance, design))
    half = form.model
    first: Any = dubito.fit(half, dubito.NeuralLinear(), (p.data[0][:12], p.data[1][:12]))
    close(first.update(p.data[0][12:], p.data[1][12:]).mean, form.mean)


def mixture_form() -> None:
    """Weighted members: means and variances by the law of total variance."""
    one, other = laplace(), posteriors.Point(problem().model, problem().params(problem().exact.mean + 0.3), {})
    form = posteriors.Mixture(problem().model, (one, other), (0.3, 0.7))
    x = numbers(4, 2, seed=3)
    a, b, p = one.predict(x), other.predict(x), form.predict(x)
    mean = 0.3 * a.f_mean + 0.7 * b.f_mean
    close(p.f_mean, mean)
    close(p.f_var, 0.3 * (a.f_var + (a.f_mean - mean) ** 2) + 0.7 * (b.f_mean - mean) ** 2)
    y = numbers(4, 2, seed=4)
    close(p.log_prob(y), torch.logaddexp(math.log(0.3) + a.log_prob(y), math.log(0.7) + b.log_prob(y)))
    rows = form.sample(4000, torch.Generator().manual_seed(0))["weight"]
    share = float((rows == other.params["weight"]).all(-1).all(-1).double().mean())
    require(abs(share - 0.7) < 0.04, f"{share:.2f} of the draws are of a member with weight 0.7")


FORMS: dict[str, Oracle] = {
    "Point": point,
    "Gaussian": gaussian_form,
    "Samples": samples_form,
    "Stored": stored_form,
    "Stochastic": stochastic_form,
    "Drawn": drawn_form,
    "Conjugate": conjugate_form,
    "Mixture": mixture_form,
}


# ---- links: a Gaussian over logits becomes probabilities


def linked(link: str, classes: float, labels: float | None) -> None:
    """Against Monte Carlo over the logits, within the known error of each approximation; exact where the logits are certain."""
    f, root = numbers(5, 3, seed=1), 0.5 * numbers(3, 3, seed=2)
    cov = (root @ root.mT + 0.2 * torch.eye(3, dtype=DOUBLE)).expand(5, 3, 3)
    draws = f + torch.einsum("cd,nbd->nbc", torch.linalg.cholesky(cov[0]), numbers(40_000, 5, 3, seed=3))
    p = LatentMixture(Categorical(), f[None], cov[None], link=link)
    exact = draws.softmax(-1).mean(0)
    gap = float((p.mean - exact).abs().max())
    require(gap < classes, f"{link}: class probabilities are off by {gap:.3f} (at most {classes})")
    y = torch.arange(5) % 3
    gap = float((p.log_prob(y).exp() - exact.gather(1, y[:, None]).squeeze(1)).abs().max())
    require(gap < classes, f"{link}: the probability of a class is off by {gap:.3f}")
    if labels is not None:
        p = LatentMixture(Bernoulli(), f[None], cov[None], link=link)
        gap = float((p.mean - draws.sigmoid().mean(0)).abs().max())
        require(gap < labels, f"{link}: label probabilities are off by {gap:.3f} (at most {labels})")
    if link in FORMULAS:
        for scale in (1.0, 1.5):  # of the noise: logits are divided by its square
            weight = torch.stack([FORMULAS[link](m / scale**2, cov[0] / scale**4) for m in f])
            found = LatentMixture(Categorical(scale=scale), f[None], cov[None], link=link)
            close(found.mean, weight / weight.sum(-1, keepdim=True))
        weight = torch.stack([FORMULAS[link](m[:2], cov[0, :2, :2]) for m in f])  # two classes
        found = LatentMixture(Categorical(), f[None, :, :2], cov[None, :, :2, :2], link=link)
        close(found.mean, weight / weight.sum(-1, keepdim=True))
    if link == "probit":
        scaled = f / 1.5**2 / (1 + math.pi / 8 * cov.diagonal(dim1=1, dim2=2) / 1.5**4).sqrt()
        close(LatentMixture(Bernoulli(scale=1.5), f[None], cov[None], link=link).mean, scaled.sigmoid())
    if link == "bridge":  # logits whose sum is known: their mean is taken off
        center = torch.eye(3, dtype=DOUBLE) - 1 / 3
        flat = center @ cov[0] @ center
        weight = torch.stack([dirichlet(m - m.mean(), flat.diagonal()) for m in f])
        found = LatentMixture(Categorical(), f[None], flat.expand(1, 5, 3, 3), link=link)
        close(found.mean, weight / weight.sum(-1, keepdim=True))
    if link != "bridge":  # which is for logits that are uncertain
        sure = LatentMixture(Categorical(), f[None], 1e-9 * cov[None], link=link)
        close(sure.mean, f.softmax(-1), 1e-4)


def probit(m: Tensor, v: Tensor) -> Tensor:
    return (m / (1 + math.pi / 8 * v.diagonal()).sqrt()).exp()


def pairwise(m: Tensor, v: Tensor) -> Tensor:
    """1 / sum_d exp(E[f_d - f_c] / sqrt(1 + pi Var[f_d - f_c] / 8))."""
    size = range(len(m))
    scaled = [[(m[d] - m[c]) / (1 + math.pi / 8 * (v[c, c] + v[d, d] - 2 * v[c, d])).sqrt() for d in size] for c in size]
    return torch.stack([1 / torch.stack(row).exp().sum() for row in scaled])


def bridge(m: Tensor, v: Tensor) -> Tensor:
    """The Dirichlet that the Laplace bridge gives, of logits that are conditioned on a sum of zero."""
    ones = torch.ones(len(m), dtype=m.dtype)
    gain = v @ ones / (ones @ v @ ones)
    return dirichlet(m - gain * m.sum(), (v - torch.outer(gain, v @ ones)).diagonal())


def dirichlet(mean: Tensor, variance: Tensor) -> Tensor:
    """alpha_c = (1 - 2 / C + e^m_c / C^2 sum_d e^-m_d) / V_c."""
    size = len(mean)
    return (1 - 2 / size + mean.exp() / size**2 * (-mean).exp().sum()) / variance


FORMULAS = {"probit": probit, "pairwise": pairwise, "bridge": bridge}
LINKS: dict[str, Oracle] = {
    "nodes": partial(linked, "nodes", 0.01, 0.01),
    "mc": partial(linked, "mc", 0.06, 0.06),
    "pairwise": partial(linked, "pairwise", 0.02, None),
    "probit": partial(linked, "probit", 0.06, 0.01),
    "bridge": partial(linked, "bridge", 0.2, None),
}
