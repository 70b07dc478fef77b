"""The unrolled recurrences against torch's own: values, gradients, vmap, and masks that do not change over time."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode

from dubito.network.recurrent import Mask, packed, padded, unrolled

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NETWORKS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "lstm_projected": partial(nn.LSTM, proj_size=2),
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
}
SITES = (("input", ""), ("hidden", ""), ("hidden", ".reverse"))  # of a layer, in the order asked
T, B, F, H, S = 5, 3, 4, 6, 3
LENGTHS = torch.tensor([2, 5, 2])  # unsorted, with a tie
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


class Unroll(TorchFunctionMode):
    """Answers the fused functions with `unrolled`, as the library does."""

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kind := getattr(func, "__name__", "")) in KINDS:
            self.calls += 1
            return unrolled(kind, args, self.mask)
        return func(*args, **(kwargs or {}))


def leaves(result: Any) -> list[Tensor]:
    """Output and final states of a recurrent module, in a flat list."""
    output, state = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(state if isinstance(state, tuple) else (state,))]


def network(name: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    return NETWORKS[name](F, H, dtype=dtype, **options)


def initial(net: Any, *lead: int) -> Any:
    """A random initial state: torch's default, zeros, would hide mistakes."""
    rows = net.num_layers * (1 + net.bidirectional)
    h = torch.randn(*lead, rows, B, net.proj_size or H, dtype=torch.float64, requires_grad=not lead)
    c = torch.randn(*lead, rows, B, H, dtype=torch.float64, requires_grad=not lead)
    return (h, c) if net.mode == "LSTM" else h


def arguments(net: Any, x: Tensor, hx: Any, weights: Any = None, sizes: Tensor | None = None) -> tuple[Any, ...]:
    """What the module would pass to `torch._VF`."""
    weights = net._flat_weights if weights is None else weights
    shared = (hx, weights, net.bias, net.num_layers, net.dropout, net.training, net.bidirectional)
    return (x, *shared, net.batch_first) if sizes is None else (x, sizes, *shared)


def table(net: Any, *lead: int, rows: int = B) -> dict[str, Tensor]:
    """A positive random mask for each site."""
    wide = (net.proj_size or H) * (1 + net.bidirectional)
    masks = {}
    for layer in range(net.num_layers):
        masks[f"input{layer}"] = torch.rand(*lead, rows, wide if layer else F, dtype=torch.float64) + 0.5
        for side in ("", ".reverse")[: 1 + net.bidirectional]:
            masks[f"hidden{layer}{side}"] = torch.rand(*lead, rows, net.proj_size or H, dtype=torch.float64) + 0.5
    return masks


def kind_of(name: str) -> str:
    return name.removesuffix("_projected")


@pytest.mark.parametrize("form", ["time_first", "batch_first", "packed"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients_equal_torch(name, layers, bidirectional, bias, form) -> None:
    net = network(name, num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=form == "batch_first")
    x = torch.randn((B, T, F) if form == "batch_first" else (T, B, F), dtype=torch.float64, requires_grad=True)
    hx = initial(net)
    data = pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if form == "packed" else x

    expected = leaves(net(data, hx))
    with Unroll() as mode:
        actual = leaves(net(data, hx))
    assert mode.calls == 1
    close(actual, expected)

    weights = [torch.randn_like(leaf) for leaf in expected]
    inputs = [x, *(hx if isinstance(hx, tuple) else (hx,)), *net.parameters()]
    gradient = partial(torch.autograd.grad, inputs=inputs, grad_outputs=weights, retain_graph=True)  # both share the packing
    close(gradient(actual), gradient(expected))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("shape", [(40, F), (40, B, F)], ids=["one sequence", "batch"])
@pytest.mark.parametrize("name", NETWORKS)
def test_float32_and_a_sequence_without_batch_axis(name, shape) -> None:
    net, x = network(name, num_layers=2, bidirectional=True, dtype=torch.float32), torch.randn(shape)
    with Unroll():
        actual = leaves(net(x))
    torch.testing.assert_close(actual, leaves(net(x)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stacked", [s for s in product([False, True], repeat=3) if any(s)])
@pytest.mark.parametrize("name", NETWORKS)
def test_vmap_equals_a_loop(name, stacked, packed) -> None:
    """Over any of the weights, the input with its initial state, and the masks."""
    net = network(name, num_layers=2, bidirectional=True)
    sizes = torch.tensor([3, 3, 1, 1, 1]) if packed else None
    rows = (9,) if packed else (T, B)
    lead = [(S,) if on else () for on in stacked]
    with torch.no_grad():
        weights = [torch.randn(*lead[0], *w.shape, dtype=torch.float64) for w in net._flat_weights]
        data = torch.randn(*lead[1], *rows, F, dtype=torch.float64), initial(net, *lead[1])
        masks = table(net, *lead[2])

        def run(weights, data, masks):
            x, hx = data
            return unrolled(kind_of(name), arguments(net, x, hx, weights, sizes), lambda site, _: masks[site])

        def pick(tree, on, i):
            if isinstance(tree, Tensor):
                return tree[i] if on else tree
            if isinstance(tree, dict):
                return {key: pick(leaf, on, i) for key, leaf in tree.items()}
            return type(tree)(pick(leaf, on, i) for leaf in tree)

        trees = (weights, data, masks)
        actual = vmap(run, in_dims=tuple(0 if on else None for on in stacked))(*trees)
        loop = [run(*(pick(tree, on, i) for tree, on in zip(trees, stacked, strict=True))) for i in range(S)]
    close(list(actual), [torch.stack(parts) for parts in zip(*loop, strict=True)])


@pytest.mark.parametrize("name", NETWORKS)
def test_module_under_vmap_and_grad(name) -> None:
    net, x = network(name, batch_first=True), torch.randn(B, T, F, dtype=torch.float64)
    stacks = {key: torch.randn(S, *leaf.shape, dtype=torch.float64) for key, leaf in net.named_parameters()}

    def loss(params):
        return functional_call(net, params, (x,))[0].square().sum()

    with Unroll():
        actual = vmap(grad(loss))(stacks)
    for i in range(S):
        close({k: v[i] for k, v in actual.items()}, grad(loss)({k: v[i] for k, v in stacks.items()}))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_masks_equal_a_loop_over_cells(name) -> None:
    net, x = network(name), torch.randn(T, B, F, dtype=torch.float64)
    masks, hx = table(net), initial(net)
    actual = unrolled(name, arguments(net, x, hx), lambda site, _: masks[site])

    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.RNNCell}[name](F, H, dtype=torch.float64)
    cell.load_state_dict({key.removesuffix("_l0"): leaf for key, leaf in net.state_dict().items()})
    h, c = (hx[0][0], hx[1][0]) if name == "lstm" else (hx[0], None)
    outputs = []
    for x_t in x * masks["input0"]:
        dropped = h * masks["hidden0"]
        if name == "lstm":
            h, c = cell(x_t, (dropped, c))
        elif name == "gru":  # GRUCell would mix the masked h into the new one, so by hand
            a = (cell.weight_ih @ x_t.T).T + cell.bias_ih
            b = (cell.weight_hh @ dropped.T).T + cell.bias_hh
            r, z = torch.sigmoid(a + b)[:, : 2 * H].chunk(2, 1)
            h = (1 - z) * torch.tanh(a[:, 2 * H :] + r * b[:, 2 * H :]) + z * h
        else:
            h = cell(x_t, dropped)
        outputs.append(h)
    close(list(actual), [torch.stack(outputs), h[None], *([] if c is None else [c[None]])])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_mask_shared_by_the_batch_scales_the_columns_of_the_weights(name, packed) -> None:
    net = network(name, num_layers=2, bidirectional=True)
    x, hx, masks = torch.randn(T, B, F, dtype=torch.float64), initial(net), table(net, rows=1)
    data: Any = pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if packed else x
    with Unroll(lambda site, _: masks[site]):
        actual = leaves(net(data, hx))
    with torch.no_grad():
        for layer, side in product(range(2), ("", "_reverse")):
            getattr(net, f"weight_ih_l{layer}{side}").mul_(masks[f"input{layer}"])
            getattr(net, f"weight_hh_l{layer}{side}").mul_(masks[f"hidden{layer}{side.replace('_', '.')}"])
    close(actual, leaves(net(data, hx)))


@pytest.mark.parametrize("name", NETWORKS)
def test_masks_of_a_packed_batch_follow_their_sequences(name) -> None:
    net = network(name, num_layers=2, bidirectional=True)
    lengths = [5, 2, 1]
    x, hx, masks = torch.randn(T, B, F, dtype=torch.float64), initial(net), table(net)
    with Unroll(lambda site, _: masks[site]):
        packed, *state = leaves(net(pack_padded_sequence(x, torch.tensor(lengths)), hx))
    start = 0
    padded = torch.zeros(T, B, packed.shape[1], dtype=torch.float64)
    for t in range(T):
        b = sum(length > t for length in lengths)
        padded[t, :b] = packed[start : start + b]
        start += b
    for i, length in enumerate(lengths):
        alone = tuple(part[:, i : i + 1] for part in hx) if isinstance(hx, tuple) else hx[:, i : i + 1]
        with Unroll(lambda site, _, i=i: masks[site][i : i + 1]):
            output, *final = leaves(net(x[:length, i : i + 1], alone))
        close([padded[:length, i : i + 1], *(part[:, i : i + 1] for part in state)], [output, *final])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_fresh_masks_are_asked_once_and_kept_over_time(name, batch_first) -> None:
    """A zero of the mask blocks the gradient at all steps; a mask drawn per step would block some steps only."""
    net, asked = network(name, num_layers=2, bidirectional=True, batch_first=batch_first), []
    x = torch.randn((B, T, F) if batch_first else (T, B, F), dtype=torch.float64, requires_grad=True)

    def mask(site, shape):
        asked.append((site, shape, torch.bernoulli(torch.full(shape, 0.5, dtype=torch.float64)) / 0.5))
        return asked[-1][2]

    with Unroll(mask):
        net(x)[0].sum().backward()
    out = net.proj_size or H
    sites = [(f"{part}{layer}{side}", width) for layer, width in ((0, F), (1, 2 * out)) for part, side in SITES]
    assert [(site, shape) for site, shape, _ in asked] == [
        (site, (B, width if site.startswith("input") else out)) for site, width in sites
    ]
    assert x.grad is not None
    passed = (x.grad.transpose(0, 1) if batch_first else x.grad) != 0
    assert torch.equal(passed, (asked[0][2] != 0).expand(T, B, F))
    assert 0 < passed.sum() < passed.numel()


@pytest.mark.parametrize("name", KINDS)
def test_a_dropped_hidden_unit_is_dropped_at_every_step(name) -> None:
    net, x = network(name), torch.randn(T, B, F, dtype=torch.float64)

    def mask(site, shape):
        return torch.arange(H, dtype=torch.float64).ge(2).to(torch.float64) if site == "hidden0" else None

    with Unroll(mask):
        net(x, initial(net))[0].sum().backward()
    assert torch.equal((net.weight_hh_l0.grad != 0).any(0), torch.arange(H) >= 2)


@pytest.mark.parametrize("name", KINDS[:3])
def test_gradients_reach_the_masks(name) -> None:
    """Concrete dropout learns its rate through them."""
    net = network(name, bidirectional=True)
    x, hx, sizes = torch.randn(6, F, dtype=torch.float64), initial(net), torch.tensor([3, 2, 1])
    masks = table(net)

    def run(*values):
        found = dict(zip(masks, values, strict=True))
        return unrolled(name, arguments(net, x, hx, sizes=sizes), lambda site, _: found[site])

    assert torch.autograd.gradcheck(run, tuple(mask.requires_grad_() for mask in masks.values()))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("total_length", [0, 6])
def test_packing_in_plain_torch_is_that_of_torch(batch_first, total_length) -> None:
    x, lengths = torch.randn(3, 4, 2), torch.tensor([4, 2, 2])
    x = x if batch_first else x.transpose(0, 1)
    expected = torch._VF._pack_padded_sequence(x, lengths, batch_first)
    found = packed(x, lengths, batch_first)
    assert all(map(torch.equal, found, expected))
    back = torch._VF._pad_packed_sequence(*expected, batch_first, -1.0, total_length)
    assert all(map(torch.equal, padded(*found, batch_first, -1.0, total_length), back))
