"""Why are the best Bayesian networks fragile under corrupted inputs, and what mends it? (Izmailov et al. 2021)

Some pixels, and many directions in the space of images, hardly vary in the data. Along these the likelihood says nothing, so that draws
of the posterior keep the prior's full spread there, while training shrinks such weights to zero. An input with noise in these
directions finds all that spread. EmpCov, a prior of the first layer with the covariance of the data, is narrow exactly where the data
say nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from problem import load, report, setting
from torch import Tensor

from dubito.metrics import accuracy, nll

FEW = 16  # directions: a quarter of all
REPEATS = 5  # of every noise


def corrupted(x: Tensor, directions: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """The test images, and what may happen to them; `directions` [64, 64] of the data, the quietest first."""
    generator = torch.Generator().manual_seed(0)
    noises = [torch.randn(x.shape, generator=generator).to(x) for _ in range(REPEATS)]
    image = x.unflatten(1, (8, 8))
    quiet, loud = directions[:, :FEW], directions[:, -FEW:]
    edges = image.clone()
    edges[:, :, [0, 7]] = 1.0  # as from a bad scan; in the data these two columns are almost always empty
    yield "clean", [x]
    for scale in (0.1, 0.3, 0.6):
        yield f"noise {scale:g}", [x + scale * noise for noise in noises]
    yield "quiet noise 0.6", [x + 0.6 * noise @ quiet @ quiet.mT for noise in noises]
    yield "quiet noise 2", [x + 2 * noise @ quiet @ quiet.mT for noise in noises]
    yield "loud noise 0.6", [x + 0.6 * noise @ loud @ loud.mT for noise in noises]
    yield "bright edges", [edges.flatten(1)]
    yield "blur", [torch.nn.functional.avg_pool2d(image.unsqueeze(1), 3, 1, 1).flatten(1)]
    yield "contrast", [0.4 * x]
    yield "shift", [image.roll(1, 2).flatten(1)]


s = setting()
problem = load(s)
covariance = torch.cov(problem.x.mT.double())
values, directions = torch.linalg.eigh(covariance)  # from the quietest direction to the loudest
values = values.clamp_min(0)
# EmpCov: rows of the first layer ~ N(0, C), C = strength covariance + floor I. That is a network of inputs C^(1/2) x under the
# plain prior, in which HMC has an easier walk, and its rows times C^(1/2) are those of the network of x. The strength is such that
# hidden units vary over the data as much as under the plain prior, tr(C covariance) = tr(covariance), and is not chosen by a test.
strength, floor = float(values.sum() / values.square().sum()), 1e-4
root = ((directions * (strength * values + floor).sqrt()) @ directions.mT).to(problem.x)
turned = replace(problem, x=problem.x @ root, x_test=problem.x_test @ root)
plain = torch.eye(len(root)).to(root)
posteriors = {
    "HMC": (problem.hmc(problem.model()), plain),
    "HMC, EmpCov prior": (turned.hmc(turned.model()), root),
    "ensemble of 10": (problem.trained(problem.model(), 10), plain),
    "one network (MAP)": (problem.trained(problem.model()), plain),
    "one network, EmpCov prior": (turned.trained(turned.model()), root),
}
rows: dict[str, dict[str, float]] = {}
scores: dict[str, dict[str, float]] = {}
sizes: dict[str, list[float]] = {}
for label, (posterior, inner) in posteriors.items():
    rows[label], scores[label] = {}, {}
    for kind, copies in corrupted(problem.x_test, directions.to(problem.x)):
        found = [posterior.predict(x @ inner) for x in copies]
        rows[label][kind] = sum(float(accuracy(p, problem.y_test)) for p in found) / len(found)
        scores[label][kind] = sum(float(nll(p, problem.y_test)) for p in found) / len(found)
    # the explanation, measured: root mean square of the first layer's weights along the principal directions of the data
    weights = posterior.sample(s.chains * s.draws)["0.weight"] @ inner
    along = (weights.double() @ directions).square().mean((0, 1))
    sizes[label] = along.sqrt().tolist()
    rows[label]["quiet weights"], rows[label]["loud weights"] = (
        float(part.mean().sqrt()) for part in (along[:FEW], along[-FEW:])
    )
    if label.startswith("HMC"):
        rows[label] |= (problem if inner is plain else turned).trust(posterior)
more = {"nll": scores, "variance_of_the_data": values.tolist(), "size_of_the_weights": sizes}
report("corruption", s, rows, strength=strength, floor=floor, few=FEW, **more)
