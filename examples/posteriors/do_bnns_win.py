"""Do Bayesian neural networks beat plain training and deep ensembles? On this problem, judged on test images."""

from problem import closeness, load, report, setting

from dubito.posteriors.predictive import Predictive

s = setting()
problem = load(s)
model = problem.model()
reference = problem.hmc(model)
exact = reference.predict(problem.x_test)


def against(p: Predictive) -> dict[str, float]:
    """Image by image against HMC: the difference of the mean scores, and its standard error."""
    y = problem.y_test
    right = [(one.mean.argmax(-1) == y).float() for one in (p, exact)]
    more, worse = right[0] - right[1], exact.log_prob(y) - p.log_prob(y)
    found = {"accuracy - HMC's": more, "nll - HMC's": worse}
    return {
        key: value
        for name, each in found.items()
        for key, value in ((name, float(each.mean())), (f"+- {name}", float(each.std() / len(each) ** 0.5)))
    }


rows = {"HMC": {**problem.scores(exact), **problem.trust(reference)}}
for label, size in (("one network (MAP)", 1), ("ensemble of 10", 10)):
    p = problem.trained(model, size).predict(problem.x_test)
    rows[label] = {**problem.scores(p), **closeness(p, exact), **against(p)}
single = reference.predict(problem.x_test, draws=1)
rows["a single draw of HMC"] = {**problem.scores(single), **closeness(single, exact), **against(single)}
report("do_bnns_win", s, rows)
