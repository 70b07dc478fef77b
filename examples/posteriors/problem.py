"""What the examples of this folder share: one small problem on real data, on which HMC can be run to the end.

Handwritten digits of 8 x 8 pixels (bundled with scikit-learn), a network with one hidden layer, and HMC with several chains. Every
example prints a table, and writes it with its settings to `results/`.

    python examples/posteriors/temperature.py                     # on the CPU, some minutes
    python examples/posteriors/temperature.py --device cuda       # faster, and with more chains if wished: --chains 16
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito.data import digits
from dubito.diagnostics import agreement, ess_bulk, rhat, total_variation
from dubito.metrics import accuracy, ece, nll
from dubito.posteriors import Posterior, Samples
from dubito.posteriors.predictive import Predictive

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    device: str = "cpu"
    train: int = 400  # images
    hidden: int = 24
    scale: float = 1.0  # of the prior
    chains: int = 4
    draws: int = 150
    burn_in: int = 100
    seed: int = 0


def setting() -> Setting:
    """From the command line."""
    parser = argparse.ArgumentParser()
    for name, value in asdict(Setting()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return Setting(**vars(parser.parse_args()))


@dataclass(frozen=True)
class Problem:
    setting: Setting
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def model(self, prior: dubito.priors.Prior | None = None) -> dubito.Model:
        with torch.random.fork_rng():
            torch.manual_seed(self.setting.seed)
            net = nn.Sequential(nn.Linear(64, self.setting.hidden), nn.ReLU(), nn.Linear(self.setting.hidden, 10))
        return dubito.Model(net.to(self.setting.device), dubito.Categorical(), prior or dubito.priors.Normal(self.setting.scale))

    def hmc(self, model: dubito.Model, data: tuple[Tensor, Tensor] | None = None, **options: Any) -> Samples:
        """The reference: exact but for the number of its draws, which the diagnostics judge."""
        s = self.setting
        method = dubito.HMC(chains=s.chains, draws=s.draws, burn_in=s.burn_in, max_steps=400)
        found = dubito.fit(model, method, data or self.train, seed=s.seed, batch_size=10**6, progress=False, **options)
        assert isinstance(found, Samples)
        return found

    def trained(self, model: dubito.Model, size: int = 1, **options: Any) -> Posterior:
        """MAP by Adam, or an ensemble of such."""
        method: Any = dubito.MAP(epochs=200, learning_rate=3e-3)
        method = dubito.Ensemble(method, size) if size > 1 else method
        return dubito.fit(model, method, self.train, seed=self.setting.seed, batch_size=50, progress=False, **options)

    def scores(self, p: Predictive) -> dict[str, float]:
        y = self.y_test
        found = {"accuracy": float(accuracy(p, y)), "nll": float(nll(p, y)), "ece": float(ece(p, y))}
        return {**found, "confidence": float(p.mean.amax(-1).mean())}  # below the accuracy: it knows more than it says

    def trust(self, posterior: Samples) -> dict[str, float]:
        """R-hat and effective draws of the predicted probabilities, at their worst and in the middle."""
        probs = posterior.predict(self.x_test[:100]).means.softmax(-1)  # [S, B, C]
        chains = probs.unflatten(0, (posterior.chains, -1))
        found = rhat(chains).flatten()
        found, size = found[found.isfinite()], ess_bulk(chains).flatten()
        return {
            "rhat_99": float(found.quantile(0.99)),
            "ess_median": float(size[size.isfinite()].median()),
            **{name: float(posterior.trace[name].mean()) for name in ("acceptance",) if name in posterior.trace},
        }


def load(s: Setting) -> Problem:
    split = digits(seed=s.seed)
    images = [part.flatten(1).to(s.device) for part in (split.x_train[: s.train], split.x_test)]
    labels = [part.to(s.device) for part in (split.y_train[: s.train], split.y_test)]
    return Problem(s, images[0], labels[0], images[1], labels[1])


def closeness(p: Predictive, reference: Predictive) -> dict[str, float]:
    return {"agreement": float(agreement(p, reference)), "total_variation": float(total_variation(p, reference))}


def commit() -> str:
    """The commit of the code that runs, with `-dirty` where tracked files were changed, or "unknown" outside a git repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def report(name: str, s: Setting, rows: dict[str, dict[str, float]], **more: Any) -> None:
    """Print a table, and write it with the settings and versions that made it."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    widths = [max(len(name) for name in ["", *rows]) + 2] + [max(len(key), 7) + 2 for key in columns]
    print("".join(text.ljust(width) for text, width in zip(["", *columns], widths, strict=True)))
    for label, row in rows.items():
        cells = [f"{row[key]:.4g}" if key in row else "" for key in columns]
        print("".join(text.ljust(width) for text, width in zip([label, *cells], widths, strict=True)))
    where = HERE / "results"
    where.mkdir(exist_ok=True)
    versions = {"dubito": dubito.__version__, "torch": torch.__version__, "python": platform.python_version()}
    made = {"date": date.today().isoformat(), "commit": commit(), "versions": versions}
    content = {**made, "setting": asdict(s), "rows": rows, **more}
    (where / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
