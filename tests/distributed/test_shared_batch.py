"""Random layers and BatchNorm on a share of a batch, against the layer on the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dubito
from distributed_ranks import on_ranks
from dubito.network.shared_batch import SharedBatch
from dubito.tensors.processes import join_processes
from dubito.tensors.shares import Share

X = torch.randn(7, 4, 5, 5, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "of channels": lambda x: F.dropout2d(x, 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, True),
    "in time": lambda x: F.dropout(x.flatten(2).movedim(2, 0), 0.4).movedim(0, 2).view_as(x),
    "over positions": lambda x: F.dropout(x.flatten(0, 1), 0.4).view_as(x),
    "channels last": lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last), 0.4),
    "noise": lambda x: x + torch.randn_like(x),
    "off": lambda x: F.dropout(x, 0.4, False) + F.dropout(x, 0.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_masks_are_rows_of_those_of_the_whole_batch(name):
    layer = LAYERS[name]
    torch.manual_seed(2)
    whole, after = layer(X), torch.rand(1)

    def work(rank):
        share = Share.of(7, rank, 2)
        torch.manual_seed(2)
        with join_processes() as processes, SharedBatch(share, processes):
            return layer(share.take(X)), torch.rand(1)

    parts = on_ranks(2, work)
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), whole, rtol=0, atol=1e-7)
    assert all(torch.equal(other, after) for _, other in parts)


@pytest.mark.parametrize(("total", "affine"), [(7, True), (1, False)])
def test_batch_norm_is_that_of_the_whole_batch_forwards_and_backwards(total, affine):
    """With one example the second process has a row that stands in for one, and counts for nothing."""
    slope = torch.randn(total, 4, 5, 5, generator=torch.Generator().manual_seed(1))

    def run(x, rows, context):
        layer = nn.BatchNorm2d(4, affine=affine, momentum=0.3)
        x = x.clone().requires_grad_()
        with context:
            y = layer(x)
        (y * rows).sum().backward()
        own = [leaf.grad for leaf in layer.parameters()]
        return y.detach(), x.grad, layer.running_mean, layer.running_var, own

    whole = run(X[:total], slope, torch.enable_grad())

    def work(rank):
        share = Share.of(total, rank, 2)
        with join_processes() as processes:
            rows = share.take(slope)
            rows[: share.idle] = 0
            y, x, *rest, own = run(share.take(X[:total]), rows, SharedBatch(share, processes))
            processes.sum_(own)
            return y[share.idle :], x[share.idle :], *rest, own

    first, second = on_ranks(2, work)
    for i in range(2):
        torch.testing.assert_close(torch.cat([first[i], second[i]]), whole[i], rtol=1e-4, atol=1e-5)
    for other in (first, second):
        torch.testing.assert_close(other[2:], whole[2:], rtol=1e-4, atol=1e-4)


INSIDE = {
    "lstm": lambda: nn.LSTM(5, 5, num_layers=2, dropout=0.5, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(5, 1, dropout=0.5, batch_first=True),
    "product": lambda: lambda x: (F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_draws_within_one_call_differs_from_process_to_process(name):
    x = X[:, 0]

    def work(rank):
        torch.manual_seed(2)
        layer = INSIDE[name]()
        given = (x, x, x) if name == "attention" else (x,)
        with join_processes() as processes, SharedBatch(Share((range(7 * rank, 7 * rank + 7),), 14), processes):
            return layer(*given)[0].detach(), torch.rand(1)

    (first, one), (second, other) = on_ranks(2, work)
    assert not torch.equal(first, second)
    assert torch.equal(one, other)


def test_a_transformer_layer_is_fitted():
    def work(rank):
        torch.manual_seed(0)
        net = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(20, 3))
        model = dubito.Model(net, dubito.Categorical())
        y = torch.arange(7) % 3
        return dubito.fit(model, dubito.MAP(epochs=3), (X[:, :, 0].mT, y), batch_size=4, progress=False).params

    first, second = on_ranks(2, work)
    for name, leaf in first.items():
        assert torch.equal(leaf, second[name])
