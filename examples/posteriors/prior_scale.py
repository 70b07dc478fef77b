"""How much does the scale of the prior matter?"""

from dataclasses import replace

from problem import load, report, setting

import dubito

s = setting()
rows = {}
for scale in (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0):
    problem = load(replace(s, scale=scale))
    posterior = problem.hmc(problem.model(dubito.priors.Normal(scale)))
    rows[f"scale {scale:g}"] = {**problem.scores(posterior.predict(problem.x_test)), **problem.trust(posterior)}
report("prior_scale", s, rows)
