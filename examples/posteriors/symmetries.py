"""Weights are symmetric, functions are not: why R-hat of weights is the wrong question.

Permuting the hidden units leaves the function as it is, and the posterior too (the prior is the same for all units). With few units,
each of which the data need, a chain goes slowly from one of these copies to another: chains disagree on weights long after they agree
on what the network computes.

Scaling a ReLU unit's incoming weights by c and its outgoing ones by 1 / c leaves the function as it is, but not the prior: every
function is a curve in weight space, along which only the prior decides. At a mode the squared norms of both sides are equal; along
the curve there is more room on the side with more weights, and in the posterior the squared norms differ by exactly
scale^2 (number of incoming weights - number of outgoing ones), in the mean over draws, for every unit. That is a test of a sampler.

    python examples/posteriors/symmetries.py --hidden 8 --scale 2 --burn-in 200 --draws 300      # as in results/: two minutes
"""

import torch
from problem import load, report, setting

from dubito.diagnostics import ess_bulk, ess_mean, rhat
from dubito.tensors import tree
from dubito.tensors.tree import Params

s = setting()
problem = load(s)
model = problem.model()
posterior = problem.hmc(model)
probs = posterior.predict(problem.x_test[:100]).means.softmax(-1).unflatten(0, (posterior.chains, -1))
weights = tree.flatten(posterior.params, stacked=True).unflatten(0, (posterior.chains, -1))
rows, histograms = {}, {}
for label, draws in (("weights", weights), ("predictions", probs)):
    found, size = rhat(draws).flatten(), ess_bulk(draws).flatten()
    found, size = found[found.isfinite()], size[size.isfinite()]
    rows[label] = {"rhat median": float(found.median()), "rhat_99": float(found.quantile(0.99)), "rhat max": float(found.max())}
    rows[label] |= {"share above 1.1": float((found > 1.1).float().mean()), "ess median": float(size.median())}
    histograms[label] = torch.quantile(found, torch.linspace(0, 1, 101).to(found)).tolist()
# the symmetries themselves, on one draw
one = tree.select(posterior.params, 0)
order = torch.randperm(s.hidden, generator=torch.Generator().manual_seed(0)).to(problem.x.device)
permuted = {"0.weight": one["0.weight"][order], "0.bias": one["0.bias"][order], "2.weight": one["2.weight"][:, order]}
scaled = {"0.weight": 2 * one["0.weight"], "0.bias": 2 * one["0.bias"], "2.weight": 0.5 * one["2.weight"]}
f, _ = model.forward(one, problem.x_test, model.buffers())
for label, change in (("permuted", permuted), ("scaled by 2", scaled)):
    other = {**one, **change}
    moved = float((tree.flatten(other) - tree.flatten(one)).norm())
    changed = float((model.forward(other, problem.x_test, model.buffers())[0] - f).abs().max())
    density = float(model.prior.log_prob(other) - model.prior.log_prob(one))
    rows[label] = {"distance in weights": moved, "change of f": changed, "log prior": density}


def norms(params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared norms of what comes into the units and goes out of them, the mean over units, [S]."""
    incoming = params["0.weight"].square().sum(2) + params["0.bias"].square()  # [S, H]
    return incoming.mean(1), params["2.weight"].square().sum(1).mean(1)


incoming, outgoing = norms(posterior.params)
apart = (incoming - outgoing).unflatten(0, (posterior.chains, -1))
error = float(apart.std() / ess_mean(apart) ** 0.5)
rows["draws"] = {"in": float(incoming.mean()), "out": float(outgoing.mean()), "in - out": float(apart.mean()), "+-": error}
rows["theory"] = {"in - out": s.scale**2 * (problem.x.shape[1] + 1 - 10)}
at_mode = norms(problem.trained(model).sample(1))
rows["mode"] = {"in": float(at_mode[0]), "out": float(at_mode[1]), "in - out": float(at_mode[0] - at_mode[1])}
report("symmetries", s, rows, rhat_percentiles=histograms)
