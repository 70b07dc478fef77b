"""How much does the scale of the prior matter?

python examples/posteriors/prior_scale.py --train 200      # as in results/: some minutes; wide priors take small steps
"""

from dataclasses import replace

from problem import load, report, setting

import dubito

s = setting()
rows = {}
for scale in (0.1, 0.2, 0.5, 1.0, 2.0, 4.0):
    problem = load(replace(s, scale=scale))
    posterior = problem.hmc(problem.model(dubito.priors.Normal(scale)))
    rows[f"scale {scale:g}"] = {**problem.scores(posterior.predict(problem.x_test)), **problem.trust(posterior)}
    print(f"scale {scale:g}", rows[f"scale {scale:g}"], flush=True)
report("prior_scale", s, rows)
