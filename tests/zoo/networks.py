"""The networks of the zoo: tiny ones of other people's libraries, built from code, and what plain torch makes of odd modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dubito import Categorical, Gaussian, Model, NextToken
from dubito.model.likelihoods import Likelihood

WORDS, CLASSES, ROWS = 20, 3, 6


class Problem(NamedTuple):
    """A model, and the data of a fit: pairs, or batches where the examples lie along no axis."""

    model: Model
    x: Any
    y: Any
    another: Callable[[], nn.Module]  # the same network again


@dataclass(frozen=True)
class Entry:
    """How a problem is made."""

    network: Callable[[], nn.Module]
    x: Callable[[], Any]
    likelihood: Likelihood = field(default_factory=Categorical)
    package: str = "torch"
    only: str = ""
    shape: tuple[int, ...] = (ROWS,)  # of the targets
    options: dict[str, Any] = field(default_factory=dict)  # of the model
    y: Callable[[Any], Tensor] | None = None  # targets that follow from the inputs
    double: bool = True  # whether the network runs in float64

    def problem(self) -> Problem:
        """Made anew, the same every time."""
        network = self.made()
        x = self.x()
        numbers = isinstance(self.likelihood, Gaussian)
        y = torch.randn(self.shape) if numbers else torch.randint(CLASSES, self.shape)
        y = y if self.y is None else self.y(x)
        return Problem(Model(network, self.likelihood, only=self.only, **self.options), x, y, self.made)

    def made(self) -> nn.Module:
        """The network."""
        torch.manual_seed(0)
        return self.network().eval()


def floats(*shape: int) -> Callable[[], Tensor]:
    """Inputs of independent normal numbers."""
    return lambda: torch.randn(ROWS, *shape)


def words(length: int = 5) -> Tensor:
    """Sentences."""
    return torch.randint(2, WORDS, (ROWS, length))


def text(length: int = 5) -> dict[str, Tensor]:
    """Sentences as a tokenizer gives them, padded to one length."""
    lengths = torch.tensor([length, 3, length, 2, 4, length])
    mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
    return {"input_ids": words(length) * mask, "attention_mask": mask}


def unpadded() -> dict[str, Tensor]:
    """Sentences without a mask."""
    return {"input_ids": words()}


def pixels() -> dict[str, Tensor]:
    """Images by name."""
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16)}


def own_tokens(x: Any) -> Tensor:
    """The targets of a causal language model; padding is not predicted."""
    ids = x["input_ids"] if isinstance(x, dict) else x
    return ids if not isinstance(x, dict) or "attention_mask" not in x else ids.masked_fill(x["attention_mask"] == 0, -100)


# Hugging Face


def hugging_face(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A network of transformers, from a configuration."""

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, kind)(getattr(transformers, config)(**settings))

    return make


BERT = dict(vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, num_labels=CLASSES)
GPT = dict(vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=2, n_head=2, num_labels=CLASSES, pad_token_id=0)
LLAMA = dict(
    vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=8, num_labels=CLASSES, pad_token_id=0,
)  # fmt: skip
MIXTRAL = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}
T5 = dict(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0)
VIT = dict(
    image_size=16,
    patch_size=8,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=12,
    num_labels=CLASSES,
)
SWIN = dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, num_labels=CLASSES)
STAGES = dict(hidden_sizes=[4, 8], depths=[1, 1], num_labels=CLASSES)
CONVNEXT = {**STAGES, "num_stages": 2, "patch_size": 4, "image_size": 16}
MAMBA = dict(
    vocab_size=WORDS, hidden_size=8, state_size=4, num_hidden_layers=1, time_step_rank=2, pad_token_id=0, use_cache=False
)


def lora() -> nn.Module:
    """Adapters of BERT's attention."""
    import peft

    base = hugging_face("BertForSequenceClassification", "BertConfig", **BERT)()
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query", "value"]))
    for name, p in made.named_parameters():
        if "lora_B" in name:  # zero at first, where the posterior of lora_A would be the prior
            nn.init.normal_(p, std=0.3)
    return made


def sequences() -> dict[str, Tensor]:
    """Sentences, and what a decoder reads."""
    return {**text(), "decoder_input_ids": words(3)}


# timm, segmentation-models-pytorch, x-transformers


def timm_network(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A network of timm, without pretrained weights."""

    def make() -> nn.Module:
        from zoo import stand_in

        stand_in.install()
        import timm

        return timm.create_model(name, num_classes=CLASSES, **settings)

    return make


def u_net() -> nn.Module:
    """Of segmentation-models-pytorch."""
    from zoo import stand_in

    stand_in.install()
    import segmentation_models_pytorch as smp

    return smp.Unet("tu-mobilenetv3_small_050", encoder_weights=None, classes=CLASSES, decoder_channels=(8, 8, 4, 4, 4))


def x_transformer() -> nn.Module:
    """A decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(num_tokens=WORDS, max_seq_len=8, attn_layers=Decoder(dim=8, depth=1, heads=2, attn_dim_head=4))


# PyTorch Geometric: a graph of a few nodes, and several graphs in one


class Graph(nn.Module):
    """Two layers of one kind; with `pool`, a class for every graph."""

    def __init__(self, layer: Callable[[int, int], nn.Module], pool: bool = False):
        super().__init__()
        self.first, self.second, self.head, self.pool = layer(4, 6), layer(6, 6), nn.Linear(6, CLASSES), pool

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Classes of nodes, or of graphs."""
        h = self.second(self.first(x, edge_index).tanh(), edge_index).tanh()
        if self.pool:
            assert batch is not None
            h = h.new_zeros(ROWS, h.shape[1]).index_add(0, batch, h)
        return self.head(h)


def graph_network(kind: str, pool: bool = False) -> Callable[[], nn.Module]:
    """Of one of PyTorch Geometric's layers."""

    def make() -> nn.Module:
        from torch_geometric import nn as geometric

        if kind == "GINConv":
            return Graph(lambda i, o: geometric.GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))), pool)
        return Graph(getattr(geometric, kind), pool)

    return make


# Plain torch


class Call(nn.Module):
    """Named layers and a function of them."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function."""
        return self.run(self, *args, **kwargs)


def perceptron(outputs: int = CLASSES) -> nn.Sequential:
    """The plainest network."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


@dataclass
class Answer:
    """What some networks return."""

    logits: Tensor
    hidden: Tensor


def tagger(kind: Callable[..., nn.Module], tags: bool) -> nn.Module:
    """A packed recurrent network: a class for every word, or for every sentence."""

    def run(s: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(s.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = s.rnn(packed)
        if tags:
            return s.head(pad_packed_sequence(states, batch_first=True, total_length=ids.shape[1])[0])
        return s.head((last[0] if isinstance(last, tuple) else last)[-1])

    rnn = kind(5, 4, batch_first=True, bidirectional=tags)
    return Call(run, words=nn.Embedding(WORDS, 5, padding_idx=0), rnn=rnn, head=nn.Linear(8 if tags else 4, CLASSES))


def packed() -> dict[str, Tensor]:
    """Sentences and their lengths."""
    lengths = torch.tensor([5, 3, 5, 2, 4, 5])
    return {"ids": words() * (torch.arange(5) < lengths.unsqueeze(1)), "lengths": lengths}


def tags_of(x: dict[str, Tensor]) -> Tensor:
    """A class for every word; padding has none."""
    tags = torch.randint(CLASSES, (ROWS, 5))
    return tags.masked_fill(torch.arange(5) >= x["lengths"].unsqueeze(1), -100)


def lazy() -> nn.Module:
    """Layers that learn their shapes from the first batch."""
    net = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES))
    net(torch.zeros(2, 4))
    return net


class Fourier(nn.Module):
    """A Fourier neural operator in one dimension, with complex weights as pairs of real numbers."""

    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(1, 3), nn.Linear(3, 1)
        self.modes = nn.Parameter(0.3 * torch.randn(3, 3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Functions on a grid to functions."""
        h = self.lift(x.unsqueeze(-1))
        low = torch.fft.rfft(h, dim=1)[:, :3]
        mixed = torch.einsum("bki,kio->bko", low, torch.view_as_complex(self.modes))
        return self.head(torch.tanh(torch.fft.irfft(mixed, n=x.shape[1], dim=1) + h)).squeeze(-1)


class Experts(nn.Module):
    """Each row goes to the expert that a gate finds best."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """By sparse routing."""
        shares = self.gate(x).softmax(-1)
        best = shares.argmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for k, expert in enumerate(self.experts):
            rows = (best == k).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]) * shares[rows, k].unsqueeze(1))
        return out


class Ode(nn.Module):
    """A neural differential equation, by Runge and Kutta's method."""

    def __init__(self):
        super().__init__()
        self.field, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Four steps of the midpoint rule."""
        for _ in range(4):
            x = x + 0.25 * self.field(x + 0.125 * self.field(x))
        return self.head(x)


def kernel_features() -> nn.Module:
    """A deep kernel over inducing inputs, by gpytorch."""
    import gpytorch

    def run(s: Any, x: Tensor) -> Tensor:
        return s.head(s.kernel(s.features(x), s.anchors.weight).to_dense())

    return Call(
        run,
        features=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
        kernel=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
        anchors=nn.Embedding(5, 2),
        head=nn.Linear(5, 1),
    )


def lightning_module() -> nn.Module:
    """A LightningModule with a perceptron in it."""
    import lightning

    class Classifier(lightning.LightningModule):
        """As a user writes one."""

        def __init__(self):
            super().__init__()
            self.net = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            """Logits."""
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> Tensor:
            """The loss."""
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.log("loss", loss)
            return loss

    return Classifier()


def skorch_module() -> nn.Module:
    """What skorch has trained."""
    from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(perceptron(), max_epochs=1, verbose=0, criterion=nn.CrossEntropyLoss, train_split=None)
    net.fit(torch.randn(ROWS, 4), torch.randint(CLASSES, (ROWS,)))
    return net.module_


def frozen_run() -> nn.Module:
    """A layer that runs without gradients, as in some fine-tuned networks."""

    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = s.body(x).tanh()
        return s.head(h)

    return Call(run, body=nn.Linear(4, 8), head=nn.Linear(8, CLASSES))


class Cube(torch.autograd.Function):
    """A function with a backward pass of its own, in the old style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x^3."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """3 x^2."""
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


def residual() -> nn.Module:
    """Convolutions with batch norm and a shortcut."""

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.norm(s.first(x)).relu()
        return s.head((h + s.second(h)).mean((2, 3)))

    convolutions = dict(first=nn.Conv2d(1, 4, 3, padding=1), second=nn.Conv2d(4, 4, 3, padding=1))
    return Call(run, **convolutions, norm=nn.BatchNorm2d(4), head=nn.Linear(4, CLASSES))


def scripted() -> nn.Module:
    """By torch.jit.script."""
    return torch.jit.script(perceptron())


def weight_normed() -> nn.Module:
    """Old-style weight norm: the weight is made in a hook."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def parametrized(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """A layer whose weight is a function of others."""
    return lambda: nn.Sequential(kind(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def tied() -> nn.Module:
    """A language model whose head is its embedding."""
    net = Call(lambda s, ids: s.head(s.mix(s.embed(ids)).tanh()), embed=nn.Embedding(WORDS, 6), mix=nn.Linear(6, 6))
    net.head = nn.Linear(6, WORDS, bias=False)
    net.head.weight = net.embed.weight
    return net


def segmentation_head() -> nn.Module:
    """A class for every pixel."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, 2), nn.ReLU(), nn.Conv2d(4, CLASSES, 1)
    )


PIXELS = (ROWS, 8, 8)
COUPLED = {"coupled": True}  # a graph is one batch, which cannot be cut
IMAGE_LABELS = Categorical(dim=1)


def nodes(kind: str) -> Entry:
    """Classes of the nodes of one graph."""
    return Entry(graph_network(kind), lambda: graph(pool=False), package="torch_geometric", shape=(12,), options=COUPLED)


NETWORKS: dict[str, Entry] = {
    # transformers
    "BERT": Entry(hugging_face("BertForSequenceClassification", "BertConfig", **BERT), unpadded, package="transformers"),
    "BERT, padded": Entry(hugging_face("BertForSequenceClassification", "BertConfig", **BERT), text, package="transformers"),
    "BERT, eager attention": Entry(
        hugging_face("BertForSequenceClassification", "BertConfig", **BERT, attn_implementation="eager"), text, package="transformers"
    ),
    "DistilBERT, padded": Entry(
        hugging_face(
            "DistilBertForSequenceClassification", "DistilBertConfig",
            vocab_size=WORDS, dim=8, n_layers=1, n_heads=2, hidden_dim=12, num_labels=CLASSES,
        ),
        text, package="transformers",
    ),
    "GPT-2 classifier, padded": Entry(hugging_face("GPT2ForSequenceClassification", "GPT2Config", **GPT), text, package="transformers"),
    "GPT-2 language model": Entry(
        hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT, use_cache=False), text, NextToken(), "transformers", y=own_tokens
    ),
    "Llama classifier, padded": Entry(
        hugging_face("LlamaForSequenceClassification", "LlamaConfig", **LLAMA), text, package="transformers"
    ),
    "Llama language model": Entry(
        hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA, use_cache=False), text, NextToken(), "transformers", y=own_tokens
    ),
    "Mixtral language model": Entry(
        hugging_face("MixtralForCausalLM", "MixtralConfig", **MIXTRAL, use_cache=False), unpadded, NextToken(), "transformers",
        y=own_tokens, double=False,
    ),
    "Mamba language model": Entry(
        hugging_face("MambaForCausalLM", "MambaConfig", **MAMBA), unpadded, NextToken(), "transformers", y=own_tokens, double=False
    ),
    "T5": Entry(
        hugging_face("T5ForConditionalGeneration", "T5Config", **T5, use_cache=False), sequences, package="transformers",
        shape=(ROWS, 3),
    ),
    "ViT": Entry(hugging_face("ViTForImageClassification", "ViTConfig", **VIT), pixels, package="transformers"),
    "Swin": Entry(hugging_face("SwinForImageClassification", "SwinConfig", **SWIN), pixels, package="transformers"),
    "ConvNeXt": Entry(hugging_face("ConvNextForImageClassification", "ConvNextConfig", **CONVNEXT), pixels, package="transformers"),
    "ResNet": Entry(
        hugging_face("ResNetForImageClassification", "ResNetConfig", **STAGES, embedding_size=4, layer_type="basic"), pixels,
        package="transformers",
    ),
    "BERT with LoRA": Entry(lora, text, package="peft", only="lora"),
    # timm, segmentation-models-pytorch, x-transformers
    "timm ViT": Entry(
        timm_network("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2), floats(3, 16, 16),
        package="timm",
    ),
    "timm EfficientNet, head": Entry(timm_network("efficientnet_b0"), floats(3, 32, 32), package="timm", only="^classifier"),
    "U-Net, last block": Entry(
        u_net, floats(3, 32, 32), IMAGE_LABELS, "segmentation_models_pytorch", "segmentation_head", (ROWS, 32, 32)
    ),
    "x-transformers decoder": Entry(x_transformer, words, NextToken(), "x_transformers", y=own_tokens),
    # graphs
    "GCN, nodes": nodes("GCNConv"),
    "GAT, nodes": nodes("GATConv"),
    "GraphSAGE, nodes": nodes("SAGEConv"),
    "GIN, graphs": Entry(graph_network("GINConv", pool=True), lambda: graph(pool=True), package="torch_geometric", options=COUPLED),
    # sequences
    "packed LSTM tagger": Entry(lambda: tagger(nn.LSTM, True), packed, y=tags_of),
    "packed GRU classifier": Entry(lambda: tagger(nn.GRU, False), packed),
    "tied language model": Entry(tied, words, NextToken(), y=own_tokens),
    # inputs and outputs
    "dict output": Entry(lambda: Call(lambda s, x: {"logits": s.net(x)}, net=perceptron()), floats(4)),
    "tuple output": Entry(lambda: Call(lambda s, x: (s.net(x), x), net=perceptron()), floats(4)),
    "dataclass output": Entry(lambda: Call(lambda s, x: Answer(s.net(x), x), net=perceptron()), floats(4)),
    "keyword inputs": Entry(
        lambda: Call(lambda s, *, left, right: s.net(torch.cat([left, right], 1)), net=perceptron()),
        lambda: {"left": torch.randn(ROWS, 1), "right": torch.randn(ROWS, 3)},
    ),
    "two inputs": Entry(
        lambda: Call(lambda s, a, b: s.net(a * b), net=perceptron()), lambda: (torch.randn(ROWS, 4), torch.randn(ROWS, 4))
    ),
    # other libraries around a network
    "LightningModule": Entry(lightning_module, floats(4), package="lightning"),
    "skorch module": Entry(skorch_module, floats(4), package="skorch"),
    "deep kernel": Entry(kernel_features, floats(4), Gaussian(), "gpytorch", shape=(ROWS, 1)),
    "compiled": Entry(lambda: torch.compile(perceptron(), backend="eager"), floats(4)),
    "scripted": Entry(scripted, floats(4)),
    "DataParallel": Entry(lambda: nn.DataParallel(perceptron()), floats(4)),
    # weights that are functions of others
    "weight norm, old": Entry(weight_normed, floats(4)),
    "weight norm": Entry(parametrized(parametrizations.weight_norm), floats(4)),
    "spectral norm": Entry(parametrized(parametrizations.spectral_norm), floats(4)),
    "orthogonal": Entry(parametrized(parametrizations.orthogonal), floats(4)),
    "lazy layers": Entry(lazy, floats(4)),
    # odd ones
    "residual, batch norm": Entry(residual, floats(1, 8, 8)),
    "segmentation": Entry(segmentation_head, floats(1, 4, 4), IMAGE_LABELS, shape=PIXELS),
    "Fourier neural operator": Entry(Fourier, floats(8), Gaussian(), shape=(ROWS, 8)),
    "mixture of experts": Entry(Experts, floats(4)),
    "neural differential equation": Entry(Ode, floats(4)),
    "layer without gradients": Entry(frozen_run, floats(4), only="head"),
    "own backward pass": Entry(lambda: Call(lambda s, x: s.net(Cube.apply(x)), net=perceptron()), floats(4)),
    "own backward pass inside": Entry(
        lambda: Call(lambda s, x: s.head(Cube.apply(s.body(x))), body=nn.Linear(4, 6), head=nn.Linear(6, CLASSES)), floats(4)
    ),
}  # fmt: skip


def graph(pool: bool) -> dict[str, Tensor]:
    """Nodes of two rings, or of several small graphs in one."""
    nodes = 12
    here = torch.arange(nodes)
    there = (here + 1) % 2 + here // 2 * 2 if pool else (here + 1) % nodes
    edges = torch.cat([torch.stack([here, there]), torch.stack([there, here])], 1)
    x = {"x": torch.randn(nodes, 4), "edge_index": edges}
    return {**x, "batch": here // 2} if pool else x
