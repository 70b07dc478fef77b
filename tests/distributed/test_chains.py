"""Samplers on all data over several processes: chains on processes of their own, and data divided between them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import TensorDataset

import dubito
from distributed_ranks import errors, on_ranks
from dubito import HMC, MALA, MAMS, MCLMC, NUTS, ULA, Metropolis, priors
from dubito.inference import log_density
from dubito.inference.log_density import Density
from dubito.inference.method import Start
from dubito.model import Target
from dubito.tensors.processes import Processes, join_processes

pytestmark = pytest.mark.filterwarnings("ignore:The processes have")  # which says that shards are uneven

N = 50
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(N, 2, generator=GENERATOR, dtype=torch.float64)
Y = X[:, :1].sin() + 0.1 * torch.randn(N, 1, generator=GENERATOR, dtype=torch.float64)
CUTS = {2: [0, 7, N], 4: [0, 20, 21, 48, N]}

SHORT = {"chains": 4, "draws": 8, "burn_in": 2, "thin": 1}
SAMPLERS = {
    "hmc": HMC(0.02, path_length=0.1, **SHORT),
    "nuts": NUTS(0.03, max_depth=4, **SHORT),
    "mala": MALA(0.02, **SHORT),
    "ula": ULA(0.02, **SHORT),
    "mclmc": MCLMC(0.02, **SHORT),
    "mams": MAMS(0.02, path_length=0.1, **SHORT),
    "metropolis": Metropolis(0.02, **SHORT),
}


def model(*, learned=False, layer=nn.Tanh):
    """A small network: with Tanh one that is known by hand, with Softplus one that is traced."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), layer(), nn.Linear(5, 1)).double()
    return dubito.Model(net, dubito.Gaussian(scale=None if learned else 1.0))


def own_rows(rank, size):
    """A process's rows, of which there are not as many as others have, in one batch."""
    rows = slice(CUTS[size][rank], CUTS[size][rank + 1])
    return [(X[rows], Y[rows])]


def fit(method, data=(X, Y), **settings):
    return dubito.fit(settings.pop("model", None) or model(), method, data, progress=False, **settings)


def same(one, other, tolerance=0.0, *, notes=("log_likelihood", "log_prior")):
    """Whether two posteriors are the same draws, with what was noted of them."""
    leaves = {**one.params, **{name: one.trace[name] for name in notes}}
    others = {**other.params, **{name: other.trace[name] for name in notes}}
    for name, leaf in leaves.items():
        torch.testing.assert_close(others[name], leaf, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def data_mesh(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("data",))


# ---- data divided between processes


@pytest.mark.parametrize(("size", "layer"), [(2, nn.Tanh), (4, nn.Tanh), (2, nn.Softplus)])
def test_the_first_transitions_on_uneven_shards_are_those_of_one_process(size, layer):
    def work(rank):
        return [fit(method, own_rows(rank, size), model=model(layer=layer)) for method in SAMPLERS.values()]

    results = on_ranks(size, work, seconds=100)
    for number, (name, method) in enumerate(SAMPLERS.items()):
        alone = fit(method, model=model(layer=layer), distributed=False)
        notes = [note for note in alone.trace if note != "gradients"]
        for result in results:
            same(alone, result[number], 1e-7, notes=notes)
            same(results[0][number], result[number], notes=notes)
        assert float(alone.trace.get("accepted", torch.ones(1)).mean()) > 0.05, f"{name} goes somewhere"


def test_a_learned_noise_is_drawn_from_the_residuals_of_all_processes():
    method = HMC(0.01, path_length=0.05, **SHORT)
    noisy = dubito.Model(model().network, dubito.Gaussian(), priors.Hierarchical(priors.InverseGamma(2.0, 1.0)))
    settings = {"model": noisy, "start": noisy.parameters(Y)}

    def work(rank):
        return fit(method, own_rows(rank, 2), **settings)

    alone = fit(method, batch_size=7, distributed=False, **settings)
    assert len(alone.params["likelihood:log_scale"].unique()) > 4
    for result in on_ranks(2, work):
        same(alone, result, 1e-7)


@pytest.mark.parametrize("batch_size", [3, 128])
def test_whole_data_are_divided_also_where_a_batch_is_smaller_than_the_processes_are_many(batch_size):
    def work(rank):
        return fit(SAMPLERS["nuts"], (X[:10], Y[:10]), batch_size=batch_size, distributed=data_mesh(4))

    alone = fit(SAMPLERS["nuts"], (X[:10], Y[:10]), distributed=False)
    for result in on_ranks(4, work):
        same(alone, result, 1e-7)


def test_a_dataset_that_is_read_anew_for_every_gradient(monkeypatch):
    monkeypatch.setitem(log_density.HELD, "cpu", 0)

    def work(rank):
        return fit(SAMPLERS["nuts"], TensorDataset(X, Y), batch_size=9, distributed=data_mesh(2))

    alone = fit(SAMPLERS["nuts"], distributed=False)
    for result in on_ranks(2, work):
        same(alone, result, 1e-7)


def test_a_gradient_is_one_sum_in_float64_with_the_prior_counted_once():
    network = model(layer=nn.Softplus).network.float()
    single = dubito.Model(network, dubito.Gaussian(scale=1.0), priors.StudentT(df=3.0))
    position = torch.randn(3, 21, generator=torch.Generator().manual_seed(1))

    def value(rank):
        with join_processes() as processes:
            target = Target(single, N, temperature=2.0, processes=processes)
            parts = {0: [(X[:30].float(), Y[:30].float())], 1: [(X[30:].float(), Y[30:].float())], 2: []}
            density = Density(target, parts[rank], single.parameters(), single.buffers())
            density.fit_chunks(3)
            before, sent = processes.collectives, processes.bytes
            gradient, likelihood, prior = density(position)
            made = processes.collectives - before, processes.bytes - sent
            density.check_alike()
            return gradient, likelihood, prior, density.values(position)[1], made

    alone = Density(Target(single, N, temperature=2.0), [(X.float(), Y.float())], single.parameters(), single.buffers())(position)
    for gradient, likelihood, prior, again, made in on_ranks(3, value):
        assert made == (1, 8 * (3 * 21 + 3 + 2)), "the gradient, the log likelihood, and the mark of the position"
        torch.testing.assert_close(gradient, alone.gradient, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(likelihood, alone.log_likelihood, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(again, likelihood)
        assert torch.equal(prior, alone.log_prior)


def test_processes_at_different_positions_are_told_so():
    def work(rank):
        with join_processes() as processes:
            one = model()
            density = Density(Target(one, N, processes=processes), own_rows(rank, 2), one.parameters(), one.buffers())
            position = torch.zeros(2, 21, dtype=torch.float64)
            density(position)
            density.check_alike()
            position[1, 3] += 1e-300 * rank
            density(position)
            density.check_alike()

    for words in errors(2, work):
        assert words.startswith("ValueError: the processes were at different positions of the chains")


def test_moments_on_shards_are_those_of_the_posterior():
    """A linear model with Gaussian noise and prior: a Gaussian, of which the mean and the covariance are known."""
    linear = dubito.Model(nn.Linear(2, 1, bias=False).double(), dubito.Gaussian(scale=0.5), priors.Normal(scale=1.0))
    precision = X.T @ X / 0.25 + torch.eye(2, dtype=torch.float64)
    covariance = precision.inverse()
    mean = covariance @ X.T @ Y.squeeze(1) / 0.25

    def work(rank):
        return fit(HMC(0.05, path_length=0.15, chains=40, draws=50, burn_in=20, tune=False), own_rows(rank, 2), model=linear)

    one, other = on_ranks(2, work)
    same(one, other)
    draws = one.params["weight"].squeeze(1)
    sigma = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() < 4 * sigma / math.sqrt(500)).all(), "of 2,000 draws 500 are effective at least"
    assert ((draws.T.cov() - covariance).abs() < 0.2 * sigma.outer(sigma)).all()


# ---- chains on processes of their own


@pytest.mark.parametrize("size", [2, 4])
def test_chains_on_processes_of_their_own_are_those_of_one_process(size):
    methods = {
        **SAMPLERS,
        "nuts of all lengths": NUTS(0.2, max_depth=6, tune=False, chains=4, draws=4, burn_in=0),
        "tuned": HMC(path_length=0.3, chains=5, draws=3, burn_in=15),
        "units": HMC(0.02, path_length=0.1, chains=5, draws=3, burn_in=16, units="posterior"),
        "units of mclmc": MCLMC(0.02, chains=5, draws=3, burn_in=16, thin=3, units="posterior"),
        "proposal": Metropolis(0.02, proposal=jump, **SHORT),
    }

    def work(rank):
        return [fit(method) for method in methods.values()]

    results = on_ranks(size, work, seconds=100)
    for number, (name, method) in enumerate(methods.items()):
        alone = fit(method, distributed=False)
        assert name != "nuts of all lengths" or len(alone.trace["depth"].unique()) > 2
        for result in results:
            same(alone, result[number], 1e-6 if name in ("tuned", "units", "units of mclmc") else 1e-7)
            same(results[0][number], result[number])
            assert result[number].chains == method.chains
        draws = results[0][number].params["0.weight"].unflatten(0, (method.chains, -1))
        assert len(draws[:, -1, 0, 0].unique()) == method.chains, "no two chains are the same"


def test_a_proposal_that_draws_more_for_some_positions_does_not_part_the_generators():
    def work(rank):
        def uneven(position, step, generator):
            """It draws as many more numbers as its process's number."""
            torch.rand(rank, generator=generator)
            return jump(position, step, generator)

        with join_processes() as processes:
            target = Target(model(), N, spread=processes)
            method = Metropolis(0.02, proposal=uneven, **SHORT)
            generator = torch.Generator().manual_seed(1)
            start = Start(target.model.parameters(), target.model.buffers())
            state = method.init(target, start, (X, Y), generator, steps=10)
            method.step(target, state, [(X, Y)], generator)
            return torch.rand((), generator=generator)

    one, other = on_ranks(2, work)
    assert one == other


def jump(position, step, generator):
    """A proposal of a user."""
    noise = torch.randn(position.shape, generator=generator, dtype=position.dtype)
    return position + step * noise, torch.zeros(len(position), dtype=torch.float64)


def test_a_learned_noise_and_chains_on_processes_of_their_own():
    method = HMC(0.01, path_length=0.05, **{**SHORT, "chains": 5})
    prior = priors.Hierarchical(priors.HalfCauchy(1.0))

    def work(rank):
        return fit(method, batch_size=7, model=dubito.Model(model().network, dubito.Gaussian(), prior))

    alone = fit(method, batch_size=7, model=dubito.Model(model().network, dubito.Gaussian(), prior), distributed=False)
    for result in on_ranks(2, work):
        same(alone, result, 1e-7)


def test_a_chain_is_the_same_bit_for_bit_whichever_process_runs_it():
    method = replace(SAMPLERS["nuts"], chains=4)

    def work(rank):
        mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("chains",))
        return fit(method), fit(method, distributed=mesh)

    for plain, swapped in on_ranks(2, work):
        same(plain, swapped)


def test_chains_on_processes_of_their_own_exchange_their_states_once_a_step():
    def exchanged(draws):
        """Exchanges and bytes of all sums of a fit."""
        made, sums, exchange = [0, 0], Processes.sum_, Processes._together

        def count(processes, tensors, **options):
            before = processes.bytes
            sums(processes, tensors, **options)
            made[1] += processes.bytes - before

        def count_exchange(processes, message):
            made[0] += 1
            exchange(processes, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Processes, "sum_", count)
            patch.setattr(Processes, "_together", count_exchange)
            found = fit(replace(SAMPLERS["hmc"], draws=draws, thin=3), (X.float(), Y.float()), model=single)
        return torch.tensor(made), len(found.trace)

    single = dubito.Model(model().network.float(), dubito.Gaussian(scale=1.0))

    def work(rank):
        (few, notes), (many, _) = exchanged(4), exchanged(9)
        return ((many - few) / 5).tolist(), notes

    for (exchanges, sent), notes in on_ranks(2, work):
        assert exchanges == 3, "the states in single and in double precision, and the place of the generator"
        assert sent == 12 * 4 * 21 + 8 * 4 * (4 + notes), (
            "positions, gradients and velocities; four that are tuned, and what is noted"
        )


def test_a_mesh_of_chains_and_data():
    methods = [SAMPLERS["nuts"], HMC(0.02, path_length=0.1, chains=3, draws=3, burn_in=16, units="posterior")]

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("chains", "data"))
        part = own_rows(mesh.get_local_rank("data"), 2)
        return [(fit(method, distributed=mesh), fit(method, part, distributed=mesh)) for method in methods]

    results = on_ranks(4, work)
    for number, method in enumerate(methods):
        alone = fit(method, distributed=False)
        for result in results:
            for posterior in result[number]:
                same(alone, posterior, 1e-6)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    long = replace(SAMPLERS["mclmc"], draws=12)

    def work(rank):
        path = tmp_path / "run"
        first = fit(replace(long, draws=4), checkpoint=path)
        distributed.barrier()
        return first, fit(long, checkpoint=path, resume=True), fit(long)

    results = on_ranks(2, work)
    alone = fit(long, distributed=False)
    for first, whole, straight in results:
        assert len(first) == 4 * 4
        same(straight, whole)
        same(alone, whole, 1e-7)
    longer = replace(long, draws=14)
    same(fit(longer, distributed=False), fit(longer, checkpoint=tmp_path / "run", resume=True, distributed=False), 1e-7)


# ---- what cannot work


def refused(size, work, words):
    """Whether all processes end with these words, of their own or of the first that has failed."""
    found = errors(size, work)
    assert all(words in text for text in found), found


def test_a_mesh_with_more_rows_than_chains_is_refused():
    def work(rank):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("chains",))
        return fit(replace(SAMPLERS["hmc"], chains=2), distributed=mesh)

    refused(3, work, "the dimension 'chains' of the mesh has 3 processes, and there are 2 chains or members to spread over them")


def test_a_method_without_chains_takes_no_mesh_of_chains():
    def work(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("chains", "data"))
        return fit(dubito.MAP(epochs=1), distributed=mesh)

    refused(
        2, work, "there are 1 chains or members to spread over them: give more of these, or in a method without any a mesh over"
    )


def test_chains_on_different_data_are_refused():
    def work(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("chains",))
        return fit(SAMPLERS["hmc"], (X + rank, Y), distributed=mesh)

    refused(2, work, "chains on processes of their own need the same data")


def test_gradients_of_chains_are_not_rounded():
    def work(rank):
        return fit(SAMPLERS["hmc"], exchange_dtype="bfloat16", distributed=data_mesh(2))

    refused(2, work, "exchange_dtype rounds gradients, and chains of HMC decide by them: leave it out")


def test_batches_that_differ_after_the_first_are_not_the_same_data():
    def work(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("chains",))
        return fit(SAMPLERS["hmc"], [(X[:10], Y[:10]), (X[10:] + rank, Y[10:])], distributed=mesh)

    refused(2, work, "chains on processes of their own need the same data")


def test_a_start_that_fails_in_one_process_ends_all():
    def work(rank):
        start = {name: leaf.expand(4, *leaf.shape).clone() for name, leaf in model().parameters().items()}
        start["2.bias"][3] = math.nan
        return fit(SAMPLERS["hmc"], start=start)

    refused(2, work, "the log posterior is not finite where 1 of 2 chains start")
