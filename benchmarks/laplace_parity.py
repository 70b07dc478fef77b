"""Where laplace-torch is right we must agree with it, and where it is wrong the error is measured: on its own kinds of examples.

On one trained network, with one prior precision and one noise, in float64: the posterior precision, the moments of the linearised
outputs and the log marginal likelihood of both, for dense, diagonal and Kronecker structures. Its Kronecker posterior leaves out how a
layer's bias goes with its weights, ours does not, so there the networks are without biases. Then the prior precision and the noise
of the regression are optimised by both, each by its own evidence. At last its known errors, each against a few lines of our own.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from laplace_cost import Loader, versions
from measure import show, write
from torch import Tensor, nn

import dubito

TOLERANCE = 1e-4
STRUCTURES = {"dense": "full", "diagonal": "diag", "kronecker": "kron"}


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((ours.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max())


def trained(network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss(network(x), y) + 1e-4 * sum(p.square().sum() for p in network.parameters())).backward()
        optimizer.step()
    return network.eval()


def sine(n: int = 150, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """The regression example of laplace-torch: a noisy sine on [0, 8]."""
    x = 8 * torch.rand(n, 1)
    return x, x.sin() + noise * torch.randn(n, 1)


def digits(n: int = 300) -> tuple[Tensor, Tensor]:
    """Some of scikit-learn's 8 x 8 images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images[:n], dtype=torch.get_default_dtype()) / 16, torch.as_tensor(labels[:n]).long()


def examples(steps: int) -> list[tuple[str, nn.Module, dubito.likelihoods.Likelihood, Tensor, Tensor, Sequence[str]]]:
    """Name, trained network, likelihood, data, and the structures that must agree."""
    x, y = sine()
    images, labels = digits()

    def curve(bias: bool) -> nn.Module:
        return trained(
            nn.Sequential(nn.Linear(1, 50, bias=bias), nn.Tanh(), nn.Linear(50, 1, bias=bias)), F.mse_loss, x, y, steps
        )

    def classes(bias: bool) -> nn.Module:
        network = nn.Sequential(nn.Linear(64, 8, bias=bias), nn.ReLU(), nn.Linear(8, 10, bias=bias))
        return trained(network, F.cross_entropy, images, labels, steps)

    def convolution() -> nn.Module:
        layers = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.ReLU(), nn.Flatten()
        return trained(nn.Sequential(*layers, nn.Linear(36, 10, bias=False)), F.cross_entropy, images, labels, steps)

    noise, categorical = dubito.Gaussian(scale=0.3), dubito.Categorical()
    return [
        ("sine, tanh 1-50-1", curve(True), noise, x, y, ("dense", "diagonal")),
        ("sine, no biases", curve(False), noise, x, y, ("dense", "diagonal", "kronecker")),
        ("digits, ReLU 64-8-10", classes(True), categorical, images, labels, ("dense", "diagonal")),
        ("digits, no biases", classes(False), categorical, images, labels, ("dense", "diagonal", "kronecker")),
        ("digits, convolution, no biases", convolution(), categorical, images, labels, ("diagonal", "kronecker")),
    ]


def peer(network: nn.Module, likelihood: Any, structure: str, batches: Any, precision: float, **more: Any) -> Any:
    """laplace-torch's posterior, fitted."""
    import laplace

    kind = "regression" if isinstance(likelihood, dubito.Gaussian) else "classification"
    noise = {"sigma_noise": likelihood.scale} if kind == "regression" else {}
    found = laplace.Laplace(
        copy.deepcopy(network), kind, subset_of_weights="all", hessian_structure=STRUCTURES[structure],
        prior_precision=precision, **{**noise, **more},
    )  # fmt: skip
    found.fit(batches)
    return found


def ours(network: nn.Module, likelihood: Any, structure: str, batches: Any, precision: float | None) -> Any:
    prior = dubito.priors.Normal(scale=None if precision is None else precision**-0.5)
    method = dubito.Laplace(
        structure=structure, optimize_evidence=precision is None, optimize_noise=precision is None, prior_groups="one"
    )
    return dubito.fit(dubito.Model(network, likelihood, prior), method, batches, progress=False)


def compare(network: nn.Module, likelihood: Any, structure: str, x: Tensor, y: Tensor, precision: float) -> dict[str, float]:
    """How far the two posteriors are apart."""
    batches = Loader(zip(x.split(64), y.split(64), strict=True))
    a, b = (
        ours(network, likelihood, structure, list(batches), precision),
        peer(network, likelihood, structure, batches, precision),
    )
    theirs = b.posterior_precision
    theirs = theirs.diag() if structure == "diagonal" else theirs if structure == "dense" else theirs.to_matrix()
    at = torch.cat([x[:20], 1.5 * x[20:40]])
    predictive, (mean, cov) = a.predict(at), b._glm_predictive_distribution(at)
    found = predictive.cov[0]
    return {
        "precision": apart(torch.linalg.inv(a.covariance.dense()), theirs),
        "f mean": apart(predictive.f_mean, mean),
        "f var": apart(predictive.f_var, cov.diagonal(dim1=-2, dim2=-1)),
        "f cov": apart(found if found.ndim == cov.ndim else torch.diag_embed(found), cov),
        "evidence": apart(a.log_evidence(), b.log_marginal_likelihood()),
    }


def hyperparameters(network: nn.Module, structure: str, x: Tensor, y: Tensor, steps: int) -> dict[str, float]:
    """Prior precision and noise by the evidence: theirs by its example's loop (Adam over logarithms), ours by itself."""
    batches = Loader([(x, y)])
    b = peer(network, dubito.Gaussian(scale=1.0), structure, batches, 1.0)
    log_prior, log_noise = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_noise], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-b.log_marginal_likelihood(log_prior.exp(), log_noise.exp())).backward()
        optimizer.step()
    precision, noise = float(log_prior.exp()), float(log_noise.exp())
    a = ours(network, dubito.Gaussian(), structure, list(batches), None)
    return {
        "prior precision, ours": float(next(iter(a.prior_precision.values()))),
        "prior precision, theirs": precision,
        "noise, ours": float(a.params["likelihood:log_scale"].exp()),
        "noise, theirs": noise,
        "log evidence, ours": float(a.log_evidence()),
        "log evidence of ours at their values": float(a.log_evidence(precision, noise=noise)),
        "log evidence, theirs at their values": float(
            b.log_marginal_likelihood(torch.tensor([precision]), torch.tensor([noise]))
        ),
    }


def errors(x: Tensor, y: Tensor, steps: int) -> dict[str, dict[str, float]]:
    """Known errors of laplace-torch: what it says, and what is so."""
    from laplace.curvature import CurvlinopsEF

    layers = nn.Linear(1, 20, bias=False), nn.Tanh(), nn.Linear(20, 1, bias=False)
    network, batches = trained(nn.Sequential(*layers), F.mse_loss, x, y, steps), Loader([(x, y)])
    found: dict[str, dict[str, float]] = {}

    for structure, name in (("dense", "dense (right)"), ("kronecker", "Kronecker")):
        b = peer(network, dubito.Gaussian(scale=0.3), structure, batches, 1.0)
        noise = torch.tensor([0.3], requires_grad=True)
        (slope,) = torch.autograd.grad(b.log_marginal_likelihood(torch.ones(1), noise), noise)
        up, down = (b.log_marginal_likelihood(torch.ones(1), torch.tensor([0.3 + step])) for step in (1e-5, -1e-5))
        found[f"slope of its evidence in the noise, {name}"] = {"says": float(slope), "is": float((up - down) / 2e-5)}

    def output(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(network, weights, (row,)).squeeze()

    weights = {name: p.detach() for name, p in network.named_parameters()}
    jacobian = torch.func.vmap(torch.func.grad(output), (None, 0))(weights, x)
    rows = torch.cat([leaf.flatten(1) for leaf in jacobian.values()], 1) * (network(x) - y).detach()
    empirical = peer(network, dubito.Gaussian(scale=1.0), "diagonal", batches, 1.0, backend=CurvlinopsEF)
    found["empirical Fisher of a regression, sum"] = {"says": float(empirical.H.sum()), "is": float(rows.square().sum())}

    dropped = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, drop_last=True)
    seen = Loader(list(dropped))
    says, so = (peer(network, dubito.Gaussian(scale=0.3), "kronecker", data, 1.0) for data in (dropped, seen))
    found["examples of a loader with drop_last"] = {"says": float(says.n_data), "is": float(so.n_data)}
    found["log evidence with drop_last, Kronecker"] = {
        "says": float(says.log_marginal_likelihood()),
        "is": float(so.log_marginal_likelihood()),
    }

    network = trained(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)), F.mse_loss, x, y, steps)
    kron, dense = (peer(network, dubito.Gaussian(scale=1.0), structure, batches, 1.0) for structure in ("kronecker", "dense"))
    weight, bias = slice(40, 60), slice(60, 61)  # of the last layer
    found["Kronecker: last layer's weights with its bias, norm"] = {
        "says": float(kron.H_facs.to_matrix()[weight, bias].norm()),
        "is": float(dense.H[weight, bias].norm()),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="of training")
    parser.add_argument("--precision", type=float, default=2.0, help="of the prior")
    parser.add_argument("--quick", action="store_true", help="little training, nothing is written")
    args, began = parser.parse_args(), time.time()
    if "not installed" in versions().values():
        print("laplace-torch is not installed (benchmarks/requirements.txt): there is nothing to compare with")
        return
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # these networks are too small for more
    torch.set_default_dtype(torch.float64)  # what differs is then the method and not the rounding
    steps = 50 if args.quick else args.steps
    figures: dict[str, Any] = {"apart": {}}
    for name, network, likelihood, x, y, structures in examples(steps):
        for structure in structures:
            figures["apart"][f"{name}: {structure}"] = compare(network, likelihood, structure, x, y, args.precision)
    table = figures["apart"]
    columns = list(next(iter(table.values())))
    rows = [[name, *(f"{value:.0e}" for value in row.values())] for name, row in table.items()]
    show(f"Largest relative difference (must be under {TOLERANCE:g})", ["", *columns], rows)

    x, y = sine()
    figures["optimised"] = {}
    for structure in ("dense", "kronecker"):
        layers = [nn.Linear(1, 50, bias=structure == "dense"), nn.Tanh(), nn.Linear(50, 1, bias=structure == "dense")]
        network = trained(nn.Sequential(*layers), F.mse_loss, x, y, steps)
        figures["optimised"][structure] = hyperparameters(network, structure, x, y, 100 if args.quick else 400)
    both = figures["optimised"]
    rows = [[key, *(f"{both[structure][key]:.5g}" for structure in both)] for key in both["dense"]]
    show("Prior precision and noise that maximise the evidence, sine", ["", *both], rows)

    figures["errors"] = errors(x, y, steps)
    rows = [[name, f"{row['says']:.6g}", f"{row['is']:.6g}"] for name, row in figures["errors"].items()]
    show("Known errors of laplace-torch 0.3", ["", "it says", "is"], rows)

    worst = {name: max(row.values()) for name, row in table.items()}
    wrong = {name: value for name, value in worst.items() if not value < TOLERANCE}
    if wrong:
        raise AssertionError(f"we do not agree with laplace-torch: {wrong}")
    for structure, row in both.items():
        behind = row["log evidence of ours at their values"] - row["log evidence, ours"]
        if not behind < 1e-3 * math.sqrt(len(x)):
            raise AssertionError(f"{structure}: our evidence is larger by {behind:.3g} at laplace-torch's values than at our own")
    if args.quick:
        return
    headline = {f"{name}: largest relative difference": [f"{value:.0e}", f"<= {TOLERANCE:g}"] for name, value in worst.items()}
    headline |= {
        f"sine, {structure}, optimised: log evidence at our values; at those of laplace-torch": [
            f"{row['log evidence, ours']:.3f}; {row['log evidence of ours at their values']:.3f}", "first >= second"
        ]
        for structure, row in both.items()
    }  # fmt: skip
    headline |= {
        f"laplace-torch, known error: {name}": [f"{row['says']:.5g}", f"{row['is']:.5g}"]
        for name, row in figures["errors"].items()
    }
    settings = {"steps": steps, "prior precision": args.precision, "tolerance": TOLERANCE, "peers": versions()}
    write("laplace_parity", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
