"""Tables: `dubito.fit_table` as it is, beside what people use instead, each at its defaults: once as it is, and once with our help.

With our help (`, helped`) a method is fitted five times, each time without another fifth of the rows, by which it stops early if it
can; the out-of-fold predictions of all rows calibrate the mixture of the five fits by the same maps as ours.

The sets are the nine of UCI (standard splits) and the classification sets that come with scikit-learn (random splits, a fifth to
test); a path of an .npz file with "x", "y" and "classes" (0 for a regression) is a set too (table_sets.py makes some). Every fit is a
case of its own: `--sets`, `--methods`, `--maps` and `--splits` choose some, `--workers` run side by side, and what the result file has
already is kept and not run again, so the benchmark can be run in parts.

    DUBITO_DATA=... OMP_NUM_THREADS=1 BENCH_CLOCK=cpu python benchmarks/tables.py --sets yacht wine --splits 2 --methods ours hist_gb gp

NGBoost, CatBoost, quantile-forest and pytabkit (RealMLP, TabM) are in requirements-tables.txt; a method whose package is absent is left
out aloud. TabPFN and TabICL need weights that are downloaded, and are not compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn.datasets
import torch
from measure import CLOCK, RESULTS, commit, machine, mean_and_error, show, write
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor, kernels
from torch import Tensor, nn

import dubito
from dubito.apps.tables.calibration import Scales, mixture, temperature
from dubito.apps.tables.training import deal
from dubito.data import uci
from dubito.evaluation.data.uci import FOLDERS
from dubito.evaluation.judge import score
from dubito.posteriors.predictive import LatentMixture, Predictive

Array = np.ndarray
Predict = Callable[[Array], LatentMixture]  # standardized inputs to the predictive of standardized targets, or of classes
OURS = ("map", "map, helped", "ensemble", "ensemble, helped")  # plain networks of this package
CLASSIFICATION = ("breast_cancer", "digits", "iris", "wine_cultivars")
FOLDS, SHARE, GP_ROWS = 5, 0.2, 2000
DEAR = {"gp": 50, "ours": 10, "tabm": 10, "realmlp": 7, "ensemble": 4, "ngboost": 3, "map": 2}  # seconds a row, beside the others
PACKAGES = {
    "quantile_forest": "quantile_forest",
    "ngboost": "ngboost",
    "catboost": "catboost",
    "realmlp": "pytabkit",
    "tabm": "pytabkit",
}


class Problem(NamedTuple):
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int  # 0 for a regression


class Held(NamedTuple):
    """Rows by which a method may stop early."""

    x: Array
    y: Array


def load(name: str, split: int) -> Problem:
    if name in FOLDERS:
        x, y, x_test, y_test = (part.double().numpy() for part in uci(name, split))
        return Problem(x, y[:, 0], x_test, y_test[:, 0], 0)
    if name in CLASSIFICATION:
        x, y = getattr(sklearn.datasets, f"load_{name.partition('_cultivars')[0]}")(return_X_y=True)
        classes = int(y.max()) + 1
    else:
        with np.load(name) as file:
            x, y, classes = file["x"], file["y"], int(file["classes"])
    order = np.random.default_rng(split).permutation(len(y))
    test, train = np.split(order, [round(SHARE * len(y))])
    return Problem(x[train], y[train], x[test], y[test], classes)


# The methods: each is fitted to standardized inputs and targets


def numbers(mean: Array, variance: Array | float) -> LatentMixture:
    """Gaussians as a predictive."""
    means = torch.as_tensor(np.asarray(mean), dtype=torch.float64).reshape(-1, 1)
    logs = (
        torch.as_tensor(np.broadcast_to(np.maximum(variance, 1e-10), mean.shape).copy(), dtype=torch.float64).log().reshape(-1, 1)
    )
    return LatentMixture(dubito.HeteroscedasticGaussian(), torch.cat([means, logs], -1).unsqueeze(0))


def probabilities(values: Array) -> LatentMixture:
    logs = torch.as_tensor(np.clip(values, 1e-7, 1)).double().log()
    return LatentMixture(dubito.Categorical(), logs.log_softmax(-1).unsqueeze(0))


def with_residuals(predict: Callable[[Array], Array], x: Array, y: Array, held: Held | None) -> Predict:
    """A method that predicts the mean alone, with the variance of its errors: on held-out rows if there are some."""
    rows = held or Held(x, y)
    variance = float(np.mean((predict(rows.x) - rows.y) ** 2))
    return lambda new: numbers(predict(new), variance)


def hist_gb(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict:
    if classes:
        model = HistGradientBoostingClassifier(random_state=seed).fit(x, y)
        return lambda new: probabilities(model.predict_proba(new))
    return with_residuals(HistGradientBoostingRegressor(random_state=seed).fit(x, y).predict, x, y, held)


def gp(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict | None:
    if classes:
        return None
    rows = np.random.default_rng(seed).permutation(len(y))[:GP_ROWS]
    kernel = kernels.ConstantKernel() * kernels.RBF(np.ones(x.shape[1])) + kernels.WhiteKernel()
    model = GaussianProcessRegressor(kernel, random_state=seed).fit(x[rows], y[rows])

    def predict(new: Array) -> LatentMixture:
        mean, deviation = model.predict(new, return_std=True)
        return numbers(mean, deviation**2)

    return predict


def quantile_forest(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict | None:
    if classes:
        return None
    from quantile_forest import RandomForestQuantileRegressor

    model = RandomForestQuantileRegressor(random_state=seed).fit(x, y)
    levels = [(k + 0.5) / 50 for k in range(50)]

    def predict(new: Array) -> LatentMixture:
        """Fifty quantiles, each a Gaussian of the width that Silverman's rule gives."""
        found = torch.as_tensor(np.asarray(model.predict(new, quantiles=levels))).double().T.unsqueeze(-1)  # [50, B, 1]
        width = (0.9 * found.std(0) * 50**-0.2).clamp_min(0.01)
        return LatentMixture(dubito.HeteroscedasticGaussian(), torch.cat([found, (2 * width.log()).expand_as(found)], -1))

    return predict


def ngboost(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict:
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import k_categorical

    early = {} if held is None else {"X_val": held.x, "Y_val": held.y, "early_stopping_rounds": 50}
    if classes:
        model = NGBClassifier(Dist=k_categorical(classes), verbose=False, random_state=seed).fit(x, y, **early)
        return lambda new: probabilities(model.predict_proba(new))
    model = NGBRegressor(verbose=False, random_state=seed).fit(x, y, **early)

    def predict(new: Array) -> LatentMixture:
        found = model.pred_dist(new)
        return numbers(found.params["loc"], found.params["scale"] ** 2)

    return predict


def catboost(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict:
    from catboost import CatBoostClassifier, CatBoostRegressor

    options: dict[str, Any] = {"verbose": False, "random_seed": seed, "allow_writing_files": False, "thread_count": 1}
    early = {} if held is None else {"eval_set": (held.x, held.y), "early_stopping_rounds": 50}
    if classes:
        model = CatBoostClassifier(**options).fit(x, y, **early)
        return lambda new: probabilities(model.predict_proba(new))
    model = CatBoostRegressor(loss_function="RMSEWithUncertainty", **options).fit(x, y, **early)

    def predict(new: Array) -> LatentMixture:
        found = model.predict(new)
        return numbers(found[:, 0], found[:, 1])

    return predict


def pytabkit(name: str) -> Callable[..., Predict]:
    def fit(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict:
        import pytabkit

        kind = getattr(pytabkit, f"{name}_{'Classifier' if classes else 'Regressor'}")
        device = "cuda" if name.startswith("TabM") and torch.cuda.is_available() else "cpu"  # RealMLP is as fast on one core
        model = kind(device=device, random_state=seed, verbosity=0, n_threads=1)
        if held is None:
            model.fit(x, y)
        else:
            model.fit(x, y, held.x, held.y)
        if classes:
            return lambda new: probabilities(model.predict_proba(new))
        return with_residuals(lambda new: np.asarray(model.predict(new)).reshape(-1), x, y, held)

    return fit


def network(method: Callable[[], Any]) -> Callable[..., Predict]:
    """A multilayer perceptron with predicted noise, by a method of ours at its defaults."""

    def fit(x: Array, y: Array, classes: int, held: Held | None, seed: int) -> Predict:
        torch.manual_seed(seed)
        layers = nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes or 2)
        model = dubito.Model(nn.Sequential(*layers), dubito.Categorical() if classes else dubito.HeteroscedasticGaussian())
        made, targets = torch.from_numpy(x).float(), torch.from_numpy(y)
        data = made, targets if classes else targets.float().unsqueeze(1)
        early = {}
        if held is not None and not isinstance(method(), dubito.Ensemble):
            inner, outer = torch.from_numpy(held.x).float(), torch.from_numpy(held.y)
            early = {"validation": (inner, outer if classes else outer.float().unsqueeze(1)), "patience": 20}
        posterior = dubito.fit(model, method(), data, seed=seed, progress=False, **early)

        def predict(new: Array) -> LatentMixture:
            p = posterior.predict(torch.from_numpy(new).float())
            if classes:
                return probabilities(p.mean.numpy())
            assert isinstance(p, LatentMixture)
            return LatentMixture(dubito.HeteroscedasticGaussian(), p.means.double(), None, p.weights)

        return predict

    return fit


METHODS: dict[str, Callable[..., Predict | None]] = {
    "map": network(dubito.MAP),
    "ensemble": network(lambda: dubito.Ensemble(5)),
    "hist_gb": hist_gb,
    "gp": gp,
    "quantile_forest": quantile_forest,
    "ngboost": ngboost,
    "catboost": catboost,
    "realmlp": pytabkit("RealMLP_TD"),
    "tabm": pytabkit("TabM_D"),
}


def helped(fit: Callable[..., Predict | None], x: Array, y: Array, classes: int, seed: int) -> Predict | None:
    """Five fits, each without another fifth, and the map that their out-of-fold predictions give."""
    targets = torch.from_numpy(y) if classes else torch.from_numpy(y).unsqueeze(1)
    fold = deal(targets, FOLDS, torch.Generator().manual_seed(seed)).numpy()
    fits = []
    for k in range(FOLDS):
        out = fold == k
        made = fit(x[~out], y[~out], classes, Held(x[out], y[out]), seed + k)
        if made is None:
            return None
        fits.append(made)
    parts, order = [fits[k](x[fold == k]) for k in range(FOLDS)], np.argsort(fold, kind="stable")
    known = targets[torch.from_numpy(order)]
    means = torch.cat([p.means for p in parts], 1)
    pooled = LatentMixture(parts[0].likelihood, means, weights=parts[0].weights)
    fix = temperature(pooled, known) if classes else Scales.fit(pooled, known)

    def predict(new: Array) -> Any:
        found = [one(new) for one in fits]
        if classes:
            return fix(probabilities(torch.stack([p.mean for p in found]).mean(0).numpy()))
        return fix(mixture(found, [1 / FOLDS] * FOLDS))

    return predict


def ours(problem: Problem, seed: int) -> Predictive:
    return dubito.fit_table(problem.x_train, problem.y_train, seed=seed, kind=kind(problem), show=False).predict(problem.x_test)


def kind(problem: Problem) -> Any:
    return "classification" if problem.classes else "regression"


def case(name: str, split: int, method: str, help_it: bool) -> dict[str, float] | None:
    """The scores of one fit, in standardized units, and its seconds."""
    problem, started = load(name, split), CLOCK()
    shift, scale = (0.0, 1.0) if problem.classes else (problem.y_train.mean(), problem.y_train.std())
    if method == "ours":
        p = ours(problem, split)
        p = p if problem.classes else p.rescaled(-shift / scale, 1 / scale)
    else:
        low, high = problem.x_train.mean(0), problem.x_train.std(0)
        x, x_test = ((part - low) / np.where(high > 0, high, 1) for part in (problem.x_train, problem.x_test))
        y = problem.y_train if problem.classes else (problem.y_train - shift) / scale
        fit = METHODS[method]
        made = helped(fit, x, y, problem.classes, split) if help_it else fit(x, y, problem.classes, None, split)
        if made is None:
            return None
        p = made(x_test)
    seconds = CLOCK() - started
    y_test = (
        torch.from_numpy(problem.y_test) if problem.classes else torch.from_numpy((problem.y_test - shift) / scale).unsqueeze(1)
    )
    names = ["nll", "accuracy", "brier", "ece"] if problem.classes else ["nll", "crps", "rmse", "coverage"]
    found = score(p, y_test, names)
    if problem.classes:
        found["ece_debiased"], found["ece_band"] = debiased(p.mean, y_test), band(p.mean)
    return {**found, "rows": float(len(problem.y_train)), "test_rows": float(len(problem.y_test)), "seconds": seconds}


def debiased(probabilities: Tensor, y: Tensor, bins: int = 15) -> float:
    """The root of the squared calibration error of the most probable class, less what chance makes of it (Kumar et al. 2019)."""
    confidence, guess = probabilities.max(-1)
    right, total = (guess == y).double(), 0.0
    for part in confidence.argsort().tensor_split(bins):
        if len(part) > 1:
            share = right[part].mean()
            noise = share * (1 - share) / (len(part) - 1)
            total += len(part) / len(y) * float((share - confidence[part].double().mean()) ** 2 - noise)
    return math.copysign(abs(total) ** 0.5, total)


def band(probabilities: Tensor, draws: int = 200) -> float:
    """What 95 % of the debiased errors are below if the probabilities are right: of labels that are drawn from them."""
    source = torch.Generator().manual_seed(0)
    labels = torch.multinomial(probabilities.double(), draws, replacement=True, generator=source)  # [N, draws]
    return float(torch.tensor([debiased(probabilities, y) for y in labels.T]).quantile(0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=[*FOLDERS, *CLASSIFICATION], help="names, or paths of .npz files")
    parser.add_argument("--methods", nargs="+", default=["ours", *METHODS], choices=["ours", *METHODS])
    parser.add_argument("--maps", nargs="+", default=["plain", "helped"], choices=["plain", "helped"], help="of the peers")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes; the cheapest cases come first")
    parser.add_argument("--add", nargs="*", default=[], help="result files of other machines, whose cases are added")
    parser.add_argument("--again", action="store_true", help="run also what the result file has already")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    started, path = time.perf_counter(), RESULTS / "tables.json"
    cases: dict[str, Any] = {}
    made: dict[str, str] = {}
    for file in [*map(Path, args.add), *([path] if path.exists() else [])]:
        figures = json.loads(file.read_text())["figures"]
        cases |= figures["cases"]
        made |= figures["made by"]
    for method in list(args.methods):
        if method in PACKAGES and importlib.util.find_spec(PACKAGES[method]) is None:
            print(f"{method} is left out: {PACKAGES[method]} is not installed")
            args.methods.remove(method)
    keys = [
        (name, split, method, map_ == "helped")
        for split in range(args.splits)
        for name in args.sets
        for method in args.methods
        for map_ in (["plain"] if method == "ours" else args.maps)
    ]
    keys = [key for key in keys if args.again or title(*key) not in cases]
    for key, found in results(keys, args.workers):
        if found is not None:
            cases[title(*key)] = found
            made[title(*key)] = maker()
            print(title(*key), {metric: round(value, 4) for metric, value in found.items()}, flush=True)
            save(cases, made, started)
    if args.add:
        save(cases, made, started)
    table(cases)


Key = tuple[str, int, str, bool]  # set, split, method, helped


def title(name: str, split: int, method: str, help_it: bool) -> str:
    return f"{Path(name).stem}/{split}/{method}{', helped' if help_it else ''}"


def attempt(key: Key) -> dict[str, float] | None:
    warnings.simplefilter("ignore")
    try:
        return case(*key)
    except Exception as error:  # of a peer: told, and tried again by the next call
        print(f"{title(*key)}: {type(error).__name__}: {error}", flush=True)
        return None


def results(keys: list[Key], workers: int) -> Iterator[tuple[Key, dict[str, float] | None]]:
    """Every case and its scores, in any order."""
    if workers == 1:
        yield from ((key, attempt(key)) for key in keys)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(attempt, key): key for key in sorted(keys, key=work)}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def work(key: Key) -> float:
    """A guess of how long a case takes."""
    name, split, method, help_it = key
    return len(load(name, split).y_train) * DEAR.get(method, 1) * (FOLDS if help_it else 1)


def maker() -> str:
    """What makes a case: the runs of a file may be of several days and machines."""
    return f"{date.today()}, commit {commit()}, torch {torch.__version__}, {machine()['cpu']}"


def save(cases: dict[str, Any], made: dict[str, str], started: float) -> None:
    """After every case, so that a run that is cut short goes on where it was."""
    write(
        "tables",
        settings={"folds": FOLDS, "test share": SHARE, "gp rows": GP_ROWS},
        figures={
            "cases": cases,
            "made by": made,
            "means": means(cases),
            "share of sets where no other is better by a standard error": shares(cases),
        },
        headline=headline(cases),
        seconds=time.perf_counter() - started,
    )


def splits_of(cases: dict[str, Any]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """By set, method and split."""
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for key, values in cases.items():
        name, split, method = key.split("/", 2)
        found.setdefault(name, {}).setdefault(method, {})[split] = values
    return found


def means(cases: dict[str, Any]) -> dict[str, Any]:
    """Mean and standard error over the splits."""
    return {
        name: {
            method: {key: mean_and_error([v[key] for v in splits.values()]) for key in next(iter(splits.values()))}
            for method, splits in methods.items()
        }
        for name, methods in splits_of(cases).items()
    }


def shares(cases: dict[str, Any], metrics: Sequence[str] = ("nll", "crps"), without: Sequence[str] = ()) -> dict[str, Any]:
    """On which share of the sets no other method is better by more than one standard error, over the splits that both have."""
    found: dict[str, dict[str, list[bool]]] = {}
    for methods in splits_of({key: case for key, case in cases.items() if key.split("/", 2)[2] not in without}).values():
        for metric in metrics:
            known = {name: splits for name, splits in methods.items() if metric in next(iter(splits.values()))}
            for method, own in known.items():
                lost = [behind(own, other, metric) for name, other in known.items() if name != method]
                found.setdefault(method, {}).setdefault(metric, []).append(not any(lost))
    return {method: {metric: sum(near) / len(near) for metric, near in each.items()} for method, each in found.items()}


def behind(own: dict[str, Any], other: dict[str, Any], metric: str) -> bool:
    """Whether a method is worse than another by more than the standard error of their paired difference; of one split: at all."""
    differences = [own[split][metric] - other[split][metric] for split in own.keys() & other.keys()]
    if not differences:
        return False
    mean, error = mean_and_error(differences)
    return mean > (0.0 if math.isnan(error) else error)


def headline(cases: dict[str, Any]) -> dict[str, list[str]]:
    """How `fit_table` does, beside its goals."""
    sets = {name: methods for name, methods in splits_of(cases).items() if "ours" in methods}
    if not sets:
        return {}
    splits = [len(methods["ours"]) for methods in sets.values()]
    found = {
        "sets that are done, fewest and most splits of a set": [
            f"{len(sets)}, {min(splits)}, {max(splits)}",
            "24, 5, 5",
        ]
    }
    for metric, near in shares(cases, without=OURS)["ours"].items():
        found[f"{metric}: sets on which no method of another package is better by a standard error"] = [f"{near:.0%}", ">= 80 %"]
    for metric, near in shares(cases)["ours"].items():
        found[f"{metric}: the same, with plain networks of this package beside them"] = [f"{near:.0%}", "none"]
    for peer in ("realmlp, helped", "tabm, helped", "catboost, helped"):
        pairs = [(methods["ours"], methods[peer]) for methods in sets.values() if peer in methods]
        ratios = [ratio(own, other, itemgetter("crps")) for own, other in pairs if "crps" in next(iter(own.values()))]
        logs = [math.log(r) for r in ratios if r is not None]
        if logs:
            found[f"crps over that of {peer}, geometric mean of {len(logs)} sets"] = [
                f"{math.exp(sum(logs) / len(logs)):.3f}",
                "<= 1.02",
            ]
    off = [name for name, methods in sets.items() if not covers(methods["ours"])]
    found["sets on which 90 % intervals cover neither 87 to 93 % nor 90 % up to two binomial standard errors"] = [
        listed(off),
        "none",
    ]
    above = [
        name for name, methods in sets.items() if average(methods["ours"], "ece_debiased") > average(methods["ours"], "ece_band")
    ]
    found["sets on which the debiased calibration error is outside its band"] = [listed(above), "none"]
    errors = {name: ratio(methods["ours"], methods.get("hist_gb", {}), error) for name, methods in sets.items()}
    worse = [f"{name} ({value:.2f})" for name, value in errors.items() if value is not None and value > 1.05]
    found["sets on which the error is more than 5 % above that of plain HistGradientBoosting"] = [listed(worse), "none"]
    return found


def listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def average(splits: dict[str, dict[str, float]], metric: str) -> float:
    """The mean over splits, nan where there is no such score."""
    return float(np.mean([values.get(metric, math.nan) for values in splits.values()]))


def covers(splits: dict[str, dict[str, float]]) -> bool:
    rows = sum(values["test_rows"] for values in splits.values())
    off = abs(average(splits, "coverage") - 0.9)
    return not off > max(0.03, 2 * math.sqrt(0.9 * 0.1 / rows))  # classes have no intervals


def ratio(own: dict[str, Any], other: dict[str, Any], score: Callable[[dict[str, float]], float]) -> float | None:
    """Of the means of two methods over the splits that both have; None where there are none."""
    both = own.keys() & other.keys()
    below = sum(score(other[split]) for split in both)
    return sum(score(own[split]) for split in both) / below if below else None


def error(values: dict[str, float]) -> float:
    """The root mean squared error, or the share of wrong classes."""
    return values["rmse"] if "rmse" in values else 1 - values["accuracy"]


def table(cases: dict[str, Any]) -> None:
    for name, methods in means(cases).items():
        metrics = (
            ["nll", "accuracy", "ece_debiased", "seconds"]
            if "accuracy" in next(iter(methods.values()))
            else ["nll", "crps", "rmse", "coverage", "seconds"]
        )
        rows = [[method, *(values[metric][0] for metric in metrics)] for method, values in methods.items()]
        show(name, ["method", *metrics], rows)


if __name__ == "__main__":
    main()
