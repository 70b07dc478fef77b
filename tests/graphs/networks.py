"""Graph networks in plain torch, with small graphs to run them on, and curvature by brute force."""

import torch
from torch import nn
from torch.func import functional_call, jacrev


def spread(messages, target, n):
    """The sum of the messages [E, C] that each of n nodes receives."""
    return messages.new_zeros(n, messages.shape[1]).index_add(0, target, messages)


class GCN(nn.Module):
    """Kipf & Welling: neighbours, with the node itself, weighted by the roots of both degrees."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, x, edge_index):
        loops = torch.arange(len(x), device=x.device)
        source, target = torch.cat([edge_index, loops.expand(2, -1)], 1)
        root = torch.zeros(len(x), dtype=x.dtype).index_add(0, target, torch.ones(len(target), dtype=x.dtype)).rsqrt()
        return spread(self.linear(x)[source] * (root[source] * root[target]).unsqueeze(1), target, len(x)) + self.bias


class GAT(nn.Module):
    """Velickovic et al.: neighbours weighted by a softmax over what reaches a node, with two heads."""

    def __init__(self, inputs, outputs, heads=2):
        super().__init__()
        self.linear = nn.Linear(inputs, heads * outputs)
        self.source, self.target = (nn.Parameter(torch.randn(heads, outputs)) for _ in range(2))

    def forward(self, x, edge_index):
        loops = torch.arange(len(x), device=x.device)
        source, target = torch.cat([edge_index, loops.expand(2, -1)], 1)
        h = self.linear(x).unflatten(1, self.source.shape)  # [N, heads, C]
        score = nn.functional.leaky_relu(((h * self.source).sum(-1))[source] + ((h * self.target).sum(-1))[target], 0.2)
        largest = score.new_full((len(x), score.shape[1]), -torch.inf)
        largest = largest.scatter_reduce(0, target.unsqueeze(1).expand_as(score), score.detach(), "amax")
        weight = (score - largest[target]).exp()
        weight = weight / spread(weight, target, len(x))[target]
        return spread((h[source] * weight.unsqueeze(-1)).flatten(1), target, len(x)).unflatten(1, self.source.shape).mean(1)


class SAGE(nn.Module):
    """Hamilton et al.: the node, and the mean of its neighbours."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        count = spread(x.new_ones(len(source), 1), target, len(x)).clamp_min(1)
        return self.own(x) + self.others(spread(x[source], target, len(x)) / count)


class GIN(nn.Module):
    """Xu et al.: a network of the sum of a node and its neighbours, with a weight for the node."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs))
        self.eps = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.mlp((1 + self.eps) * x + spread(x[source], target, len(x)))


LAYERS = {"gcn": GCN, "gat": GAT, "sage": SAGE, "gin": GIN}


class GraphNetwork(nn.Module):
    """Two layers with `outputs` for every node; or with `batch`, the graph of each node, for every graph."""

    def __init__(self, kind, outputs=3, inputs=4, width=3):
        super().__init__()
        self.first, self.second = LAYERS[kind](inputs, width), LAYERS[kind](width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x, edge_index, batch=None):
        h = self.second(torch.tanh(self.first(x, edge_index)), edge_index).tanh()
        if batch is not None:
            n = int(batch.max()) + 1
            h = spread(h, batch, n) / spread(h.new_ones(len(h), 1), batch, n)
        return self.head(h)


def edges(n, generator, degree=3):
    """Edges in both directions between n nodes, [2, E]; each has about so many neighbours."""
    adjacency = torch.triu(torch.rand(n, n, generator=generator) < degree / n, 1)
    source, target = adjacency.nonzero().T
    return torch.stack([torch.cat([source, target]), torch.cat([target, source])])


def nodes(n=11, seed=0):
    """A graph with features, as the arguments of a network."""
    source = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(n, 4, generator=source).double(), "edge_index": edges(n, source)}


def graphs(sizes=(5, 3, 6, 4), seed=0):
    """Several graphs side by side, as one."""
    source, start, parts = torch.Generator().manual_seed(seed), 0, []
    for n in sizes:
        parts.append(edges(n, source) + start)
        start += n
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return {"x": torch.randn(start, 4, generator=source).double(), "edge_index": torch.cat(parts, 1), "batch": batch}


def brute_force(network, x):
    """Outputs [B, C] and the Jacobian of all weights by name, [B, C, p]."""
    network.eval()
    params = {name: leaf.detach() for name, leaf in network.named_parameters()}

    def output(params):
        return functional_call(network, params, kwargs=x, args=())

    f = output(params)
    return f, {name: leaf.reshape(*f.shape, -1) for name, leaf in jacrev(output)(params).items()}
