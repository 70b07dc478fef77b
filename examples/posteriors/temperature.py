"""The effect of temperature, (p(D | w) p(w))^(1/T), with and without data augmentation.

Augmented data are the images and their shifts by a pixel to either side; each example then counts as much as before, shared by its
three copies (`n_data` is the number of originals), which is no likelihood of any model: in the study that, and not the prior, is
why colder looks better.

    python examples/posteriors/temperature.py --train 300 --burn-in 150 --draws 200      # as in results/: some ten minutes
"""

import torch
from problem import load, report, setting

s = setting()
problem = load(s)
model = problem.model()
COPIES = 3


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The images and their shifts by one pixel, [3 N, 64]."""
    image = x.unflatten(1, (8, 8))
    return torch.cat([x, image.roll(1, 2).flatten(1), image.roll(-1, 2).flatten(1)])


rows, scores = {}, {}
for augmented in (False, True):
    data = (shifted(problem.x), problem.y.repeat(COPIES)) if augmented else problem.train
    for temperature in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
        posterior = problem.hmc(model, data, temperature=temperature, n_data=len(problem.x))
        p = posterior.predict(problem.x_test)
        label = f"T = {temperature:g}{', augmented' if augmented else ''}"
        rows[label] = {**problem.scores(p), **problem.trust(posterior)}
        scores[augmented, temperature] = label, p.log_prob(problem.y_test)
        print(label, rows[label], flush=True)
# image by image against T = 1, with the standard error of the mean
for (augmented, _), (label, score) in scores.items():
    less = scores[augmented, 1.0][1] - score
    rows[label] |= {"nll - that of T = 1": float(less.mean()), "+-": float(less.std() / len(less) ** 0.5)}
report("temperature", s, rows)
