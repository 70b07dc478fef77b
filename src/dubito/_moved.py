"""Import paths that are not rooms: short names for what users import often, and the paths of version 0.1.

`import dubito.priors` gives the module `dubito.model.priors` itself, not a copy of it. A path of version 0.1 that is no short name
warns and names the new path; it goes with version 0.3. How to deprecate a name is written in CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

SHORT = {  # these stay
    "augment": "inference.augment",
    "compare": "cli.compare",
    "data": "evaluation.data",
    "diagnostics": "posteriors.diagnostics",
    "families": "posteriors.families",
    "labelling": "web.labelling",
    "likelihoods": "model.likelihoods",
    "measures": "evaluation.measures",
    "methods": "inference.methods",
    "metrics": "evaluation.metrics",
    "priors": "model.priors",
    "recalibrate": "evaluation.recalibrate",
    "shift": "evaluation.shift",
}
MOVED = {  # these warn
    "batches": "inference.batches",
    "chains": "inference.full_batch",
    "commands": "cli.commands",
    "consistency": "inference.semi_supervised",
    "demo": "cli.demo",
    "density": "inference.log_density",
    "descent": "inference.descent",
    "elbo": "inference.elbo",
    "export": "posteriors.export",
    "fit": "inference.fit",
    "integrators": "inference.integrators",
    "io": "posteriors.io",
    "judge": "evaluation.judge",
    "kernels": "inference.kernels",
    "langevin": "inference.sgmcmc",
    "linalg": "tensors.covariances",
    "plan": "inference.plan",
    "predict": "posteriors.predict",
    "predict.streamlined.origin": "posteriors.predict.streamlined.rules.attention",
    "predictive": "posteriors.predictive",
    "prior_predictive": "posteriors.prior_predictive",
    "progress": "inference.progress",
    "randomness": "tensors.randomness",
    "recorded": "network.cuda_graphs",
    "recurrent": "network.recurrent",
    "registry": "inference.registry",
    "reparametrized": "posteriors.families.reparametrized",
    "restart": "network.reinitialize",
    "store": "tensors.store",
    "tree": "tensors.tree",
    "curvature.collect": "curvature.statistics",
    "curvature.gather": "curvature.passes",
    "apps.function": "posteriors.functions",
    "apps.in_turn": "apps.network",
    "apps.reservoir": "evaluation.reservoir",
    "apps.taken": "apps.network",
    "compare.cell": "cli.compare.result",
    "compare.entry": "cli.compare.spec",
    "compare.judging": "cli.compare.scoring",
    "compare.problem": "evaluation.problems",
    "demo.recipes": "inference.presets",
    "labelling.shown": "web.labelling.task",
    "recalibrate.held": "evaluation.recalibrate.forecasts",
}
JOINED = {  # modules that became parts of another one in the same package; these warn too
    "apps.active.acquisitions": ("batchbald", "epig", "joint", "measured", "randomized", "registry"),
    "apps.active.labels": ("record",),
    "apps.active.pool": ("acquisition", "initial", "view"),
    "apps.bandits.agents": ("agent", "neural_linear", "regressions", "thompson"),
    "apps.bandits.problems": ("bandit", "simulate"),
    "apps.compression.coding": ("bits",),
    "apps.compression.compress": ("choosing", "pruning", "report"),
    "apps.compression.cutting": ("writing",),
    "apps.compression.flows": ("units",),
    "apps.compression.rules": ("layers", "moves"),
    "apps.dense.assess": ("confusion", "detector"),
    "apps.dense.maps": ("edges",),
    "apps.exploration.q_learning": ("explore", "replay"),
    "apps.failure.scores": ("ranking", "selective"),
    "apps.influence.gradients": ("ordered",),
    "apps.influence.influence": ("influences", "inspection", "inverse"),
    "apps.ood.detectors": (
        "detection",
        "detector",
        "distances",
        "energy",
        "mahalanobis",
        "max_logit",
        "measured",
        "neighbours",
        "odin",
    ),
    "apps.optimize.optimization": ("improvement", "surrogate"),
    "apps.stability.bound": ("operator", "spectral"),
    "apps.stability.stability": ("local",),
    "evaluation.metrics.calibration": ("scoring",),
    "evaluation.recalibrate.conformal": ("conformal_intervals", "conformal_sets", "rank"),
    "evaluation.recalibrate.predictives": ("classes", "marginals", "numbers"),
    "evaluation.recalibrate.regression": ("quantiles", "variance"),
    "evaluation.recalibrate.scaling": ("affine", "temperature"),
    "evaluation.shift.attack": ("functions",),
    "evaluation.shift.camera": ("blur", "digital", "noise"),
    "evaluation.shift.filters": ("draw",),
    "evaluation.shift.weather": ("droplets",),
    "model.likelihoods.categorical": ("bernoulli",),
    "model.priors.composed": ("by_name", "centered", "centred"),
    "model.priors.correlated": ("conv_correlated", "matrix_normal", "multivariate_normal"),
    "model.priors.factorized": ("bernoulli", "factorised", "laplace", "log_uniform", "scale_mixture", "student_t"),
    "model.priors.gaussian_process": ("nngp",),
    "model.priors.hierarchical": ("ard", "groups", "horseshoe", "jeffreys", "scaled"),
    "posteriors.diagnostics.chains": ("energy", "ess", "quantities", "ranks", "rhat"),
    "posteriors.diagnostics.summary": ("arviz",),
    "posteriors.families.factorized": ("binary", "factorised"),
    "posteriors.families.gaussian": ("cholesky", "low_rank", "matrix_normal", "mean_field"),
    "posteriors.families.grouped": ("flow",),
    "posteriors.predict.streamlined.moments": ("registry",),
    "posteriors.predict.streamlined.prune": ("commute",),
    "posteriors.predict.streamlined.rules.linear": ("head",),
    "posteriors.samples": ("point",),
    "tensors.covariances.covariance": ("blocks",),
    "report.calibration": ("decisions", "quantiles"),
    "report.comparison": ("histogram",),
    "report.content": ("words",),
    "report.diagnosis": ("chains",),
    "report.functions": ("regression",),
    "report.html": ("templates",),
    "web.labelling.server": ("page",),
    "web.labelling.task": ("rendering",),
    "evaluation.data.examples": ("root",),
    "evaluation.data.images": ("cifar10", "cifar10h", "digits", "idx"),
    "evaluation.data.sentences": ("polarity",),
    "evaluation.judge.judgement": ("score",),
    "evaluation.judge.scorers": ("means",),
    "evaluation.judge.stream": ("batches",),
    "evaluation.shift.corruptions": ("rotation",),
    "report.images": ("influence",),
}
MOVED |= {f"{new.rpartition('.')[0]}.{old}": new for new, parts in JOINED.items() for old in parts}


def deprecate(old: str, new: str, *, gone: str = "0.3", stacklevel: int = 3) -> None:
    """Warn that `old` still works, that `new` takes its place, and in which version `old` goes."""
    warnings.warn(f"{old} is deprecated and goes with version {gone}: use {new}", DeprecationWarning, stacklevel=stacklevel)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` for a module in which `names` maps old public names to new ones: the old ones work and warn.

    Write `__getattr__ = renamed(__name__, {"Centred": "Centered"})` at the end of the module.
    """

    def find(name: str) -> object:
        """The value of the new name, with a warning."""
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        deprecate(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find


def renamed_fields(**names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass whose fields were renamed, old=new: old keyword arguments and attributes work and warn.

    >>> @renamed_fields(colour="color")
    ... class Pen:
    ...     def __init__(self, color="red"):
    ...         self.color = color
    >>> with warnings.catch_warnings(record=True):
    ...     warnings.simplefilter("always")
    ...     Pen(colour="blue").color
    'blue'
    """

    def decorate(cls: type[T]) -> type[T]:
        """The class, which now takes the old names too."""
        init: Callable[..., None] = cls.__init__

        @wraps(init)
        def renaming(self: object, *args: object, **options: object) -> None:
            """`__init__` with old keyword arguments passed on under their new names."""
            for old in names.keys() & options.keys():
                deprecate(f"{cls.__name__}({old}=...)", f"{cls.__name__}({names[old]}=...)")
                options[names[old]] = options.pop(old)
            init(self, *args, **options)

        def reading(old: str) -> property:
            """The old attribute: a property that reads the new one."""

            def read(self: object) -> object:
                """The value of the new attribute, with a warning."""
                deprecate(f"{cls.__name__}.{old}", f"{cls.__name__}.{names[old]}")
                return getattr(self, names[old])

            return property(read)

        setattr(cls, "__init__", renaming)  # noqa: B010
        for old in names:
            setattr(cls, old, reading(old))
        return cls

    return decorate


def place(path: str) -> str | None:
    """Where the module `path` (without "dubito.") is now, or None if no prefix of it has moved.

    >>> place("priors.normal"), place("store"), place("curvature")
    ('model.priors.normal', 'tensors.store', None)
    """
    names = path.split(".")
    for end in range(len(names), 0, -1):
        prefix = ".".join(names[:end])
        if new := SHORT.get(prefix) or MOVED.get(prefix):
            return ".".join((new, *names[end:]))
    return None


class Finder(MetaPathFinder, Loader):
    """Finds a module of dubito by a path that is not its own."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec under the old path, if the module has a new one."""
        package, _, rest = fullname.partition(".")
        if package != "dubito" or (new := place(rest)) is None:
            return None
        return ModuleSpec(fullname, self, loader_state=f"dubito.{new}")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its own path. Python is about to overwrite its `__spec__`, which is therefore kept in the spec."""
        module = importlib.import_module(spec.loader_state)
        if spec.name.removeprefix("dubito.").split(".")[0] not in SHORT:
            deprecate(spec.name, spec.loader_state, stacklevel=3)
        for package in (module, sys.modules[spec.name.rpartition(".")[0]]):  # Python binds the old name in the parent
            if hasattr(package, "__path__"):
                package.__class__ = Package
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the module's own spec back; it has been executed before."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class Package(ModuleType):
    """A package in which an import of the module `dubito.judge` does not replace the function of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        lazy = self.__dict__.get("_NAMES", ())
        hides = name in lazy or not isinstance(self.__dict__.get(name, value), ModuleType)
        if not (isinstance(value, ModuleType) and hides):
            super().__setattr__(name, value)


def install(package: ModuleType) -> None:
    """Make the paths above importable."""
    package.__class__ = Package
    sys.meta_path.insert(0, Finder())  # before the finder of files, which would load a second copy of `dubito.priors.normal`
