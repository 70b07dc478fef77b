"""The minimum of a log score over maps that are affine in what is fitted, by Newton steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.recalibrate.forecasts import Held

STEPS, INNER = 200, 500
DENSE = 1000  # numbers to fit, up to which the matrix of second derivatives is formed
TOLERANCE = 1e-13  # of what a Newton step still promises, in nats
ROUNDING = 1e-8  # the same, where rounding lets nobody come closer
LEAST = 1e-12  # damping, in units of the largest curvature


@dataclass(frozen=True)
class Problem:
    """The mean negative log score with logits of class c that change by features x_c, and a fine of half the sum of fines x^2."""

    held: Held
    features: Tensor  # [n, C, k], or [n, 1, k] if all classes have the same
    fines: Tensor  # [C, k]

    def forward(self, x: Tensor) -> Tensor:
        """x [C, k] to changes of the logits, [n, C]."""
        return self.features[:, 0] @ x.mT if self.features.shape[1] == 1 else (self.features * x).sum(-1)

    def backward(self, w: Tensor) -> Tensor:
        """Its transpose, over n."""
        shared = self.features.shape[1] == 1
        return (w.mT @ self.features[:, 0] if shared else torch.einsum("nc,nck->ck", w, self.features)) / len(w)

    def blocks(self, w: Tensor) -> Tensor:
        """Second moments of the features with weights w [n, C], [C, k, k]."""
        return torch.stack([(f.mT * v) @ f for f, v in zip(self._columns(w), w.unbind(1), strict=True)]) / len(w)

    def _columns(self, w: Tensor) -> tuple[Tensor, ...]:
        return self.features.expand(-1, w.shape[1], -1).unbind(1)


def score(held: Held, logits: Tensor) -> Tensor:
    """Mean negative log score of an example."""
    if held.labels:
        return F.binary_cross_entropy_with_logits(logits, held.hits, reduction="none").sum(-1).mean()
    return F.cross_entropy(logits, held.truth)


def minimize(problem: Problem, name: str) -> Tensor:
    """The best x, which must exist."""
    held, fines, hits = problem.held, problem.fines, problem.held.hits
    x, logits, value, damping = torch.zeros_like(fines), held.logits, score(held, held.logits), LEAST
    for _ in range(STEPS):
        probs = torch.sigmoid(logits) if held.labels else logits.softmax(-1)
        gradient = problem.backward(probs - hits) + fines * x
        step = (_direct if fines.numel() <= DENSE else _by_gradients)(problem, probs, gradient, damping)
        promised = -float((gradient * step).sum())
        if promised < TOLERANCE and damping <= 1e-6 and not _endless(problem, logits):
            return x
        change = problem.forward(step)
        size, new = _line_search(problem, x, logits, step, change, float(value), promised)
        if not size and promised < ROUNDING and not _endless(problem, logits):
            return x
        damping = max(LEAST, damping / 100) if size > 0.1 else 100 * damping
        if size:  # else a shorter step, more along the gradient, next time
            x, logits, value = x + size * step, logits + size * change, new
        if damping > 1e3:
            break
    raise ValueError(f"{name} has no minimum: {_why(held)}; give a larger penalty, or more held-out data")


def _line_search(
    problem: Problem, x: Tensor, logits: Tensor, step: Tensor, change: Tensor, value: float, promised: float
) -> tuple[float, Tensor]:
    """The length of a step, halved until the score falls enough, and the score there; 0 if it never does."""
    size, new = 1.0, problem.fines.new_tensor(value)
    while size > 1e-10:
        new = score(problem.held, logits + size * change) + 0.5 * (problem.fines * (x + size * step) ** 2).sum()
        if float(new) <= value - 1e-4 * size * promised + 1e-15:
            return size, new
        size /= 2
    return 0.0, new


def _why(held: Held) -> str:
    share = held.hits.mean(0)
    lacking = ((share == 0) | ((share == 1) & held.labels)).nonzero().flatten().tolist()
    named = ", ".join(map(str, lacking[:10])) + (", ..." if len(lacking) > 10 else "")
    if not lacking:
        return "its classes can be told apart without an error"
    if held.labels:
        return f"of label {named} the held-out data are all the same"
    return f"class {named} is never seen in the held-out data"


def _endless(problem: Problem, logits: Tensor) -> bool:
    """Whether the score only levels off, on its way to infinity: an output that never changes, or no errors left to make."""
    share = problem.held.hits.mean(0)
    constant = bool(((share == 0) | (share == 1)).any())
    return not bool(problem.fines[:, -1].any()) and (constant or float(score(problem.held, logits)) < 1e-6)


def _direct(problem: Problem, probs: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """The Newton step from the matrix of second derivatives, [C k, C k]."""
    classes, k = gradient.shape
    blocks = problem.blocks(probs * (1 - probs) if problem.held.labels else probs)
    hessian = torch.block_diag(*blocks)
    if not problem.held.labels:
        rows = (probs.unsqueeze(-1) * problem.features).reshape(len(probs), classes * k)
        hessian = hessian - rows.mT @ rows / len(rows)
    hessian = hessian + torch.diag(problem.fines.flatten())
    # what is the same for all classes changes no probability: in these directions there is no curvature, and no slope either
    ridge = damping * hessian.diagonal().max().clamp_min(1e-12)
    factor, failed = torch.linalg.cholesky_ex(hessian + ridge * torch.eye(classes * k, dtype=probs.dtype, device=probs.device))
    if bool(failed):
        return _by_gradients(problem, probs, gradient, damping)
    return -torch.cholesky_solve(gradient.reshape(-1, 1), factor).reshape(classes, k)


def _by_gradients(problem: Problem, probs: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """The Newton step by conjugate gradients, for many classes; the features' second moments are the preconditioner."""
    labels, fines = problem.held.labels, problem.fines

    def curved(v: Tensor) -> Tensor:
        """The Hessian times v, damped."""
        u = problem.forward(v)
        w = probs * ((1 - probs) * u if labels else u - (probs * u).sum(-1, keepdim=True))
        return problem.backward(w) + (fines + damping) * v

    weights = probs * (1 - probs)
    shared = problem.features.shape[1] == 1  # one for all classes then: C of them would be too large
    blocks = problem.blocks(weights.mean(-1, keepdim=True) if shared else weights)
    own = fines.mean(0, keepdim=True) if shared else fines
    ridge = 1e-9 * blocks.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp_min(1e-12)
    factor = torch.linalg.cholesky(blocks + torch.diag_embed(own + ridge))

    def solved(r: Tensor) -> Tensor:
        """The preconditioner's inverse times r."""
        return torch.cholesky_solve(r.mT, factor[0]).mT if shared else torch.cholesky_solve(r.unsqueeze(-1), factor).squeeze(-1)

    step, residual = torch.zeros_like(gradient), -gradient
    direction = solved(residual)
    size = start = float((residual * direction).sum())
    for _ in range(INNER):
        bent = curved(direction)
        curvature = float((direction * bent).sum())
        if size <= 1e-8 * start or curvature <= 1e-300:
            break
        step, residual = step + size / curvature * direction, residual - size / curvature * bent
        near = solved(residual)
        size, old = float((residual * near).sum()), size
        direction = near + size / old * direction
    return step
