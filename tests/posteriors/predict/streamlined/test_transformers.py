"""Hugging Face text models of a few units, built from code: with and without a mask, in one pass and against draws."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import Categorical, Model, as_module
from dubito.posteriors import Gaussian as Posterior

hub = pytest.importorskip("transformers", reason="Hugging Face models: pip install transformers")

V = 30
SMALL: dict[str, Any] = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
                         "max_position_embeddings": 20, "initializer_range": 0.2}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": V, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0,
                        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}  # fmt: skip
DISTIL: dict[str, Any] = {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20,
                          "num_labels": 3, "initializer_range": 0.2}  # fmt: skip
T5: dict[str, Any] = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
                      "eos_token_id": 2, "decoder_start_token_id": 0}  # fmt: skip
LLAMA = {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0}

MODELS: dict[str, Callable[..., nn.Module]] = {
    "BERT": lambda **kw: hub.BertForSequenceClassification(hub.BertConfig(**SMALL, num_labels=3, **kw)),
    "DistilBERT": lambda **kw: hub.DistilBertForSequenceClassification(hub.DistilBertConfig(**DISTIL, **kw)),
    "RoBERTa": lambda **kw: hub.RobertaForSequenceClassification(hub.RobertaConfig(**SMALL, num_labels=3, pad_token_id=0, **kw)),
    "GPT-2": lambda **kw: hub.GPT2ForSequenceClassification(hub.GPT2Config(**GPT2, num_labels=3, **kw)),
    "GPT-2, words": lambda **kw: hub.GPT2LMHeadModel(hub.GPT2Config(**GPT2, **kw)),
    "Llama": lambda **kw: hub.LlamaForSequenceClassification(hub.LlamaConfig(**LLAMA, num_labels=3, **kw)),
    "Llama, words": lambda **kw: hub.LlamaForCausalLM(hub.LlamaConfig(**LLAMA, **kw)),
    "T5": lambda **kw: hub.T5ForConditionalGeneration(hub.T5Config(**T5, **kw)),
}


def inputs(name: str, masked: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    ids, lengths = torch.randint(3, V, (4, 6), generator=g), torch.tensor([6, 5, 2, 4])
    x = {"input_ids": ids}
    if masked:
        mask = (torch.arange(6) < lengths[:, None]).long()
        x = {"input_ids": ids * mask, "attention_mask": mask}
    if name == "T5":
        x["decoder_input_ids"] = torch.randint(3, V, (4, 3), generator=g)
    return x


def around(network: nn.Module, only: str = "") -> Posterior:
    """Standard deviations of a fiftieth of the weights' own size."""
    model = Model(network.eval(), Categorical(), only=only)
    mean = model.parameters()
    return Posterior.diagonal(model, mean, {n: torch.full_like(m, 4e-4 * float(m.square().mean())) for n, m in mean.items()})


def off(found, truth) -> float:
    """The mean relative error of standard deviations."""
    return float(((found.f_var / truth.f_var).sqrt() - 1).abs().mean())


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_text_models(name, attention, masked):
    torch.manual_seed(0)
    posterior, x = around(MODELS[name](attn_implementation=attention)), inputs(name, masked)
    truth = posterior.predict(x, "sampled", draws=1500)
    adjoint, forward = posterior.predict(x, "adjoint"), posterior.predict(x, "streamlined", rank=0)
    assert posterior.streamlined.traces[0][1].dynamic
    for p in (adjoint, forward):
        close = 0.2 * float(truth.f_var.max().sqrt())
        torch.testing.assert_close(p.f_mean, truth.f_mean, rtol=0, atol=close)
    assert off(adjoint, truth) < 0.05
    assert off(forward, truth) < 0.5
    module = as_module(posterior, x, rank=0)
    found = module(**{key: leaf[:3] for key, leaf in x.items()})
    torch.testing.assert_close(found["f_mean"], forward.f_mean[:3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["f_cov"], forward.covariances[0, :3], rtol=1e-3, atol=1e-6)
    if masked:  # one module for all masks
        full = {**x, "attention_mask": torch.ones_like(x["attention_mask"])}
        torch.testing.assert_close(module(**full)["f_mean"], posterior.predict(full, "streamlined", rank=0).f_mean)


@pytest.mark.filterwarnings("ignore")
def test_a_text_model_that_picks_tokens_by_a_mask():
    """T5 for sequences reads the last end-of-sentence token of each text, x[mask]: a program for those texts alone."""
    torch.manual_seed(0)
    posterior, x = around(hub.T5ForSequenceClassification(hub.T5Config(**T5, num_labels=3))), inputs("", True)
    for i, n in enumerate(x["attention_mask"].sum(1).tolist()):
        x["input_ids"][i, n - 1] = 2
    truth, p = posterior.predict(x, "sampled", draws=1500), posterior.predict(x, "streamlined", rank=0)
    torch.testing.assert_close(p.f_mean, truth.f_mean, rtol=0, atol=0.2 * float(truth.f_var.max().sqrt()))
    assert off(p, truth) < 0.5
    assert off(posterior.predict(x, "adjoint"), truth) < 0.05


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_adapters(name):
    """Random LoRA adapters in a certain network."""
    peft = pytest.importorskip("peft", reason="adapters: pip install peft")
    torch.manual_seed(0)
    network = MODELS[name]()
    targets = ["query", "value"] if name == "BERT" else ["q_proj", "v_proj"]
    network = peft.get_peft_model(copy.deepcopy(network), peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1))
    with torch.no_grad():
        for key, leaf in network.named_parameters():
            if "lora_" in key:
                leaf.normal_(0, 0.3)
    model = Model(network.eval(), Categorical(), only="lora_")
    mean = {key: leaf for key, leaf in model.parameters().items() if "lora_" in key}
    posterior = Posterior.diagonal(model, model.parameters(), {key: torch.full_like(leaf, 0.001) for key, leaf in mean.items()})
    x = inputs(name, True)
    truth = posterior.predict(x, "sampled", draws=3000)
    adjoint, forward = posterior.predict(x, "adjoint"), posterior.predict(x, "streamlined", rank=0)
    torch.testing.assert_close(adjoint.f_mean, truth.f_mean, rtol=0, atol=0.25 * float(truth.f_var.max().sqrt()))
    assert off(adjoint, truth) < 0.08
    assert off(forward, truth) < 0.6
    found = as_module(posterior, x, rank=0)(**x)
    torch.testing.assert_close(found["f_cov"], forward.covariances[0], rtol=1e-3, atol=1e-6)
