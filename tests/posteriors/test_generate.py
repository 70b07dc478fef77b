"""Texts from a posterior: two ways of averaging, against enumeration of all texts."""

import itertools
import math

import pytest
import torch
from torch import nn

import dubito
from dubito.posteriors import Mixture, Samples
from dubito.posteriors.predictive import LatentMixture

WORDS = 3


class Bigrams(nn.Module):
    """The logits of the next token, by the last one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)
        self.calls = 0

    def forward(self, input_ids, attention_mask=None):
        return self.table(input_ids)


def posterior(draws=4, weights=None, likelihood=None):
    torch.manual_seed(1)
    model = dubito.Model(Bigrams(), likelihood or dubito.NextToken())
    return Samples(model, {"table.weight": 2 * torch.randn(draws, WORDS, WORDS)}, {}, weights=weights)


def texts(post, prompt, n):
    """The probability of every text of n tokens under every draw, {text: [S]}."""
    logs = post.params["table.weight"].log_softmax(-1).double()
    found = {}
    for text in itertools.product(range(WORDS), repeat=n):
        before = (prompt, *text[:-1])
        found[text] = sum(logs[:, a, b] for a, b in zip(before, text, strict=True)).exp()
    return found


@pytest.mark.parametrize("weights", [None, torch.tensor([0.1, 0.2, 0.3, 0.4])])
def test_both_ways_give_the_probabilities_that_they_promise(weights):
    post = posterior(weights=weights)
    shares = torch.full((4,), 0.25).double() if weights is None else weights.double()
    prompt = torch.tensor([[0], [1], [2]])
    whole = post.generate(prompt, 3, "sequences", seed=3)
    single = post.generate(prompt, 3, seed=3)
    for row in range(3):
        probability = shares @ texts(post, row, 3)[tuple(whole.tokens[row].tolist())]
        torch.testing.assert_close(whole.log_prob[row].exp().double(), probability, rtol=1e-4, atol=0)
        logs = post.params["table.weight"].softmax(-1).double()
        before = [row, *single.tokens[row].tolist()]
        product = math.prod(float(shares @ logs[:, a, b]) for a, b in itertools.pairwise(before))
        assert float(single.log_prob[row].exp()) == pytest.approx(product, rel=1e-4)
    joint = post.predict(torch.cat([prompt, whole.tokens], 1)).joint_log_prob(torch.cat([prompt, whole.tokens], 1))
    torch.testing.assert_close(whole.log_prob.double(), joint, rtol=1e-4, atol=1e-5)
    assert single.weights.allclose(shares.float().expand(3, -1))
    likely = torch.stack([texts(post, row, 3)[tuple(whole.tokens[row].tolist())] for row in range(3)]) * shares
    torch.testing.assert_close(whole.weights.double(), likely / likely.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_sequences_are_draws_of_the_predictive_and_their_doubt_is_mutual_information():
    post, many = posterior(), 20_000
    made = post.generate(torch.zeros(many, 1, dtype=torch.long), 2, "sequences")
    found = texts(post, 0, 2)
    expected = torch.stack([p.mean() for p in found.values()])
    index = made.tokens @ torch.tensor([WORDS, 1])
    counts = torch.bincount(index, minlength=WORDS**2).double()
    chi_square = ((counts - many * expected).square() / (many * expected)).sum()
    assert chi_square < 26.1  # 99.9 % of chi-square with 8 degrees of freedom
    each = torch.stack(list(found.values()))  # [texts, S]
    entropy = -(expected * expected.log()).sum()
    information = entropy + (each * each.log()).sum(0).mean()
    split = made.text_uncertainty
    error = float(split.epistemic.std()) / many**0.5
    assert float(split.epistemic.mean()) == pytest.approx(float(information), abs=4 * error + 1e-3)
    error = float(split.total.std()) / many**0.5
    assert float(split.total.mean()) == pytest.approx(float(entropy), abs=4 * error + 1e-3)
    torch.testing.assert_close(split.total, split.aleatoric + split.epistemic)


def test_a_text_ends_at_stop_or_in_doubt():
    post = posterior()
    prompt = torch.zeros(50, 1, dtype=torch.long)
    made = post.generate(prompt, 6, stop=2, seed=1)
    for row, length in zip(made.tokens.tolist(), made.lengths.tolist(), strict=True):
        assert 2 not in row[: length - 1]
        assert row[length - 1] == 2 or length == 6
        assert set(row[length:]) <= {2}
    assert float(made.log_probs[made.tokens.new_tensor(range(6)) >= made.lengths.unsqueeze(1)].abs().sum()) == 0
    doubts = post.generate(prompt, 4, seed=1).uncertainty.epistemic
    bound = float(doubts[:, 1].median())
    careful = post.generate(prompt, 4, seed=1, doubt=bound)
    assert bool(careful.doubted.any())
    assert float(careful.uncertainty.epistemic.max()) <= bound
    assert bool((careful.lengths[careful.doubted] < 4).all())
    whole = post.generate(prompt, 6, seed=1).uncertainty.epistemic.double().cumsum(1)
    bound = float(whole[:, -1].median())
    text = post.generate(prompt, 6, seed=1, text_doubt=bound)
    assert torch.equal(text.lengths, (whole <= bound + 1e-7).sum(1))
    assert torch.equal(text.doubted, text.lengths < 6)
    assert 0 < int(text.doubted.sum()) < 50
    assert float(text.text_uncertainty.epistemic.max()) <= bound + 1e-6
    first = post.generate(prompt, 4, doubt=-1.0)
    assert bool(first.doubted.all())
    assert first.lengths.tolist() == [0] * 50


def test_the_same_texts_in_pieces_as_a_dict_and_again():
    post = posterior(7)
    prompt = torch.tensor([[0, 1], [2, 2]])
    state = torch.get_rng_state()
    made = post.generate(prompt, 5, "sequences")
    for other in (
        post.generate(prompt, 5, "sequences", memory=1e-9),
        post.generate({"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, 5, "sequences"),
    ):
        assert torch.equal(made.tokens, other.tokens)
        torch.testing.assert_close(made.log_probs, other.log_probs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(made.tokens, post.generate(prompt, 5, "sequences", seed=9).tokens)
    greedy = post.generate(prompt, 1, greedy=True).tokens
    assert torch.equal(greedy, post.predict(prompt).mean[:, -1:].argmax(-1))


def test_mixtures_of_posteriors_write_too():
    a, b = posterior(2), posterior(4)
    mixed = Mixture(a.model, (a, Samples(a.model, b.params, {})), (0.7, 0.3))
    made = mixed.generate(torch.tensor([[0]]), 2, "sequences")
    text = tuple(made.tokens[0].tolist())
    probability = 0.7 * texts(a, 0, 2)[text].mean() + 0.3 * texts(b, 0, 2)[text].mean()
    assert float(made.log_prob.exp()) == pytest.approx(float(probability), rel=1e-4)
    assert made.weights.shape == (1, 6)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"whole numbers \[batch, tokens\]"),
        (torch.zeros(1, 3), r"whole numbers \[batch, tokens\]"),
        ({"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.tensor([[0, 1]])}, "prompts have padding"),
        ({"input_ids": torch.ones(1, 2).long(), "labels": torch.ones(1, 2).long()}, r"leave out \['labels'\]"),
    ],
)
def test_wrong_prompts_are_told(prompt, message):
    with pytest.raises(ValueError, match=message):
        posterior().generate(prompt, 2)


def test_prompts_as_people_hold_them_give_the_same_texts():
    prompt = torch.tensor([[0, 1], [2, 0]])
    for other in (prompt.tolist(), prompt.numpy(), prompt.int()):
        assert torch.equal(posterior().generate(other, 3).tokens, posterior().generate(prompt, 3).tokens)
    with pytest.raises(ValueError, match="n must be a whole number; got 2.5"):
        posterior().generate(prompt, 2.5)
    with pytest.raises(ValueError, match=r"prompts are whole numbers \[batch, tokens\].* got int64 \[2\]"):
        posterior().generate(prompt[0], 3)


def test_other_networks_are_told():
    net = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(8, 3))
    one = dubito.fit(
        dubito.Model(net, dubito.Categorical()), dubito.MAP(epochs=1), (torch.ones(4, 2).long(), torch.ones(4).long())
    )
    with pytest.raises(ValueError, match=r"logits \[batch, tokens, words\]"):
        one.generate(torch.ones(1, 2).long(), 1)
    with pytest.raises(ValueError, match="way must be one of|way"):
        posterior().generate(torch.ones(1, 2).long(), 1, "words")


def test_the_next_token_is_what_is_compared():
    f = torch.randn(2, 4, WORDS)
    y = torch.randint(WORDS, (2, 4))
    shifted = dubito.NextToken()
    by_hand = f.log_softmax(-1)[:, :-1].gather(-1, y[:, 1:, None]).squeeze(-1)
    model = dubito.Model(Bigrams(), shifted)
    torch.testing.assert_close(model.score(f, y, {}), by_hand.sum(1))
    p = LatentMixture(shifted, f.unsqueeze(0))
    torch.testing.assert_close(p.log_prob(y), by_hand.sum(1))
    assert float(dubito.metrics.nll(p, y)) == pytest.approx(-float(by_hand.mean()), rel=1e-5)
    assert float(dubito.metrics.perplexity(p, y)) == pytest.approx(math.exp(-float(by_hand.mean())), rel=1e-5)
    gone = y.clone()
    gone[:, 2] = -100
    torch.testing.assert_close(p.log_prob(gone), by_hand[:, 0] + by_hand[:, 2])
    found = dubito.judge(posterior(), (y, y), metrics=["nll", "accuracy"])
    assert found.n == 6
    with pytest.raises(ValueError, match="at least two tokens"):
        shifted.target(y[:, :1], f[:, :1])


def test_a_closed_link_keeps_the_shift():
    f, y = torch.randn(1, 2, 4, WORDS), torch.randint(WORDS, (2, 4))
    p = LatentMixture(dubito.NextToken(), f, torch.full_like(f, 1e-9), link="probit")
    torch.testing.assert_close(p.log_prob(y), LatentMixture(dubito.NextToken(), f).log_prob(y), rtol=1e-3, atol=1e-3)


def test_labels_that_are_the_inputs_train():
    ids = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]]).repeat(20, 1)
    model = dubito.Model(Bigrams(), dubito.NextToken())
    batches = [{"input_ids": ids, "labels": ids}]
    post = dubito.fit(model, dubito.MAP(epochs=150, learning_rate=0.1), batches)
    assert post.generate(ids[:1, :1], 5, greedy=True).tokens.tolist() == [[1, 2, 0, 1, 2]]
    joint = post.predict(ids).joint_log_prob(ids)
    torch.testing.assert_close(joint.float(), post.predict(ids).log_prob(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="draws of functions"):
        LatentMixture(dubito.NextToken(), torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 2, 3)).joint_log_prob(ids[:1, :2])


# --- scores, against enumeration -----------------------------------------------------------------------------------------


def test_scores_of_texts_are_those_of_an_enumeration():
    """Of all texts of four tokens that begin with a 1: both ways of averaging are distributions, and score padding as nothing."""
    post = posterior(3, torch.tensor([0.5, 0.3, 0.2]))
    every = torch.tensor([(1, *text) for text in itertools.product(range(WORDS), repeat=3)])
    p = post.predict(every)
    logs = post.params["table.weight"].log_softmax(-1)
    each = torch.stack([logs[:, every[:, t], every[:, t + 1]] for t in range(3)], -1)  # [S, texts, 3]
    shares = post.weights.reshape(3, 1, 1)
    tokens = (each.exp() * shares).sum(0).log()
    torch.testing.assert_close(p.log_prob_by_position(every)[:, :3], tokens)
    assert bool((p.log_prob_by_position(every)[:, 3] == 0).all())
    torch.testing.assert_close(p.log_prob(every), tokens.sum(1))
    joint = (each.sum(-1).exp() * post.weights.unsqueeze(1)).sum(0)
    torch.testing.assert_close(p.joint_log_prob(every).exp().float(), joint)
    assert float(p.log_prob(every).exp().sum()) == pytest.approx(1, rel=1e-5)
    assert float(p.joint_log_prob(every).exp().sum()) == pytest.approx(1, rel=1e-5)
    short = every.clone()
    short[::2, 2:] = -100  # padding
    kept = tokens.clone()
    kept[::2, 1:] = 0
    torch.testing.assert_close(p.log_prob(short), kept.sum(1))
    inside = each.clone()
    inside[:, ::2, 1:] = 0
    torch.testing.assert_close(p.joint_log_prob(short).exp().float(), (inside.sum(-1).exp() * post.weights.unsqueeze(1)).sum(0))
    count = 3 * 27 - 2 * 14
    assert float(dubito.metrics.perplexity(p, short)) == pytest.approx(math.exp(-float(kept.sum()) / count), rel=1e-5)
    judged = dubito.judge(post, [{"input_ids": every, "labels": short}], metrics=["nll"])
    assert judged.n == count
    assert float(judged["nll"]) == pytest.approx(-float(kept.sum()) / count, rel=1e-5)


# --- adapters of a small transformer, with padding -------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base, (outputs, inputs) = base, base.weight.shape
        self.lora_a, self.lora_b = nn.Parameter(torch.empty(rank, inputs)), nn.Parameter(torch.empty(outputs, rank))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.lora_a, std=0.3)
        nn.init.zeros_(self.lora_b)

    def forward(self, x):
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)


class Letters(nn.Module):
    def __init__(self, letters=6, width=8):
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Embedding(16, width)
        self.attend, self.head = nn.Linear(width, 3 * width), nn.Linear(width, letters)

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        q, k, v = self.attend(h).chunk(3, -1)
        attention, length = nn.functional.scaled_dot_product_attention, input_ids.shape[1]
        if attention_mask is None or bool(attention_mask.all()):
            return self.head(torch.tanh(h + attention(q, k, v, is_causal=True)))
        seen = torch.ones(length, length).tril().bool() & attention_mask.bool().unsqueeze(1)
        return self.head(torch.tanh(h + attention(q, k, v, attn_mask=seen)))


METHODS = {
    "map": dubito.MAP(epochs=2, check=False),
    "laplace": dubito.Laplace(check=False),
    "laplace, last layer": dubito.Laplace(subset="head", check=False),
    "laplace, low rank": dubito.Laplace("lowrank", rank=3, check=False),
    "online laplace": dubito.OnlineLaplace(epochs=3, every=1, check=False),
    "ivon": dubito.IVON(epochs=2, check=False),
    "swag": dubito.SWAG(epochs=4, check=False),
    "sghmc": dubito.SGHMC(draws=4, burn_in=4, thin=1),
    "variational": dubito.Variational(epochs=2, check=False),
    "ensemble": dubito.Ensemble(dubito.MAP(epochs=2, check=False), 3),
    "ensemble of ivon": dubito.Ensemble(dubito.IVON(epochs=2, check=False), 2),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_adapters_and_padding(name):
    torch.manual_seed(0)
    net = Letters()
    net.attend, net.head = LoRA(net.attend), LoRA(net.head)
    ids = torch.randint(6, (12, 8))
    mask = torch.ones_like(ids)
    mask[::3, 5:] = 0
    labels = torch.where(mask.bool(), ids, -100)
    batches = [{"input_ids": ids[i : i + 6], "attention_mask": mask[i : i + 6], "labels": labels[i : i + 6]} for i in (0, 6)]
    model = dubito.Model(net, dubito.NextToken(), dubito.priors.Normal(), only="lora")
    before = {key: leaf.clone() for key, leaf in net.state_dict().items()}
    post = dubito.fit(model, METHODS[name], batches, seed=1)
    assert all(torch.equal(leaf, before[key]) for key, leaf in net.state_dict().items())
    x = {"input_ids": ids, "attention_mask": mask}
    p = post.predict(x, seed=1)
    assert p.uncertainty.total.shape == (12, 8)
    other = torch.where(mask.bool(), ids, (ids + 1) % 6)  # what stands in the padding is nobody's concern
    again = post.predict({"input_ids": other, "attention_mask": mask}, seed=1)
    torch.testing.assert_close(again.log_prob(labels), p.log_prob(labels), rtol=1e-4, atol=1e-5)
    judged = dubito.judge(post, batches, metrics=["nll", "accuracy"])
    assert judged.n == int((labels[:, 1:] != -100).sum())
    # the texts have the probability that the predictive of the same functions gives them
    made = post.generate({"input_ids": ids[:2, :1], "attention_mask": mask[:2, :1]}, 5, "sequences", seed=1)
    whole = torch.cat([ids[:2, :1], made.tokens], 1)
    functions = post.functions(seed=1)
    scores = functions(whole).joint_log_prob(whole)
    torch.testing.assert_close(made.log_prob.double(), scores.double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(post.generate(ids[:2, :1], 5, "sequences", seed=1).tokens, made.tokens)
    if isinstance(post, dubito.posteriors.Gaussian):
        same = post.predict(whole, draws=post.draws, seed=1).joint_log_prob(whole)
        torch.testing.assert_close(made.log_prob.double(), same.double(), rtol=1e-4, atol=1e-4)
    quiet = post.generate(ids[:2, :1], 5, text_doubt=-1.0)
    assert bool(quiet.doubted.all())
