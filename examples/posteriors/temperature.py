"""The effect of temperature, (p(D | w) p(w))^(1/T), with and without data augmentation.

Augmented data are the images and their four shifts by a pixel; each example then counts as much as before, shared by its five copies
(`n_data` is the number of originals), which is no likelihood of any model: that, and not the prior, is why colder can look better.
"""

import torch
from problem import load, report, setting

s = setting()
problem = load(s)
model = problem.model()


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The images and their shifts by one pixel, [5 N, 64]."""
    image = x.unflatten(1, (8, 8))
    moves = [(0, 0), (1, 1), (1, 2), (-1, 1), (-1, 2)]
    return torch.cat([image.roll(by, axis).flatten(1) if by else x for by, axis in moves])


rows = {}
for augmented in (False, True):
    data = (shifted(problem.x), problem.y.repeat(5)) if augmented else problem.train
    for temperature in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
        posterior = problem.hmc(model, data, temperature=temperature, n_data=len(problem.x))
        found = {**problem.scores(posterior.predict(problem.x_test)), **problem.trust(posterior)}
        rows[f"T = {temperature:g}{', augmented' if augmented else ''}"] = found
report("temperature", s, rows)
