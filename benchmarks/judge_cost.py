"""A million predictions with 10 classes and 20 draws judged in one pass over batches, beside torchmetrics doing the same job.

`judge` finds everything it knows: the uncertainty split, calibration errors of three kinds, the parts of the Brier score, and how well
two scores find the errors. The comparison is of what torchmetrics has, too: accuracy, NLL, Brier score, ECE, and AUROC and average
precision of finding errors by the top probability; NLL and Brier are two lines of torch there. Once from draws, which torchmetrics is
given as mean probabilities made with torch's softmax, and once from ready probabilities. The draws are random, a part of them again
and again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from measure import growth, interleaved, ratio, show, write
from torch import Tensor

import dubito
from dubito.evaluation.judge import judge
from dubito.posteriors.predictive import LatentMixture

CLASSES, DRAWS, BATCH, POOL = 10, 20, 10_000, 100_000
SHARED = ["accuracy", "nll", "brier", "ece", "auroc", "aupr_error"]
LIKELIHOOD = dubito.Categorical()


class Pool:
    """Batches of outputs [S, B, C] and classes: `n` examples, of which POOL differ."""

    def __init__(self, n: int, draws: int = DRAWS):
        source = torch.Generator().manual_seed(0)
        size = min(n, POOL)
        self.y = torch.randint(CLASSES, (size,), generator=source)
        common = 1.5 * torch.randn(size, CLASSES, generator=source) + 3 * F.one_hot(self.y, CLASSES)
        self.f = common + torch.randn(draws, size, CLASSES, generator=source)
        self.n = n

    def __len__(self) -> int:
        return self.n // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(len(self)):
            rows = slice(i * BATCH % len(self.y), i * BATCH % len(self.y) + BATCH)
            yield self.f[:, rows], self.y[rows]


def predictive(f: Tensor) -> LatentMixture:
    return LatentMixture(LIKELIHOOD, f)


def peer(pool: Pool) -> dict[str, float]:
    """The shared job with torchmetrics."""
    from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAccuracy, MulticlassCalibrationError

    right = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)
    calibration = MulticlassCalibrationError(CLASSES, n_bins=15, validate_args=False)
    curves = [BinaryAUROC(validate_args=False), BinaryAveragePrecision(validate_args=False)]
    nll = brier = torch.zeros((), dtype=torch.float64)
    for f, y in pool:
        probs = f.softmax(-1).mean(0)
        confidence, top = probs.max(-1)
        right.update(probs, y)
        calibration.update(probs, y)
        for curve in curves:
            curve.update(1 - confidence, (top != y).long())
        nll = nll + F.nll_loss(probs.log(), y, reduction="sum")
        brier = brier + (probs - F.one_hot(y, CLASSES)).square().sum()
    values = [right.compute(), nll / pool.n, brier / pool.n, calibration.compute(), *(curve.compute() for curve in curves)]
    return dict(zip(SHARED, map(float, values), strict=True))


def timings(n: int, repeats: int) -> dict:
    pool, ready = Pool(n), Pool(n, draws=1)
    found, theirs = judge(predictive, pool, metrics=SHARED), peer(pool)
    apart = max(abs(found[name] - theirs[name]) for name in SHARED)
    if apart > 1e-4:
        raise SystemExit(f"the two do not agree: {dict(found.values)} and {theirs}")
    cases = {
        "judge, everything": lambda: judge(predictive, pool, scores=["one_minus_max", "mutual_information"]),
        "judge, the shared job": lambda: judge(predictive, pool, metrics=SHARED),
        "torchmetrics, the shared job": lambda: peer(pool),
        "softmax alone": lambda: [f.softmax(-1) for f, _ in pool],
        "judge, from probabilities": lambda: judge(predictive, ready, metrics=SHARED),
        "torchmetrics, from probabilities": lambda: peer(ready),
    }
    seconds = interleaved(cases, repeats)
    figures = {
        name: {
            "seconds": {"fastest": min(s), "median": statistics.median(s)},
            "over torch's softmax": ratio(seconds, name, "softmax alone"),
        }
        for name, s in seconds.items()
    }
    return figures | {"largest difference of a metric": apart}


def peak(n: int) -> None:
    """In a process of its own: how far its resident memory rises while judging, in megabytes."""
    pool = Pool(n)
    judge(predictive, Pool(BATCH))  # code and constants
    print(json.dumps(growth(lambda: judge(predictive, pool))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    if args.peak is not None:
        return peak(args.peak)
    figures = timings(args.n, args.repeats)
    rows = [
        [name, figure["seconds"]["fastest"], figure["seconds"]["median"], figure["over torch's softmax"]["fastest"]]
        for name, figure in figures.items()
        if isinstance(figure, dict)
    ]
    show(f"{args.n:,} predictions, {CLASSES} classes, {DRAWS} draws", ["", "seconds", "median", "over softmax"], rows)
    peaks = {n: json.loads(subprocess.check_output([sys.executable, __file__, "--peak", str(n)])) for n in (args.n // 10, args.n)}
    show("Peak memory over start", ["predictions", "MB"], [[f"{n:,}", f"{value:.0f}"] for n, value in peaks.items()])
    headline = {
        f"{args.n:,} predictions, {name}: seconds": [fastest, "seconds" if name == "judge, everything" else ""]
        for name, fastest, _, _ in rows
    } | {f"judge, everything: rise of memory in MB, {n:,} predictions": [round(value), ""] for n, value in peaks.items()}
    figures["peak megabytes"] = peaks
    settings = {"n": args.n, "repeats": args.repeats, "classes": CLASSES, "draws": DRAWS, "batch": BATCH, "differing": POOL}
    write("judge_cost", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)
    return None


if __name__ == "__main__":
    main()
