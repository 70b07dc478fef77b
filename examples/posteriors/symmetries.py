"""Weights are symmetric, functions are not: why R-hat of weights is the wrong question.

Permuting the hidden units, or scaling a ReLU unit's incoming weights by a and its outgoing ones by 1/a, leaves the function as it is.
The permutations leave the posterior as it is too (the prior is the same for all units), so chains that have converged to one
distribution of functions sit in different copies of it; scalings do not, and the prior makes all draws balanced.
"""

import torch
from problem import load, report, setting

from dubito import tree
from dubito.diagnostics import ess_bulk, rhat

s = setting()
problem = load(s)
model = problem.model()
posterior = problem.hmc(model)
probs = posterior.predict(problem.x_test[:100]).means.softmax(-1).unflatten(0, (posterior.chains, -1))
weights = tree.flatten(posterior.params, stacked=True).unflatten(0, (posterior.chains, -1))
rows = {}
for label, draws in (("weights", weights), ("predictions", probs)):
    found, size = rhat(draws).flatten(), ess_bulk(draws).flatten()
    found, size = found[found.isfinite()], size[size.isfinite()]
    share = float((found > 1.1).float().mean())
    rows[label] = {"rhat median": float(found.median()), "rhat max": float(found.max()), "share above 1.1": share}
    rows[label]["ess median"] = float(size.median())
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
incoming = posterior.params["0.weight"].square().sum((1, 2)) + posterior.params["0.bias"].square().sum(1)
outgoing = posterior.params["2.weight"].square().sum((1, 2))
rows["draws: squared norms in, out"] = {"in": float(incoming.mean()), "out": float(outgoing.mean())}
report("symmetries", s, rows)
