"""One-pass predictions of networks that others wrote: timm's vision transformer and ResNet, a Hugging Face encoder built from a config.

Nothing is downloaded: the weights are as they are initialised. Shown are standard deviations of the outputs beside those of draws, as
a mean ratio, and the time over a plain forward pass. What is not installed is left out.

    python benchmarks/streamlined_zoo.py --device cuda
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import interleaved, ratio, show, write
from torch import nn

import dubito
from dubito.posteriors import Gaussian


def timm_vit() -> tuple[nn.Module, Any, str]:
    import timm

    return timm.create_model("vit_tiny_patch16_224", num_classes=10), torch.randn(4, 3, 224, 224), r"blocks\.1[01]\.attn|^head"


def timm_resnet() -> tuple[nn.Module, Any, str]:
    import timm

    return timm.create_model("resnet18", num_classes=10), torch.randn(4, 3, 64, 64), r"layer4|^fc"


def bert() -> tuple[nn.Module, Any, str]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, num_labels=3
    )
    return BertForSequenceClassification(config), {"input_ids": torch.randint(200, (4, 12))}, r"layer\.[12]\.|classifier|pooler"


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any, str]]] = {
    "timm vit_tiny_patch16_224, attention of the last two blocks and the head": timm_vit,
    "timm resnet18, the last stage and the head": timm_resnet,
    "Hugging Face BERT, the last two of three layers, the pooler and the head": bert,
}


def measure(make: Callable[[], tuple[nn.Module, Any, str]], args: argparse.Namespace) -> dict[str, Any]:
    network, x, only = make()
    network = network.to(args.device).eval()
    x = dubito.tensors.tree.move(x, args.device)
    model = dubito.Model(network, dubito.Categorical(), only=only)
    mean = model.parameters()
    variance = {name: (0.05 * leaf.std(correction=0)).square().expand(leaf.shape).clone() for name, leaf in mean.items()}
    variance = {name: leaf.clamp_min(1e-8) for name, leaf in variance.items()}
    posterior = Gaussian.diagonal(model, mean, variance)
    truth = posterior.predict(x, "sampled", draws=args.draws).f_var
    ways: dict[str, Callable[[], Any]] = {
        "streamlined": lambda: posterior.predict(x, "streamlined", rank=0),
        "adjoint": lambda: posterior.predict(x, "adjoint"),
    }
    found: dict[str, Any] = {}
    runs = {"plain": torch.no_grad()(lambda: network(**x) if isinstance(x, dict) else network(x))}
    for way, run in ways.items():
        try:
            found[way] = {"sd": float((run().f_var / truth).sqrt().mean())}
            runs[way] = run
        except ValueError as error:
            found[way] = {"error": str(error)[:200]}
    seconds = interleaved(runs, args.repeats)
    for way in ways:
        if way in runs:
            found[way]["time"] = ratio(seconds, way, "plain")["fastest"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args, began = parser.parse_args(), time.time()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    headline: dict[str, list[Any]] = {}
    rows = []
    for name, make in NETWORKS.items():
        try:
            figures[name] = measure(make, args)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        for way, row in figures[name].items():
            cell = row.get("error") or f"sd {row['sd']:.3f} of that of draws, {row['time']:.1f} times a forward pass"
            headline[f"{name}, {way}"] = [cell, ""]
            rows.append([name, way, cell])
    show("networks of others", ["network", "way", "figure"], rows)
    if figures:
        settings = {"device": args.device, "draws": args.draws, "repeats": args.repeats}
        write("streamlined_zoo", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
