"""The readers of sentences in examples/: padding, and the masks of variational dropout against the recurrences written by hand."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

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
