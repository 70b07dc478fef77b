"""The readers of sentences in examples/: padding, and the masks of variational dropout against the recurrences written by hand."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dubito
from dubito import MAP, SWAG, Categorical, Laplace, MCDropout, Model
from dubito.posteriors.predict.dropout import Masks

PATH = Path(__file__).parents[1] / "examples" / "sequences.py"
WORDS, RATE = 12, 0.4


@pytest.fixture(scope="module")
def sequences():
    spec = importlib.util.spec_from_file_location("sequences", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ids():
    return torch.tensor([[3, 5, 3, 7, 0, 0], [2, 2, 0, 0, 0, 0], [9, 4, 9, 11, 6, 4], [8, 0, 0, 0, 0, 0]])


def build(sequences, kind):
    torch.manual_seed(0)
    if kind == "encoder":
        return sequences.Encoder(WORDS, width=8, heads=2, hidden=12, dropout=0.0)
    return sequences.Recurrent(WORDS, kind=kind, width=5, hidden=4)


@pytest.mark.parametrize("kind", ["lstm", "gru", "encoder"])
def test_padding_changes_no_prediction(sequences, ids, kind):
    model, y = Model(build(sequences, kind), Categorical()), torch.tensor([0, 1, 1, 0])
    longer, cut = nn.functional.pad(ids, (0, 3)), ids[1:2, :2]
    trained = dubito.fit(model, MAP(epochs=2), (ids, y))
    found = [trained, dubito.fit(model, Laplace(check=False), (ids, y), start=trained)]
    if kind != "encoder":
        found.append(dubito.fit(model, MCDropout(epochs=2, at="", rate=RATE, draws=8), (ids, y)))
    for posterior in found:
        p = posterior.predict(ids).mean
        torch.testing.assert_close(posterior.predict(longer).mean, p, atol=1e-5, rtol=0)
        torch.testing.assert_close(posterior.predict(cut).mean, p[1:2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("consistent", [False, True])
def test_one_mask_a_sentence_on_words_inputs_and_states(sequences, ids, kind, consistent):
    """Every mask is asked for once, and the network with these masks is the recurrence of the paper, word by word."""
    network = build(sequences, kind)
    posterior = dubito.fit(Model(network, Categorical()), MCDropout(epochs=0, at="", rate=RATE), (ids, torch.zeros(4).long()))
    masks: dict[str, torch.Tensor] = {}

    class Noted(Masks):
        def mask(self, site, shape, rate, like, batch_axis=0):
            found = super().mask(site, shape, rate, like, batch_axis)
            assert site not in masks, "a second mask in one pass"
            masks[site] = found.expand(len(ids), -1)
            return found

        def apply(self, x, site, shape, rate, batch_axis=0):  # what enters a linear layer
            return x * self.mask(site, shape, rate, x, batch_axis)

    seed = torch.tensor(7) if consistent else None
    with torch.no_grad(), Noted(posterior.dropout, {**posterior.buffers, **posterior.params}, seed=seed):
        torch.manual_seed(1)
        f = posterior.model.call(posterior.params, ids, posterior.buffers)[0]

    assert {site: mask.shape[1] for site, mask in masks.items()} == {
        "words": WORDS, "rnn/input0": 5, "rnn/hidden0": 4, "head": 4
    }  # fmt: skip
    for mask in masks.values():
        assert set((mask * (1 - RATE)).round(decimals=5).unique().tolist()) == {0.0, 1.0}
        alike = torch.equal(mask, mask[:1].expand_as(mask))
        assert alike == consistent, "sentences share masks only if a draw is one function"

    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[kind](5, 4)
    cell.load_state_dict({name.removesuffix("_l0"): leaf for name, leaf in network.rnn.state_dict().items()})
    expected = []
    with torch.no_grad():
        for b, sentence in enumerate(ids):
            h, c = torch.zeros(4), torch.zeros(4)
            for word in sentence[sentence > 0]:
                x = network.words.weight[word] * masks["words"][b, word] * masks["rnn/input0"][b]
                masked = h * masks["rnn/hidden0"][b]
                if kind == "lstm":
                    h, c = cell(x, (masked, c))
                else:  # the mask is on what the gates see; the state itself is carried on whole
                    after = cell(x, masked)
                    z = torch.sigmoid((cell.weight_ih @ x + cell.bias_ih + cell.weight_hh @ masked + cell.bias_hh)[4:8])
                    h = after + z * (h - masked)
            expected.append(network.head(h * masks["head"][b]))
    torch.testing.assert_close(f, torch.stack(expected))


def test_naive_dropout_is_new_at_every_word(sequences):
    torch.manual_seed(0)
    network = sequences.Recurrent(WORDS, width=5, hidden=4, naive=0.5).train()
    seen = []
    network.rnn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    nn.init.ones_(network.words.weight)
    network(torch.full((1, 50), 3))
    assert 0.3 < float(seen[0].eq(0).float().mean()) < 0.7
    assert not torch.equal(seen[0], seen[0][:, :1].expand_as(seen[0]))


@pytest.mark.parametrize("kind", ["lstm", "gru", "encoder"])
def test_posteriors_around_it(sequences, ids, kind):
    model, y = Model(build(sequences, kind), Categorical()), torch.tensor([0, 1, 1, 0])
    trained = dubito.fit(model, MAP(epochs=3), (ids, y))
    for method in (Laplace("dense", subset="last_layer", check=False), Laplace(check=False), SWAG(epochs=4)):
        p = dubito.fit(model, method, (ids, y), start=trained).predict(ids)
        assert p.mean.shape == (4, 2)
        assert (p.uncertainty.epistemic > 0).all()


class Packed(nn.Module):
    """A recurrent network of packed sequences: a tagger, or a classifier by its last states."""

    def __init__(self, kind, tags, *, ordered=True, batch_first=True):
        super().__init__()
        self.rnn = getattr(nn, kind)(3, 2, 2, bidirectional=True, batch_first=batch_first)
        self.head = nn.Linear(4, 2)
        self.tags, self.ordered, self.batch_first = tags, ordered, batch_first

    def forward(self, x, lengths):
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=self.ordered)
        states, last = self.rnn(packed)
        if self.tags:
            states = pad_packed_sequence(states, batch_first=self.batch_first, total_length=max(x.shape[:2]))[0]
            return self.head(states if self.batch_first else states.transpose(0, 1))
        last = last[0] if isinstance(last, tuple) else last
        return self.head(torch.cat([last[-2], last[-1]], 1))


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize(("ordered", "batch_first"), [(True, True), (False, True), (False, False)])
def test_laplace_of_packed_sequences_is_brute_force(kind, tags, ordered, batch_first, structure):
    torch.manual_seed(0)
    network = Packed(kind, tags, ordered=ordered, batch_first=batch_first).double()
    x, lengths = torch.randn(4, 5, 3).double(), torch.tensor([5, 4, 2, 1] if ordered else [2, 5, 1, 4])
    y = torch.randint(0, 2, (4, 5) if tags else (4,))
    y = y.masked_fill(torch.arange(5) >= lengths.unsqueeze(1), -100) if tags else y
    model = Model(network, Categorical(), dubito.priors.Normal(scale=1.0))
    method = Laplace(structure, check=False, optimize_evidence=False)
    posterior = dubito.fit(model, method, [((x, lengths), y)])

    out, weights = network(x, lengths), list(network.parameters())
    rows = [torch.autograd.grad(o, weights, retain_graph=True, materialize_grads=True) for o in out.flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, (-1, 2))  # [N, C, P]
    p = out.detach().softmax(-1).view(-1, 2)
    fisher = (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) * y.ne(-100).view(-1, 1, 1)
    precision = torch.einsum("ncp,ncd,ndq->pq", jacobian, fisher, jacobian) + torch.eye(jacobian.shape[-1]).double()
    covariance = posterior.covariance.dense()
    if structure == "dense":
        torch.testing.assert_close(covariance, torch.linalg.inv(precision))
    elif structure == "diagonal":
        torch.testing.assert_close(covariance, (1 / precision.diagonal()).diag())
    expected = torch.einsum("ncp,pq,ndq->ncd", jacobian, covariance, jacobian).view(*out.shape, 2)
    found = posterior.predict((x, lengths), "linearized")
    torch.testing.assert_close(found.means[0], out.detach())
    torch.testing.assert_close(found.cov[0], expected)


def test_draws_of_a_tagger_of_packed_sequences_are_those_of_its_weights():
    torch.manual_seed(0)
    network, x, lengths = Packed("LSTM", True, ordered=False), torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 4])
    posterior = dubito.fit(
        Model(network, Categorical()), Laplace("diagonal", check=False), [((x, lengths), torch.zeros(4, 5).long())]
    )
    drawn = posterior.sample(3, torch.Generator().manual_seed(0))
    functions = dubito.posteriors.Samples(posterior.model, drawn, posterior.buffers).predict((x, lengths)).means
    for i in range(3):
        weights = {name: leaf[i] for name, leaf in drawn.items()}
        torch.testing.assert_close(functions[i], torch.func.functional_call(network, weights, (x, lengths)), atol=1e-5, rtol=1e-4)
