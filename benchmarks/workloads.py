"""The three models of the memory benchmark, and how each rival trains them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from schedopt.capture.selfcheck import run_eager_step
from schedopt.capture.workload import Workload

Step = Callable[[], Any]


def resnet50(quick: bool) -> Workload:
    """torchvision ResNet-50, batch 32 at 112x112, SGD with momentum."""
    model = torchvision.models.resnet50()
    size, count = (64, 8) if quick else (112, 32)
    return _vision(model, count, size)


def vgg16(quick: bool) -> Workload:
    """torchvision VGG-16, batch 8 at 224x224, SGD with momentum."""
    size, count = (64, 2) if quick else (224, 8)
    return _vision(torchvision.models.vgg16(), count, size)


def gpt2(quick: bool) -> Workload:
    """transformers GPT-2 small, batch 4 of 512 tokens, AdamW."""
    extra = {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": 1024} if quick else {}
    config = GPT2Config(bos_token_id=0, eos_token_id=0, **extra)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (2, 64) if quick else (4, 512))
    return Workload(model, None, torch.optim.AdamW(model.parameters(), lr=3e-4), {"input_ids": ids, "labels": ids}, name="GPT-2 small")


def _vision(model: torch.nn.Module, count: int, size: int) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = (torch.randn(count, 3, size, size), torch.randint(0, 1000, (count,)))
    return Workload(model, F.cross_entropy, optimizer, batch, name=type(model).__name__)


MODELS: dict[str, Callable[[bool], Workload]] = {"resnet50": resnet50, "vgg16": vgg16, "gpt2": gpt2}


def rival_step(name: str, job: Workload) -> Step:
    """One training step of a rival on `job`; raises what the rival raises."""
    if name == "eager":
        return lambda: run_eager_step(job)
    if name == "checkpoint":
        _checkpoint_blocks(job.model)
        return lambda: run_eager_step(job)
    if name == "save_on_cpu":
        return _under(job, torch.autograd.graph.save_on_cpu)
    if name.startswith("activation_budget"):
        return _activation_budget(job, float(name.split(":")[1]))
    if name == "rockmate":
        importlib.import_module("rockmate")
        raise RuntimeError("rockmate imports here, but this benchmark has never seen it run; add the call")
    raise ValueError(name)


def _under(job: Workload, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Step:
    def step() -> Any:
        with context():
            return run_eager_step(job)

    return step


def _activation_budget(job: Workload, share: float) -> Step:
    """torch.compile without code generation: its partitioner decides what the backward pass recomputes."""
    config: Any = importlib.import_module("torch._functorch.config")
    config.activation_memory_budget = share
    job.model.compile(backend="aot_eager_decomp_partition")
    return lambda: run_eager_step(job)


def _checkpoint_blocks(model: torch.nn.Module) -> None:
    """torch.utils.checkpoint around every block, as users do by hand."""
    if isinstance(model, GPT2LMHeadModel):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    if isinstance(model, torchvision.models.VGG):
        features = model.features
        features.forward = lambda x: _segments(features, x)
        return
    for block in (b for b in model.modules() if isinstance(b, torchvision.models.resnet.Bottleneck)):
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)


def _segments(features: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """VGG's features in segments that end with a pooling layer."""
    start = 0
    layers = list(features)
    for end, layer in enumerate(layers, start=1):
        if isinstance(layer, torch.nn.MaxPool2d):
            x = checkpoint(torch.nn.Sequential(*layers[start:end]), x, use_reentrant=False)
            start = end
    return x
