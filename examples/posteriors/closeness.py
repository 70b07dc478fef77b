"""How close is each approximate method to the posterior? Accuracy, agreement and total variation against reference HMC."""

import time

from problem import closeness, load, report, setting

import dubito

s = setting()
problem = load(s)
model = problem.model()
start = time.perf_counter()
reference = problem.hmc(model)
exact = reference.predict(problem.x_test)
rows = {"HMC, the reference": {**problem.scores(exact), "seconds": time.perf_counter() - start, **problem.trust(reference)}}
trained = problem.trained(model)
METHODS = {
    "MAP": (dubito.MAP(epochs=200, learning_rate=3e-3), None),
    "ensemble of 10": (dubito.Ensemble(dubito.MAP(epochs=200, learning_rate=3e-3), 10), None),
    "MC dropout": (dubito.MCDropout(epochs=200, learning_rate=3e-3, at="", rate=0.1), None),
    "Laplace, Kronecker": (dubito.Laplace(check=False), trained),
    "Laplace, last layer": (dubito.Laplace(subset="last_layer", check=False), trained),
    "online Laplace": (dubito.OnlineLaplace(epochs=200, learning_rate=3e-3), None),
    "SWAG": (dubito.SWAG(epochs=100, collect_after=0.0), trained),
    "SWAG, 5 modes": (dubito.Ensemble(dubito.SWAG(epochs=200), 5), None),
    "SGLD": (dubito.SGLD(burn_in=200, draws=100), None),
    "SGHMC": (dubito.SGHMC(burn_in=100, draws=100), None),
    "cyclical SGHMC": (dubito.SGHMC(cycles=10, burn_in=20), None),
    "Metropolis": (dubito.Metropolis(draws=s.draws, burn_in=s.burn_in, thin=50), trained),
    "ULA": (dubito.ULA(0.003, draws=s.draws, burn_in=s.burn_in), trained),
    "MALA": (dubito.MALA(draws=s.draws, burn_in=s.burn_in), trained),
    "NUTS": (dubito.NUTS(draws=s.draws // 4, burn_in=s.burn_in, max_depth=7), trained),
    "MCLMC": (dubito.MCLMC(draws=s.draws, burn_in=s.burn_in), None),
    "MAMS": (dubito.MAMS(draws=s.draws // 2, burn_in=s.burn_in, max_steps=200), None),
    "HMC, another seed": (dubito.HMC(draws=s.draws, burn_in=s.burn_in, max_steps=400), None),
}
for label, (method, begin) in METHODS.items():
    start = time.perf_counter()
    model = problem.model(dubito.priors.Normal()) if label == "online Laplace" else problem.model()  # it learns the prior's scale
    size = 50 if method.data == "batches" else 10**6
    posterior = dubito.fit(model, method, problem.train, start=begin, seed=s.seed + 1, batch_size=size, progress=False)
    p = posterior.predict(problem.x_test)
    rows[label] = {**problem.scores(p), **closeness(p, exact), "seconds": time.perf_counter() - start}
    print(label, rows[label], flush=True)
report("closeness", s, rows)
