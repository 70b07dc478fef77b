"""Small networks of every layer type, and curvature and Jacobians of them written out by brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito import Model
from dubito.likelihoods import likelihood_params
from dubito.tensors.tree import Params

DOUBLE = torch.float64


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape)


class Net(nn.Module):
    """Named layers and a function of them."""

    def __init__(self, run: Callable[..., Tensor], **layers: Any):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            if isinstance(layer, nn.Module | nn.Parameter):
                setattr(self, name, layer)
            else:
                self.register_buffer(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(self, *args, **kwargs)


def flat(*layers: nn.Module, width: int, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, outputs))


def moved(layer: nn.Module) -> nn.Module:
    """A normalisation with statistics, scale and shift other than its first ones."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        for buffer in layer.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return layer


def attention(batch_first: bool) -> Net:
    def run(s, x):
        x = x if batch_first else x.transpose(0, 1)
        h = s.a(x, x, x)[0]
        return s.o(h.mean(1 if batch_first else 0))

    return Net(run, a=nn.MultiheadAttention(4, 2, batch_first=batch_first), o=nn.Linear(4, 2))


def cross(**options: Any) -> Net:
    width = options.get("kdim", 4)

    def run(s, x):
        h = s.a(x[:, :2, :4], x[..., :width], x[..., :width], need_weights=False)[0]
        return s.o(h.mean(1))

    return Net(run, a=nn.MultiheadAttention(4, 2, batch_first=True, **options), o=nn.Linear(4, 2))


def encoder(**options: Any) -> Net:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True, **options)
    return Net(lambda s, x: s.o(s.e(x).mean(1)), e=layer, o=nn.Linear(4, 2))


def decoder() -> Net:
    layer = nn.TransformerDecoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
    return Net(lambda s, x: s.o(s.d(x[:, :2], x).mean(1)), d=layer, o=nn.Linear(4, 2))


def recurrent(kind: Any, **options: Any) -> Net:
    width = 3 * (2 if options.get("bidirectional") else 1)
    return Net(
        lambda s, x: s.o(s.r(x)[0][:, -1]),
        r=kind(2, options.pop("hidden", 3), batch_first=True, **options),
        o=nn.Linear(width, 2),
    )


def time_major() -> Net:
    """Positions first inside, with another weight for each position, so that a wrong axis is a wrong result."""

    def run(s, x):
        h = s.i(x.transpose(0, 1)).tanh()  # [T, B, H]
        return s.o((h * s.w[: len(h), None, None]).sum(0))

    return Net(run, i=nn.Linear(3, 3), o=nn.Linear(3, 2), w=torch.linspace(0.1, 1.0, 6))


def merged(examples_first: bool) -> Net:
    """Examples and positions in one axis."""

    def run(s, x):
        size, length, _ = x.shape
        rows = x if examples_first else x.transpose(0, 1)
        h = s.n(s.i(rows.reshape(size * length, -1))).tanh()
        h = h.reshape(size, length, -1) if examples_first else h.reshape(length, size, -1).transpose(0, 1)
        return s.o((h * s.w[:length, None]).sum(1))

    return Net(run, i=nn.Linear(3, 3), n=moved(nn.LayerNorm(3)), o=nn.Linear(3, 2), w=torch.linspace(0.1, 1.0, 6))


def merged_images() -> Net:
    """Frames of films in the axis of examples."""

    def run(s, x):
        h = s.n(s.c(x.flatten(0, 1))).tanh().flatten(1).reshape(*x.shape[:2], -1)
        return s.o((h * s.w[: x.shape[1], None]).sum(1))

    layers = dict(c=nn.Conv2d(1, 2, 2), n=moved(nn.GroupNorm(1, 2)), o=nn.Linear(8, 2), w=torch.linspace(0.1, 1.0, 6))
    return Net(run, **layers)


def tied_embedding() -> Net:
    net = Net(lambda s, x: s.o(s.e(x).tanh().mean(1)), e=nn.Embedding(7, 3), o=nn.Linear(3, 7))
    net.o.weight = net.e.weight
    return net


def unused() -> Net:
    return Net(lambda s, x: s.o(x), o=nn.Linear(3, 2), nothing=nn.Linear(2, 2), alone=nn.Parameter(torch.ones(2)))


def parametrised() -> Net:
    return Net(lambda s, x: s.o(s.i(x).tanh()), i=nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), o=nn.Linear(4, 2))


def positions() -> Net:
    """A table of positions, looked up and projected, that all examples share."""

    def run(s, x):
        place = s.q(s.p(torch.arange(x.shape[1])))
        return s.o((s.e(x) + place).tanh().mean(1))

    return Net(run, e=nn.Embedding(7, 3), p=nn.Embedding(4, 3), q=nn.Linear(3, 3), o=nn.Linear(3, 2))


def functional(s: Net, x: Tensor) -> Tensor:
    h = F.conv2d(input=x, weight=s.k, bias=s.kb, padding=(1, 0), stride=(1, 2))
    h = F.layer_norm(h, (4, 2), s.g, None)
    return F.linear(weight=s.w, input=h.tanh().flatten(1), bias=None) + s.b


def functions() -> Net:
    p = nn.Parameter
    layers = dict(k=p(numbers(2, 1, 3, 2)), kb=p(numbers(2)), g=p(numbers(4, 2)), w=p(numbers(2, 16)), b=p(numbers(2)))
    return Net(functional, **layers)


padded = torch.tensor([[0, 1, 1, 2], [0, 0, 3, 4], [5, 6, 1, 0], [2, 2, 2, 2], [1, 0, 3, 3]])

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "linear": (lambda: nn.Linear(3, 2), lambda: numbers(5, 3)),
    "linear, no bias": (lambda: nn.Linear(3, 2, bias=False), lambda: numbers(5, 3)),
    "one output": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)), lambda: numbers(5, 3)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: numbers(5, 3)),
    "in place": (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(True), nn.Linear(5, 3)), lambda: numbers(5, 3)),
    "in place, with positions": (
        lambda: Net(lambda s, x: s.o(torch.relu_(s.a(x)).mean(1)), a=nn.Linear(3, 4), o=nn.Linear(4, 2)),
        lambda: numbers(5, 3, 3),
    ),
    "residual": (
        lambda: Net(lambda s, x: s.o(x + s.b(s.a(x).relu())), a=nn.Linear(3, 4), b=nn.Linear(4, 3), o=nn.Linear(3, 2)),
        lambda: numbers(5, 3),
    ),
    "one example": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: numbers(1, 3)),
    "strided input": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: numbers(3, 10).mT[::2]),
    "conv1d": (lambda: flat(nn.Conv1d(2, 3, 3, 2, 1, 2), nn.Tanh(), width=9), lambda: numbers(5, 2, 7)),
    "conv1d, circular": (lambda: flat(nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), width=12), lambda: numbers(5, 2, 4)),
    "conv2d": (lambda: flat(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0)), nn.ReLU(), width=12), lambda: numbers(5, 2, 4, 3)),
    "conv2d, same": (lambda: flat(nn.Conv2d(2, 2, 2, padding="same", dilation=(1, 3)), width=24), lambda: numbers(5, 2, 4, 3)),
    "conv2d, valid": (lambda: flat(nn.Conv2d(2, 2, 2, padding="valid", dilation=2), width=4), lambda: numbers(5, 2, 4, 3)),
    "conv2d, reflect": (lambda: flat(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), width=18), lambda: numbers(5, 1, 3, 3)),
    "conv2d, groups": (lambda: flat(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), width=16), lambda: numbers(5, 2, 3, 3)),
    "conv2d, strided input": (
        lambda: flat(nn.Conv2d(2, 3, 2, bias=False), nn.Tanh(), width=12),
        lambda: numbers(5, 3, 3, 2).permute(0, 3, 1, 2),
    ),
    "conv3d": (lambda: flat(nn.Conv3d(1, 2, 2, padding=(1, 0, 0), dilation=(1, 1, 2)), width=24), lambda: numbers(5, 1, 2, 3, 4)),
    "conv3d, same": (lambda: flat(nn.Conv3d(1, 2, (1, 2, 2), padding="same"), width=24), lambda: numbers(5, 1, 2, 2, 3)),
    "conv transposed": (lambda: flat(nn.ConvTranspose1d(2, 2, 2), nn.Tanh(), width=8), lambda: numbers(5, 2, 3)),
    "conv of one pixel": (lambda: flat(nn.Conv2d(2, 2, 1, padding=1), nn.Tanh(), width=18), lambda: numbers(5, 2, 1, 1)),
    "embedding": (lambda: Net(lambda s, x: s.o(s.e(x).tanh().mean(1)), e=nn.Embedding(7, 3), o=nn.Linear(3, 2)), lambda: padded),
    "embedding, padding": (
        lambda: Net(lambda s, x: s.o(s.e(x).tanh().mean(1)), e=moved(nn.Embedding(7, 3, padding_idx=0)), o=nn.Linear(3, 2)),
        lambda: padded,
    ),
    "embedding, one token": (lambda: nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 2)), lambda: tokens(5)),
    "embedding, time major": (
        lambda: Net(
            lambda s, x: s.o((s.e(x.mT).tanh() * s.w[:, None, None]).sum(0)),
            e=nn.Embedding(7, 3), o=nn.Linear(3, 2), w=torch.linspace(0.1, 1.0, 5),
        ),
        lambda: tokens(5, 5),
    ),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(7, 3), nn.Tanh(), nn.Linear(3, 2)), lambda: padded),
    "tied embedding": (tied_embedding, lambda: padded),
    "positions": (positions, lambda: tokens(5, 4)),
    "as many positions as examples": (positions, lambda: tokens(4, 4)),
    "layer norm": (lambda: flat(nn.Linear(3, 4), moved(nn.LayerNorm(4)), nn.Tanh(), width=4), lambda: numbers(5, 3)),
    "layer norm, two axes": (lambda: flat(moved(nn.LayerNorm((2, 3))), nn.Tanh(), width=6), lambda: numbers(5, 2, 3)),
    "layer norm, no bias": (lambda: flat(moved(nn.LayerNorm(3, bias=False)), nn.Tanh(), width=6), lambda: numbers(5, 2, 3)),
    "rms norm": (lambda: flat(moved(nn.RMSNorm(3)), nn.Tanh(), width=6), lambda: numbers(5, 2, 3)),
    "group norm": (lambda: flat(nn.Conv1d(1, 4, 2), moved(nn.GroupNorm(2, 4)), nn.Tanh(), width=8), lambda: numbers(5, 1, 3)),
    "batch norm": (lambda: flat(nn.Conv2d(1, 2, 2), moved(nn.BatchNorm2d(2)), nn.Tanh(), width=8), lambda: numbers(5, 1, 3, 3)),
    "batch norm, flat": (lambda: flat(moved(nn.BatchNorm1d(3)), nn.Tanh(), width=3), lambda: numbers(5, 3)),
    "instance norm": (lambda: flat(moved(nn.InstanceNorm1d(2, affine=True)), nn.Tanh(), width=6), lambda: numbers(5, 2, 3)),
    "instance norm, tracked": (
        lambda: flat(moved(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)), nn.Tanh(), width=8),
        lambda: numbers(5, 2, 2, 2),
    ),
    "attention": (lambda: attention(True), lambda: numbers(5, 3, 4)),
    "attention, time major": (lambda: attention(False), lambda: numbers(5, 3, 4)),
    "attention, as long as wide": (lambda: attention(True), lambda: numbers(4, 4, 4)),
    "cross-attention": (cross, lambda: numbers(5, 3, 4)),
    "cross-attention, kdim": (lambda: cross(kdim=3, vdim=3), lambda: numbers(5, 3, 4)),
    "attention, extra bias": (lambda: cross(add_bias_kv=True), lambda: numbers(5, 3, 4)),
    "encoder": (encoder, lambda: numbers(5, 3, 4)),
    "encoder, norm first": (lambda: encoder(norm_first=True), lambda: numbers(3, 3, 4)),
    "decoder": (decoder, lambda: numbers(4, 3, 4)),
    "lstm": (lambda: recurrent(nn.LSTM), lambda: numbers(5, 3, 2)),
    "gru": (lambda: recurrent(nn.GRU, bidirectional=True), lambda: numbers(5, 3, 2)),
    "rnn": (lambda: recurrent(nn.RNN, num_layers=2, nonlinearity="relu"), lambda: numbers(5, 3, 2)),
    "bilinear": (lambda: Net(lambda s, x: s.o(s.b(x, x).tanh()), b=nn.Bilinear(2, 2, 3), o=nn.Linear(3, 2)), lambda: numbers(5, 2)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), lambda: numbers(5, 3)),
    "weight norm": (parametrised, lambda: numbers(5, 3)),
    "functions": (functions, lambda: numbers(5, 1, 4, 4)),
    "twice": (lambda: Net(lambda s, x: s.o(s.a(s.a(x).tanh()).tanh()), a=nn.Linear(3, 3), o=nn.Linear(3, 2)), lambda: numbers(5, 3)),
    "twice, of different lengths": (
        lambda: Net(lambda s, x: s.o((s.a(x).tanh().sum(1) + s.a(x[:, 0])).tanh()), a=nn.Linear(3, 3), o=nn.Linear(3, 2)),
        lambda: numbers(5, 4, 3),
    ),
    "used elsewhere": (
        lambda: Net(lambda s, x: s.o(s.a(x).tanh()) * s.a.weight.norm(), a=nn.Linear(3, 3), o=nn.Linear(3, 2)),
        lambda: numbers(5, 3),
    ),
    "class token": (
        lambda: Net(
            lambda s, x: s.o(s.a(torch.cat([s.t.expand(len(x), 1, 3), x], 1)).tanh().mean(1)),
            t=nn.Parameter(torch.randn(1, 1, 3)), a=nn.Linear(3, 3), o=nn.Linear(3, 2),
        ),
        lambda: numbers(5, 2, 3),
    ),
    "places": (
        lambda: Net(
            lambda s, x: s.o((s.a(x) + s.t).tanh().mean(1) + s.b),
            t=nn.Parameter(torch.randn(1, 4, 3)), b=nn.Parameter(torch.randn(3)), a=nn.Linear(3, 3), o=nn.Linear(3, 2),
        ),
        lambda: numbers(4, 4, 3),
    ),
    "places, added in place": (
        lambda: Net(
            lambda s, x: s.o(s.a(x).add_(s.t).tanh().mean(1)),
            t=nn.Parameter(torch.randn(2, 3)), a=nn.Linear(3, 3), o=nn.Linear(3, 2),
        ),
        lambda: numbers(5, 2, 3),
    ),
    "two tables": (
        lambda: Net(
            lambda s, x: s.o((s.a(x) + (s.t + s.u)).tanh().mean(1)),
            t=nn.Parameter(torch.randn(5, 3)), u=nn.Parameter(torch.randn(3)), a=nn.Linear(3, 3), o=nn.Linear(3, 2),
        ),
        lambda: numbers(5, 5, 3),
    ),
    "single numbers": (
        lambda: Net(
            lambda s, x: s.o((s.t * s.a(x)).tanh()) + s.c,
            t=nn.Parameter(torch.tensor(1.3)), a=nn.Linear(3, 3), o=nn.Linear(3, 2), c=nn.Parameter(torch.tensor(0.3)),
        ),
        lambda: numbers(5, 3),
    ),
    "time major": (time_major, lambda: numbers(5, 4, 3)),
    "time major, as long as wide": (time_major, lambda: numbers(4, 4, 3)),
    "time major, one example": (time_major, lambda: numbers(1, 4, 3)),
    "time major, twice as long": (time_major, lambda: numbers(2, 4, 3)),
    "rows of examples": (lambda: merged(True), lambda: numbers(4, 4, 3)),
    "rows of times": (lambda: merged(False), lambda: numbers(4, 4, 3)),
    "rows of times, two": (lambda: merged(False), lambda: numbers(2, 4, 3)),
    "rows of times, all alike": (lambda: merged(False), lambda: torch.ones(3, 4, 3, dtype=DOUBLE)),
    "films": (merged_images, lambda: numbers(3, 2, 1, 3, 3)),
    "unused": (unused, lambda: numbers(5, 3)),
    "two inputs": (
        lambda: Net(lambda s, x, z: s.o(s.a(x).tanh() + s.b(z)), a=nn.Linear(3, 3), b=nn.Linear(2, 3), o=nn.Linear(3, 2)),
        lambda: (numbers(5, 3), numbers(5, 2)),
    ),
    "named inputs": (
        lambda: Net(lambda s, *, ids, mask: s.o((s.e(ids) * mask[..., None]).sum(1).tanh()), e=nn.Embedding(7, 3), o=nn.Linear(3, 2)),
        lambda: {"ids": tokens(5, 4), "mask": torch.rand(5, 4, dtype=DOUBLE)},
    ),
    "padded sequences": (
        lambda: Net(
            lambda s, x, hidden: s.o((s.e(x, src_key_padding_mask=hidden) * ~hidden[..., None]).sum(1)),
            e=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 3, batch_first=True), 1, enable_nested_tensor=False),
            o=nn.Linear(4, 2),
        ),
        lambda: (numbers(4, 3, 4), torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 1]]).bool()),
    ),
    "a mask for all, first": (
        lambda: Net(lambda s, *, mask, x: s.o(s.a(x, x, x, attn_mask=mask)[0].mean(1)), a=nn.MultiheadAttention(4, 2, batch_first=True),
                    o=nn.Linear(4, 2)),
        lambda: {"mask": torch.ones(3, 3).triu(1).bool(), "x": numbers(5, 3, 4)},
    ),
    "sequences": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), lambda: numbers(5, 3, 3)),
    "images": (
        lambda: Net(lambda s, x: s.b(s.a(x).tanh()).movedim(1, -1), a=nn.Conv2d(1, 2, 2), b=nn.Conv2d(2, 2, 2, padding=1)),
        lambda: numbers(4, 1, 3, 2),
    ),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Any]:
    make, inputs = NETWORKS[name]
    return make().double(), inputs()


def part(x: Any, rows: slice) -> Any:
    if isinstance(x, dict):
        return {key: leaf if key == "mask" and "x" in x else leaf[rows] for key, leaf in x.items()}
    return tuple(leaf[rows] for leaf in x) if isinstance(x, tuple) else x[rows]


def size(x: Any) -> int:
    leaf = list(x.values())[-1] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
    return leaf.shape[0]


def output(model: Model, params: Params, x: Any) -> Tensor:
    with torch.no_grad():
        return model.forward(params, x, model.buffers())[0]


def targets(model: Model, params: Params, x: Any) -> Tensor:
    """Targets that fit, drawn from the model at these weights."""
    return model.likelihood(output(model, params, x), likelihood_params(params)).sample()


def jacobian(model: Model, params: Params, x: Any, names: Any = None) -> Tensor:
    """[B, *D, C, P], by plain reverse mode, output after output."""
    names = [name for name in params if ":" not in name] if names is None else list(names)
    buffers = model.buffers()

    def f(*leaves: Tensor) -> Tensor:
        return model.forward({**params, **dict(zip(names, leaves, strict=True))}, x, buffers)[0]

    parts = torch.autograd.functional.jacobian(f, tuple(params[name] for name in names))
    shape = output(model, params, x).shape
    return torch.cat([j.reshape(*shape, -1) for j in parts], -1)


def ggn(model: Model, params: Params, x: Any, y: Any, names: Any = None) -> Tensor:
    """sum_n J_n^T Lambda_n J_n over examples and positions, [P, P]."""
    f, rows = output(model, params, x), jacobian(model, params, x, names)
    fisher = model.likelihood.fisher(f, likelihood_params(params))
    seen = model.likelihood.observed(model.likelihood.target(y, f))
    if seen is not None:
        keep = (seen if seen.ndim == f.ndim else seen.unsqueeze(-1)).to(f).expand_as(f)
        fisher = fisher * keep.unsqueeze(-1) * keep.unsqueeze(-2)
    classes = f.shape[-1]
    rows, fisher = rows.reshape(-1, classes, rows.shape[-1]), fisher.reshape(-1, classes, classes)
    return torch.einsum("ncp,ncd,ndq->pq", rows, fisher, rows)


def gradients(model: Model, params: Params, x: Any, y: Tensor) -> Tensor:
    """Gradients of log p(y | x) of every example, [B, P]."""
    names = [name for name in params if ":" not in name]

    def score(*leaves: Tensor) -> Tensor:
        return model.log_likelihood({**params, **dict(zip(names, leaves, strict=True))}, (x, y), model.buffers())[0]

    parts = torch.autograd.functional.jacobian(score, tuple(params[name] for name in names))
    return torch.cat([p.reshape(len(y), -1) for p in parts], -1)


def hessian(model: Model, params: Params, x: Any, y: Tensor) -> Tensor:
    """Of -log p(y | x) summed over the examples, [P, P]."""
    names = [name for name in params if ":" not in name]

    def loss(*leaves: Tensor) -> Tensor:
        return -model.log_likelihood({**params, **dict(zip(names, leaves, strict=True))}, (x, y), model.buffers())[0].sum()

    with sdpa_kernel(SDPBackend.MATH):  # torch's fast attention cannot be differentiated twice
        blocks = torch.autograd.functional.hessian(loss, tuple(params[name] for name in names))
    sizes = [params[name].numel() for name in names]
    return torch.cat(
        [torch.cat([b.reshape(n, m) for b, m in zip(row, sizes, strict=True)], 1) for row, n in zip(blocks, sizes, strict=True)]
    )
