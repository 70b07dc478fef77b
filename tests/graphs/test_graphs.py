"""Networks whose rows depend on each other: graphs, with every structure of curvature against brute force over all weights."""

from __future__ import annotations

import copy
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev
from torch.utils.data import DataLoader, Dataset

import dubito
from dubito import MAP, SGHMC, Categorical, Ensemble, Gaussian, Laplace, MCDropout, Model, TemporalEnsembling
from dubito.apps.active import Pool
from dubito.apps.influence import Influence
from dubito.inference.members import example_keys
from dubito.model import Target
from dubito.posteriors.predict import linearized
from dubito.priors import Normal
from graphs.networks import LAYERS, GraphNetwork, brute_force, edges, graphs, nodes

INPUTS = {"nodes": nodes, "graphs": graphs}


def build(kind, level, outputs=3):
    torch.manual_seed(0)
    return GraphNetwork(kind, outputs).double(), INPUTS[level]()


def laplace(network, x, y, likelihood=None, data=None, **options):
    """Laplace at the weights that the network has."""
    model = Model(network, likelihood or Categorical(), Normal(scale=1.0), coupled=True)
    return dubito.fit(model, Laplace(check=False, optimize_evidence=False, **options), (x, y) if data is None else data)


def labels(f):
    """Classes of the nodes, of which a third is unknown."""
    return torch.arange(len(f)).remainder(3).masked_fill(torch.arange(len(f)) % 3 == 1, -100)


def fisher(f, y):
    """Of the logits, zero where the class is unknown."""
    p = f.softmax(-1)
    return (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) * y.ne(-100).view(-1, 1, 1)


def whole(jacobian, names=None):
    return torch.cat([jacobian[name] for name in names or jacobian], -1)


def precision(jacobian, weights):
    """The GGN with weights [B, C, C] of the outputs, and a prior of unit variance."""
    ggn = torch.einsum("bcp,bcd,bdq->pq", jacobian, weights, jacobian)
    return ggn + torch.eye(len(ggn)).to(ggn)


def check_prediction(posterior, x, f, jacobian):
    """Means and covariances of the linearized outputs are those of the Jacobian."""
    p, covariance = posterior.predict(x, "linearized"), posterior.covariance
    j = whole(jacobian, covariance.shapes)
    expected = torch.einsum("bcp,pq,bdq->bcd", j, covariance.dense(), j)
    torch.testing.assert_close(p.means[0], f)
    torch.testing.assert_close(p.cov[0], expected, atol=1e-9, rtol=1e-6)
    assert p.how == ""


@pytest.mark.parametrize("level", INPUTS)
@pytest.mark.parametrize(("kind", "structure"), [*product(LAYERS, ["dense", "diagonal"]), ("gcn", "lowrank"), ("gin", "lowrank")])
def test_laplace_is_brute_force_over_all_weights(kind, level, structure):
    network, x = build(kind, level)
    f, jacobian = brute_force(network, x)
    y = labels(f)
    expected = precision(whole(jacobian), fisher(f, y))
    posterior = laplace(network, x, y, structure=structure, **({"rank": len(expected)} if structure == "lowrank" else {}))
    inverse = torch.linalg.inv(expected) if structure != "diagonal" else (1 / expected.diagonal()).diag()
    torch.testing.assert_close(posterior.covariance.dense(), inverse, atol=1e-9, rtol=1e-6)
    check_prediction(posterior, x, f, jacobian)


@pytest.mark.parametrize("level", INPUTS)
def test_a_learned_noise_is_kept_apart(level):
    network, x = build("gcn", level, outputs=2)
    f, jacobian = brute_force(network, x)
    y = f + torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).double()
    posterior = laplace(network, x, y, Gaussian(), structure="dense")
    scale = (y - f).square().mean().sqrt()  # of the residuals
    expected = precision(whole(jacobian), torch.eye(2).double().expand(len(f), 2, 2) / scale**2)
    torch.testing.assert_close(posterior.covariance.dense(), torch.linalg.inv(expected))


@pytest.mark.parametrize("level", INPUTS)
def test_every_row_is_an_example_of_the_empirical_fisher(level):
    network, x = build("sage", level)
    f, jacobian = brute_force(network, x)
    y = labels(f)
    slope = (nn.functional.one_hot(y.clamp_min(0), 3) - f.softmax(-1)) * y.ne(-100).unsqueeze(-1)
    expected = precision(whole(jacobian), slope.unsqueeze(-1) * slope.unsqueeze(-2))
    found = laplace(network, x, y, structure="dense", curvature="empirical").covariance.dense()
    torch.testing.assert_close(found, torch.linalg.inv(expected))


def test_random_labels_of_every_row_have_the_ggn_as_their_mean():
    network, x = build("gcn", "nodes")
    f, jacobian = brute_force(network, x)
    y, draws = labels(f), 300
    found = torch.linalg.inv(laplace(network, x, y, structure="dense", curvature="fisher", draws=draws).covariance.dense())
    expected = precision(whole(jacobian), fisher(f, y))
    # Each row's random label has a gradient of its own. Were those of all rows added first, the error would be twice as large or more.
    assert (found - expected).norm() / expected.norm() < 0.5 / draws**0.5


def test_the_hessian_is_that_of_the_loss():
    network, x = build("gcn", "nodes")
    params = {name: leaf.detach() for name, leaf in network.named_parameters()}
    y, precision = labels(network(**x)), 20.0

    def loss(params):
        return nn.functional.cross_entropy(functional_call(network, params, kwargs=x, args=()), y, reduction="sum")

    blocks = hessian(loss)(params)
    matrix = torch.cat(
        [torch.cat([blocks[a][b].reshape(params[a].numel(), -1) for b in params], 1) for a in params]
    ) + precision * torch.eye(sum(leaf.numel() for leaf in params.values()))
    model = Model(network, Categorical(), Normal(scale=precision**-0.5), coupled=True)
    posterior = dubito.fit(model, Laplace("dense", "hessian", optimize_evidence=False, check=False), (x, y))
    torch.testing.assert_close(posterior.covariance.dense(), torch.linalg.inv(matrix))


@pytest.mark.parametrize("shared", ["expand", "reduce"])
@pytest.mark.parametrize("level", INPUTS)
def test_kronecker_factors_are_those_of_a_layer_that_is_used_at_every_node(level, shared):
    """A of the layer's inputs at all nodes, B of the gradients of every output at all nodes."""
    network, x = build("sage", level)
    f, jacobian = brute_force(network, x)
    y, inputs, h = labels(f), {}, {}
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _, args, out, name=name: inputs.update({name: args[0]}) or out + h.get(name, 0))
    network(**x)
    expected = torch.zeros(len(f), 3, 3).double()
    for name, layer in layers.items():
        a = inputs[name].detach()
        a = torch.cat([a, torch.ones(len(a), 1).double()], 1) if layer.bias is not None else a

        def output(change, name=name):
            h.clear()
            h[name] = change
            return network(**x)

        g = jacrev(output)(torch.zeros(len(a), layer.out_features).double())  # [B, C, T, O]
        h.clear()
        g = g.sum(2, keepdim=True) if shared == "reduce" else g
        a = a.mean(0, keepdim=True) if shared == "reduce" else a
        left = torch.einsum("bcto,bcd,bdtp->op", g, fisher(f, y), g)
        names = [f"{name}.weight", f"{name}.bias"][: 1 + (layer.bias is not None)]
        j = [jacobian[n].reshape(len(f), 3, layer.out_features, -1) for n in names]
        j = torch.cat(j, -1).flatten(2)
        matrix = torch.kron(left, a.mT @ a / len(a))
        expected += torch.einsum("bcp,pq,bdq->bcd", j, torch.linalg.inv(matrix + torch.eye(len(matrix))), j)
    network.eval()
    for layer in layers.values():
        layer._forward_hooks.clear()
    posterior = laplace(network, x, y, structure="kronecker", shared=shared)
    torch.testing.assert_close(posterior.predict(x).cov[0], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"structure": "kronecker"}, {"structure": "kronecker", "corrected": True}, {"structure": "diagonal"}, {"structure": "dense"},
        {"structure": "lowrank", "rank": 5}, {"structure": "dense", "subnetwork": 9}, {"structure": "dense", "subset": "last_layer"},
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_independent_after_all_have_the_same_posterior(options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 3).double(), torch.arange(9) % 2
    method = Laplace(**options, check=False, optimize_evidence=False)
    found = [
        dubito.fit(Model(network, Categorical(), Normal(scale=1.0), coupled=coupled), method, (x, y)).predict(x).cov
        for coupled in (True, False)
    ]
    torch.testing.assert_close(*found)


def test_the_evidence_is_maximized_as_for_independent_rows():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(30, 3).double()
    found = [dubito.fit(Model(network, Gaussian(), coupled=c), Laplace(check=False), (x, x.sum(1, True))) for c in (True, False)]
    torch.testing.assert_close(*(posterior.log_evidence() for posterior in found))
    for name, leaf in found[0].prior_precision.items():
        torch.testing.assert_close(leaf, found[1].prior_precision[name])


class Asked(GraphNetwork):
    """Answers for some of the nodes."""

    def forward(self, x, edge_index, index):
        return super().forward(x, edge_index)[index]


def test_labelled_nodes_are_a_subset_by_mask_or_by_index():
    torch.manual_seed(0)
    network, x = Asked("gcn").double(), nodes()
    index = torch.tensor([7, 2, 5])
    y = torch.full((11,), -100)
    y[index] = torch.tensor([0, 2, 1])
    by_index = laplace(network, {**x, "index": index}, y[index], structure="dense")
    by_mask = laplace(network, {**x, "index": torch.arange(11)}, y, structure="dense")
    torch.testing.assert_close(by_index.covariance.dense(), by_mask.covariance.dense())
    one = by_index.predict({**x, "index": index[:1]})
    torch.testing.assert_close(one.cov, by_mask.predict({**x, "index": torch.arange(11)}).cov[:, 7:8])
    mean, cov = by_index.predict({**x, "index": index}).means[0], by_index.predict({**x, "index": index}).cov[0]
    assert mean.shape == (3, 3)
    assert cov.shape == (3, 3, 3)


def test_batches_of_graphs_add_up(recwarn):
    """Graphs in two batches have the curvature of all of them side by side; every graph is predicted as it is alone."""
    network, x = build("gin", "graphs")
    y = torch.tensor([0, 2, 1, 1])
    batches = []
    for some in ([0, 1], [2, 3]):
        kept = torch.isin(x["batch"], torch.tensor(some))
        first = int(kept.nonzero()[0])
        edge_index = x["edge_index"][:, kept[x["edge_index"][0]]] - first
        batches.append(({"x": x["x"][kept], "edge_index": edge_index, "batch": x["batch"][kept] - some[0]}, y[some]))
    together, apart = laplace(network, x, y, structure="dense"), laplace(network, x, y, data=batches, structure="dense")
    torch.testing.assert_close(together.covariance.dense(), apart.covariance.dense())
    p = together.predict(x)
    torch.testing.assert_close(together.predict_loader(batches)[0].mean, p.mean)
    masks = dubito.fit(together.model, MCDropout(at="", rate=0.2, epochs=1, consistent=True), batches)
    torch.testing.assert_close(masks.predict_loader(batches)[0].mean, masks.predict(x).mean)
    assert not [w for w in recwarn if "depend on the others" in str(w.message)]


def test_a_loader_of_graphs_is_counted_by_nodes():
    network, _ = build("sage", "nodes")
    graphs = [(nodes(n, seed=n), torch.arange(n) % 3) for n in (4, 9, 6)]
    loader = DataLoader(graphs, batch_size=1, shuffle=True, collate_fn=lambda items: items[0])
    posterior = laplace(network, None, None, data=loader, structure="dense")
    expected = torch.eye(posterior.covariance.dense().shape[0]).double()
    for x, y in graphs:
        f, jacobian = brute_force(network, x)
        expected += precision(whole(jacobian), fisher(f, y)) - torch.eye(len(expected))
    torch.testing.assert_close(posterior.covariance.dense(), torch.linalg.inv(expected))


@pytest.mark.parametrize("level", INPUTS)
def test_draws_are_those_of_the_network(level):
    network, x = build("gat", level)
    y = labels(network(**x))
    model = Model(network, Categorical(), Normal(scale=1.0), coupled=True)
    for method in (SGHMC(draws=3, burn_in=2, learning_rate=0.01), Laplace("diagonal", check=False)):
        posterior = dubito.fit(model, method, (x, y))
        drawn = posterior.sample(3, torch.Generator().manual_seed(0))
        p = dubito.posteriors.Samples(model, drawn, model.buffers()).predict(x)
        for i in range(3):
            weights = {name: leaf[i] for name, leaf in drawn.items()}
            torch.testing.assert_close(p.means[i], functional_call(network, weights, kwargs=x, args=()))


class Graph:
    """What PyTorch Geometric's `Data` offers."""

    def __init__(self, **tensors):
        vars(self).update(tensors)

    def to_dict(self):
        return dict(vars(self))

    def apply(self, function):
        vars(self).update({name: function(leaf) for name, leaf in vars(self).items()})
        return self

    def keys(self):
        return list(vars(self))

    def __getitem__(self, name):
        return getattr(self, name)

    def __iter__(self):
        return iter(vars(self).items())

    def to(self, *_):
        raise AssertionError("an object of the user's would be moved")


class OfGraphs(GraphNetwork):
    """Takes a graph as a whole, and writes into it."""

    def forward(self, graph):
        graph.x = graph.x + 1
        return super().forward(graph.x - 1, graph.edge_index)


def test_a_graph_as_one_object():
    torch.manual_seed(0)
    network, x = OfGraphs("gcn").double(), nodes()
    y = labels(x["x"])
    graph = Graph(**x, y=y)
    before, f = copy.deepcopy(graph), GraphNetwork.forward(network, **x)
    model = Model(network, Categorical(), Normal(scale=1.0), coupled=True)
    method = Laplace("dense", check=False, optimize_evidence=False)
    plain = GraphNetwork("gcn").double()
    plain.load_state_dict(network.state_dict())
    expected = laplace(plain, x, y, structure="dense")
    for data in (graph, [graph], [(graph, y)]):
        posterior = dubito.fit(model, method, data)
        torch.testing.assert_close(posterior.covariance.dense(), expected.covariance.dense())
    torch.testing.assert_close(posterior.predict(graph).cov, expected.predict(x).cov)
    torch.testing.assert_close(posterior.predict(graph).means[0], f.detach())
    found, targets = posterior.predict_loader([Graph(**x), Graph(**x)][:1])
    assert targets is None
    torch.testing.assert_close(found.means, expected.predict(x).means)
    dubito.fit(model, MCDropout(at="", rate=0.1, epochs=1), graph).predict(graph)
    assert vars(before).keys() == vars(graph).keys()
    assert all(torch.equal(leaf, graph[name]) for name, leaf in before)


class Joined:
    """What `torch_geometric.data.Batch` does with graphs: side by side, in one without edges between them."""

    @staticmethod
    def from_data_list(parts):
        starts = torch.tensor([0, *(len(part.x) for part in parts)]).cumsum(0)
        edges = [part.edge_index + start for part, start in zip(parts, starts, strict=False)]
        return Graph(
            x=torch.cat([part.x for part in parts]), edge_index=torch.cat(edges, 1), y=torch.cat([part.y for part in parts])
        )


def test_a_data_set_of_graphs_is_joined_as_pytorch_geometric_does_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_geometric.data", SimpleNamespace(Batch=Joined))
    torch.manual_seed(0)
    network, source, width = OfGraphs("gcn").double(), torch.Generator().manual_seed(0), nodes()["x"].shape[1]
    parts = [Graph(x=torch.randn(n, width).double(), edge_index=edges(n, source), y=torch.arange(n) % 3) for n in (4, 6, 5)]

    class Graphs(Dataset):
        def __len__(self):
            return len(parts)

        def __getitem__(self, i):
            return parts[i]

    model = Model(network, Categorical(), Normal(scale=1.0), coupled=True)
    method = Laplace("dense", check=False, optimize_evidence=False)
    expected = dubito.fit(model, method, [Joined.from_data_list(parts)]).covariance.dense()
    for size in (1, 2, 8):
        found = dubito.fit(model, method, Graphs(), batch_size=size).covariance.dense()
        torch.testing.assert_close(found, expected)


def test_a_data_set_of_pytorch_geometric():
    data, torch_nn = pytest.importorskip("torch_geometric.data"), pytest.importorskip("torch_geometric.nn")
    source = torch.Generator().manual_seed(0)
    parts = [data.Data(x=torch.randn(n, 3), edge_index=edges(n, source), y=torch.tensor([n % 2])) for n in range(3, 13)]

    class Graphs(data.InMemoryDataset):
        def __init__(self):
            super().__init__(None)
            self.data, self.slices = self.collate(parts)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = torch_nn.GCNConv(3, 4), nn.Linear(4, 2)

        def forward(self, graph):
            h = self.first(graph.x, graph.edge_index).tanh()
            return self.head(torch_nn.global_mean_pool(h, graph.batch))

    model = Model(Classifier(), Categorical(), Normal(scale=1.0), coupled=True)
    method = Laplace("dense", check=False, optimize_evidence=False)
    found, expected = (dubito.fit(model, method, d) for d in (Graphs(), [data.Batch.from_data_list(parts)]))
    torch.testing.assert_close(found.covariance.dense(), expected.covariance.dense(), rtol=1e-4, atol=1e-5)


def test_what_is_not_said_to_be_coupled_is_refused_with_the_way_out():
    network, x = build("gcn", "nodes")
    model, y = Model(network, Categorical()), labels(x["x"])
    with pytest.raises(ValueError, match=r"same, positive number of rows; got \[2, 11\].*Model\(..., coupled=True\)"):
        dubito.fit(model, MAP(epochs=1), (x, y))
    for level in INPUTS:
        network, x = build("gcn", level)
        with pytest.raises(ValueError, match=r"outputs for inputs of shape .*Model\(..., coupled=True\), and pass whole batches"):
            dubito.fit(Model(network, Categorical()), Laplace(check=False), [(x, labels(network(**x)))])


def narrow(network, x, structure="diagonal", **options):
    """Laplace with small variances, where the network is nearly linear in its weights."""
    model = Model(network, Categorical(), Normal(scale=0.03), coupled=True, **options)
    y = torch.arange(len(network(**x) if isinstance(x, dict) else network(x))) % 3
    return dubito.fit(model, Laplace(structure, check=False, optimize_evidence=False), (x, y))


def variances(p):
    """[B, C] of a Gaussian prediction."""
    return p.cov[0] if p.cov.ndim == 3 else p.cov[0].diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("level", INPUTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_adjoint_has_the_moments_of_draws(kind, level):
    """What rows share, as the weights of a layer at every node, is kept: to first order it is the linearized network."""
    network, x = build(kind, level)
    for structure in ("diagonal", "dense"):
        posterior = narrow(network, x, structure)
        first, expected = posterior.predict(x, "adjoint", rule="taylor"), posterior.predict(x, "linearized")
        torch.testing.assert_close(first.cov, expected.cov, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(first.means, expected.means)
        p, drawn = posterior.predict(x, "adjoint"), posterior.predict(x, "sampled", draws=4000).means
        assert p.how == "adjoint"
        torch.testing.assert_close(variances(p), drawn.var(0), rtol=0.1, atol=0)
        assert ((p.means[0] - drawn.mean(0)).abs() < 0.1 * drawn.std(0)).all()


@pytest.mark.parametrize("level", INPUTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_forward_pass_takes_rows_apart_or_alike(kind, level):
    network, x = build(kind, level)
    posterior = narrow(network, x)
    expected = variances(posterior.predict(x, "linearized"))
    for rank, how in ((0, "rows apart"), (-1, "rows alike")):
        p = posterior.predict(x, "streamlined", rank=rank)
        assert p.how.endswith(how)
        ratio = (variances(p) / expected).log()
        assert ratio.abs().median() < {0: 1.6, -1: 0.4}[rank]
        assert ratio.abs().max() < 2.5
    network.requires_grad_(False).head.requires_grad_(True)  # after all mixing of rows there is nothing to share
    posterior = narrow(network, x, "dense")
    expected = posterior.predict(x, "linearized").cov
    torch.testing.assert_close(posterior.predict(x, "streamlined").cov, expected)
    torch.testing.assert_close(posterior.predict(x, "adjoint").cov, expected)


class Shared(nn.Module):
    """Rows that have a vector, a number, or the values of an attention in common."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.common, self.head = way, nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if way == "attention" else nn.Identity()

    def forward(self, x):
        h = self.first(x).relu()
        if self.way == "vector":
            return self.head(torch.tanh(h + self.common(h.mean(0)).tanh()))
        if self.way == "number":
            return self.head(self.common(h) * torch.tanh(3 * h.mean()))
        return self.head(self.common(h + self.attention(h, h, h, need_weights=False)[0]))


@pytest.mark.parametrize("way", ["vector", "number", "attention"])
def test_one_pass_of_what_all_rows_have_in_common(way):
    torch.manual_seed(0)
    network, x = Shared(way).double(), nodes()["x"]
    posterior = narrow(network, x)
    drawn = posterior.predict(x, "sampled", draws=4000).means.var(0)
    torch.testing.assert_close(variances(posterior.predict(x, "adjoint")), drawn, rtol=0.1, atol=0)
    for rank in (0, -1):
        p = posterior.predict(x, "streamlined", rank=rank)
        torch.testing.assert_close(variances(p), drawn, rtol=0.5, atol=0)


class LargestOfGraph(nn.Module):
    """The largest of the nodes of each graph, or the smallest; with another number among them, where it is `included`."""

    def __init__(self, reduce, included):
        super().__init__()
        self.reduce, self.included, self.first, self.head = reduce, included, nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x, edge_index, batch):
        h = torch.tanh(self.first(x)) + self.first(x[edge_index[0, : len(x)]])
        index = batch.unsqueeze(1).expand_as(h)
        start = h.new_full((5, 5), 0.1)  # the fifth graph has no node
        return self.head(start.scatter_reduce(0, index, h, self.reduce, include_self=self.included))


@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_the_largest_of_each_graph_in_one_pass(reduce, included):
    torch.manual_seed(0)
    network, x = LargestOfGraph(reduce, included).double(), graphs()
    posterior = narrow(network, x)
    drawn = posterior.predict(x, "sampled", draws=4000).means
    expected = posterior.predict(x, "linearized")
    torch.testing.assert_close(posterior.predict(x, "adjoint", rule="taylor").cov, expected.cov)
    p = posterior.predict(x, "streamlined", rank=0, rule="taylor")
    torch.testing.assert_close(p.means, expected.means)
    for how, within in (("adjoint", 0.15), ("streamlined", 0.4)):
        p = posterior.predict(x, how)
        torch.testing.assert_close(variances(p), drawn.var(0), rtol=within, atol=0)
        # of the nodes it is not followed which of their noise they share, as in maximum pooling
        assert ((p.means[0] - drawn.mean(0)).abs() < 0.3 * drawn.std(0)).all()


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_one_pass_follows_other_graphs(how):
    """A trace is for inputs of its shapes that decide as they did; each graph has the numbers of a posterior that saw no other."""
    network, x = build("sage", "graphs")
    merged = {**x, "batch": x["batch"].clamp_max(2)}  # of the same shapes, but of three graphs
    rewired = {**x, "edge_index": x["edge_index"].flip(1)[:, torch.randperm(x["edge_index"].shape[1])]}
    fewer = {**x, "edge_index": x["edge_index"][:, 2:]}
    posterior = narrow(network, x)
    for other in (x, merged, rewired, fewer, graphs((4, 2)), x):
        fresh = dubito.posteriors.Gaussian(posterior.model, posterior.params, posterior.buffers, posterior.covariance)
        p, expected = posterior.predict(other, how), fresh.predict(other, how)
        torch.testing.assert_close(p.means, expected.means)
        torch.testing.assert_close(p.cov, expected.cov)
        torch.testing.assert_close(p.means[0], network(**other).detach(), rtol=0, atol=0.05)


def test_a_graph_object_goes_through_one_pass():
    torch.manual_seed(0)
    network, x = OfGraphs("gcn").double(), nodes()
    plain = GraphNetwork("gcn").double()
    plain.load_state_dict(network.state_dict())
    y, graph = labels(x["x"]), Graph(**x)
    method = Laplace("diagonal", check=False, optimize_evidence=False)
    found = dubito.fit(Model(network, Categorical(), Normal(scale=0.03), coupled=True), method, [(graph, y)])
    expected = dubito.fit(Model(plain, Categorical(), Normal(scale=0.03), coupled=True), method, (x, y))
    for how in ("streamlined", "adjoint"):
        p, q = found.predict(graph, how), expected.predict(x, how)
        torch.testing.assert_close(p.means, q.means)
        torch.testing.assert_close(p.cov, q.cov)


def test_the_adjoint_of_some_outputs_or_by_draws(monkeypatch):
    network, x = build("gcn", "graphs")
    posterior = narrow(network, x)
    every, some = variances(posterior.predict(x, "adjoint")), posterior.predict(x, "adjoint", top=2)
    largest = some.means[0].topk(2).indices
    torch.testing.assert_close(variances(some).gather(1, largest), every.gather(1, largest))
    monkeypatch.setattr("dubito.posteriors.predict.adjoint.COUPLED", 1)
    drawn = posterior.predict(x, "adjoint", draws=2000)
    assert posterior.predict(x, "adjoint").how == "adjoint, 30 draws"
    torch.testing.assert_close(drawn.means.var(0), every, rtol=0.2, atol=0)
    torch.testing.assert_close(posterior.predict(x, "adjoint", draws=0).cov[0].diagonal(dim1=1, dim2=2), every)


def test_dropout_in_one_pass_has_masks_of_each_row():
    network, x = build("gcn", "graphs")
    method = MCDropout(at="", rate=0.02, epochs=1)
    posterior = dubito.fit(Model(network, Categorical(), coupled=True), method, (x, torch.arange(4) % 3))
    drawn = posterior.predict(x, draws=4000, consistent=False).means.var(0)
    torch.testing.assert_close(variances(posterior.predict(x, "adjoint", consistent=False)), drawn, rtol=0.2, atol=0)
    with pytest.raises(ValueError, match="say consistent=False"):
        posterior.predict(x, "adjoint")


def test_a_module_of_coupled_rows_is_refused():
    network, x = build("gcn", "nodes")
    with pytest.raises(ValueError, match=r"rows of this model are coupled: use posterior.predict"):
        dubito.as_module(narrow(network, x), x)


def test_what_cuts_data_into_rows_is_refused():
    torch.manual_seed(0)
    network, x = nn.Linear(3, 2), torch.randn(8, 3)
    posterior = dubito.fit(Model(network, Categorical(), coupled=True), Laplace(check=False), (x, torch.arange(8) % 2))
    with pytest.raises(ValueError, match="rows of this model are coupled"):
        Influence("dense").fit(posterior, (x, torch.arange(8) % 2))
    with pytest.raises(ValueError, match="those of this model are coupled"):
        next(Pool(x).batches(posterior.model, torch.arange(8), 4))


def test_very_large_graphs_are_predicted_by_draws(monkeypatch):
    network, x = build("gcn", "nodes")
    posterior = laplace(network, x, labels(x["x"]), structure="dense")
    exact = posterior.predict(x)
    monkeypatch.setattr(linearized, "COUPLED", 1)
    drawn = posterior.predict(x, draws=400)
    assert posterior.predict(x).how == "linearized, 30 draws"
    variance = exact.cov[0].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(drawn.means.var(0), variance, rtol=0.4, atol=0)


def test_rows_that_are_coupled_have_keys_of_their_own():
    network, x = build("gcn", "nodes")
    model = Model(network, Categorical(), coupled=True)
    y = torch.zeros(len(network(**x)), dtype=torch.long)
    keys = example_keys(Target(model, len(y)), (x, y))
    assert len(keys.unique()) == len(y)
    assert torch.equal(keys, example_keys(Target(model, len(y)), (x, y)))


@pytest.mark.parametrize("level", INPUTS)
def test_members_of_an_ensemble_hold_out_nodes(level):
    network, x = build("gcn", level)
    y = network(**x).argmax(-1)
    ensemble = Ensemble(MAP(epochs=5), 3, hold_out=0.3, initialize=lambda net: [p.normal_(std=0.3) for p in net.parameters()])
    posterior = dubito.fit(Model(network, Categorical(), coupled=True), ensemble, (x, y))
    first, second, _ = next(iter(posterior.params.values()))
    assert not torch.equal(first, second)
    assert posterior.predict(x).mean.shape == (len(y), 3)


def test_what_is_remembered_for_each_example_is_refused():
    network, x = build("gcn", "nodes")
    y = network(**x).argmax(-1)
    with pytest.raises(ValueError, match="use PiModel or MeanTeacher"):
        dubito.fit(Model(network, Categorical(), coupled=True), TemporalEnsembling(MAP(epochs=1)), (x, y))
