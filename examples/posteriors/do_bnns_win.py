"""Do Bayesian neural networks beat plain training and deep ensembles? On this problem, judged on test images."""

from problem import closeness, load, report, setting

s = setting()
problem = load(s)
model = problem.model()
reference = problem.hmc(model)
exact = reference.predict(problem.x_test)
rows = {"HMC": {**problem.scores(exact), **problem.trust(reference)}}
for label, size in (("one network (MAP)", 1), ("ensemble of 10", 10)):
    p = problem.trained(model, size).predict(problem.x_test)
    rows[label] = {**problem.scores(p), **closeness(p, exact)}
half = len(reference) // 2
one_chain = reference.predict(problem.x_test, draws=1)
rows["a single draw of HMC"] = problem.scores(one_chain)
report("do_bnns_win", s, rows)
