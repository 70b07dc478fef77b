"""A step of variational training, ours beside that of bayesian-torch, BLiTZ, posteriors and ivon-opt, on the same batches of 128.

Each peer as its documentation has it: bayesian-torch turns the network's layers into its own (reparametrisation and flipout), BLiTZ has
layers of its own, posteriors works on functions, IVON is an optimiser. All draw once a step, with a standard normal prior and, but for
IVON, torch's Adam. What is timed is the step alone: forward, backward, update. Every ratio is to a plain Adam step of the network.

torch-uncertainty is left out: its layers cannot be imported without torchvision, which has no CPU build beside our torch.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import interleaved, ratio, show, write
from networks import lenet, mlp
from torch import Tensor, nn
from torch.func import functional_call

import dubito
from dubito import IVON, Variational
from dubito.inference.method import Start
from dubito.model import Target
from dubito.priors import Normal

N, SIZE = 60_000, 128
Step = Callable[[], object]


def plain(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def ours(network: nn.Module, x: Tensor, y: Tensor, method) -> Step:
    model = dubito.Model(network, dubito.Categorical(), Normal(scale=1.0))
    target, generator = Target(model, N), torch.Generator().manual_seed(0)
    state = method.init(target, Start(model.parameters(), model.buffers()), (x, y), generator, steps=100_000)
    return lambda: method.step(target, state, [(x, y)], generator)


def bayesian_torch(network: nn.Module, x: Tensor, y: Tensor, kind: str) -> Step:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    network = copy.deepcopy(network).train()
    options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0, "type": kind}
    dnn_to_bnn(network, options | {"moped_enable": False, "moped_delta": 0.5})
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(network(x), y) + get_kl_loss(network) / N).backward()
        optimizer.step()

    return step


def blitz(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    from blitz.losses import kl_divergence_from_nn
    from blitz.modules import BayesianConv2d, BayesianLinear

    prior = {"prior_sigma_1": 1.0, "prior_sigma_2": 1.0, "prior_pi": 1.0}
    layers: list[nn.Module] = []
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            layers.append(BayesianLinear(layer.in_features, layer.out_features, **prior))
        elif isinstance(layer, nn.Conv2d):
            size = (layer.kernel_size[0], layer.kernel_size[1])
            layers.append(BayesianConv2d(layer.in_channels, layer.out_channels, size, padding=layer.padding, **prior))
        else:
            layers.append(copy.deepcopy(layer))
    made = nn.Sequential(*layers).train()
    optimizer = torch.optim.Adam(made.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(made(x), y) + kl_divergence_from_nn(made) / N).backward()
        optimizer.step()

    return step


def posteriors_vi(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    import torchopt

    import posteriors

    network = copy.deepcopy(network).train()
    params = {name: leaf.detach().clone() for name, leaf in network.named_parameters()}

    def log_posterior(params, batch):
        out = functional_call(network, params, (batch[0],))
        return -F.cross_entropy(out, batch[1]) + posteriors.diag_normal_log_prob(params) / N, torch.tensor([])

    transform = posteriors.vi.diag.build(log_posterior, torchopt.adam(lr=1e-3), temperature=1 / N, init_log_sds=-3.0)
    held = [transform.init(params)]

    def step() -> None:
        held[0], _ = transform.update(held[0], (x, y))

    return step


def ivon_opt(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    import ivon

    network = copy.deepcopy(network).train()
    optimizer = ivon.IVON(network.parameters(), lr=0.1, ess=N, weight_decay=1 / N)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


CASES: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain Adam": plain,
    "dubito, weights": lambda *given: ours(*given, Variational(estimator="weights")),
    "dubito, local": lambda *given: ours(*given, Variational(estimator="local")),
    "dubito, flipout": lambda *given: ours(*given, Variational(estimator="flipout")),
    "dubito, IVON": lambda *given: ours(*given, IVON()),
    "bayesian-torch, reparametrisation": lambda *given: bayesian_torch(*given, "Reparameterization"),
    "bayesian-torch, flipout": lambda *given: bayesian_torch(*given, "Flipout"),
    "BLiTZ": blitz,
    "posteriors": posteriors_vi,
    "ivon-opt": ivon_opt,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    args, began = parser.parse_args(), time.time()
    warnings.simplefilter("ignore")  # of the peers' own dependencies
    torch.manual_seed(0)
    networks = {
        "784-512-512-10": (mlp(784, 512, 512, 10), torch.rand(SIZE, 784)),
        "LeNet": (lenet(), torch.rand(SIZE, 1, 28, 28)),
    }
    figures, rows, headline = {}, [], {}
    for name, (network, x) in networks.items():
        y, cases = torch.randint(10, (SIZE,)), {}
        for case, make in CASES.items():
            try:
                cases[case] = make(network, x, y)
                cases[case]()
            except ImportError as problem:
                print(f"{case} is left out: {problem}")
                cases.pop(case, None)
        seconds = interleaved(cases, args.repeats)
        found = {case: ratio(seconds, case, "plain Adam") for case in cases}
        figures[name] = {
            "milliseconds": {case: 1e3 * statistics.median(s) for case, s in seconds.items()},
            "ratio to plain Adam": found,
        }
        for case, r in found.items():
            rows.append([name, case, figures[name]["milliseconds"][case], r["fastest"], r["median"]])
            headline[f"{name}, batch {SIZE}: {case}, times a plain step"] = [f"{r['fastest']:.2f} (median {r['median']:.2f})", ""]
    show(f"A step at batch {SIZE}", ["network", "step", "ms", "fastest", "median"], rows)
    settings = {"repeats": args.repeats, "batch": SIZE, "data": "random, in memory", "timed": "single steps, in turn"}
    write("variational_peers", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
