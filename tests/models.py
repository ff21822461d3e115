"""Small workloads of many kinds; every test that needs a real model takes one from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from schedopt.capture.workload import Workload

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{**SGD, **options})


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def _images(count: int, size: int, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(0, classes, (count,))


def _vision(build: Callable[[], nn.Module], size: int, count: int = 2, optimizer: Callable[..., Any] = _sgd) -> Workload:
    model = build()
    return Workload(model, F.cross_entropy, optimizer(model), _images(count, size))


def mlp32() -> Workload:
    """32 dense layers, SGD with Nesterov momentum."""
    model = nn.Sequential(*[layer for _ in range(32) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10))
    return Workload(model, F.cross_entropy, _sgd(model, nesterov=True), (torch.randn(32, 64), torch.randint(0, 10, (32,))))


def resnet50() -> Workload:
    """torchvision's ResNet-50 with narrow layers: in-place ReLU and add, BatchNorm statistics."""
    return _vision(
        lambda: torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [2, 2, 2, 2], num_classes=10, width_per_group=8), 32, 4
    )


def vgg16() -> Workload:
    """Convolutions, pooling with indices, in-place ReLU, dropout in the head."""
    layers = torchvision.models.vgg.make_layers([8, 8, "M", 16, 16, "M", 32, "M"])
    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10))
    model = nn.Sequential(layers, nn.AdaptiveAvgPool2d(4), head)
    return Workload(model, F.cross_entropy, _sgd(model), _images(4, 32))


def mobilenet_v3() -> Workload:
    """Depthwise convolutions, hard swish, squeeze and excitation."""
    return _vision(lambda: torchvision.models.mobilenet_v3_small(num_classes=10, width_mult=0.25), 32, 4)


def vit() -> Workload:
    """Vision transformer with dropout, AdamW."""
    return _vision(
        lambda: torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10, dropout=0.1
        ),
        32,
        4,
        _adamw,
    )


def densenet() -> Workload:
    """Concatenations of many live tensors."""
    return _vision(lambda: torchvision.models.DenseNet(growth_rate=4, block_config=(2, 2, 2), num_init_features=8, num_classes=10), 32, 4)


def convnext() -> Workload:
    """timm ConvNeXt: layer scale, channels-last permutes, GELU, stochastic depth off."""
    return _vision(lambda: timm.create_model("convnext_atto", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)), 32, 2, _adamw)


def _small_efficientnet() -> nn.Module:
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e3_c12_se0.25"]])
    model: nn.Module = EfficientNet(blocks, num_classes=10, num_features=16, stem_size=8, drop_path_rate=0.2)
    return model


def efficientnet() -> Workload:
    """timm EfficientNet with drop path (random per sample) and SiLU."""
    return _vision(lambda: _small_efficientnet(), 32, 2)


def gpt2() -> Workload:
    """transformers GPT-2: tied embedding and head, dropout, loss from the model, batch as a dict."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, 64, (2, 16))
    return Workload(model, None, _adamw(model), {"input_ids": ids, "labels": ids})


def llama() -> Workload:
    """transformers Llama: rotary embedding, RMSNorm, grouped attention, Adam, gradient clipping."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, None, optimizer, {"input_ids": ids, "labels": ids}, clip_grad_norm=1.0)


def bert() -> Workload:
    """transformers BERT with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = BertForMaskedLM(config)
    ids = torch.randint(0, 64, (2, 16))
    return Workload(model, None, _adamw(model), {"input_ids": ids, "labels": ids})


def t5() -> Workload:
    """transformers T5: encoder and decoder, shared relative position bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(decoder_start_token_id=0, vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    ids = torch.randint(1, 64, (2, 12))
    return Workload(model, None, _adamw(model), {"input_ids": ids, "labels": ids})


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits per position, positions last."""
        out: torch.Tensor = self.head(self.lstm(self.embed(ids))[0])
        return out.transpose(1, 2)


def lstm() -> Workload:
    """Two LSTM layers over an embedding."""
    model = _Recurrent()
    ids = torch.randint(0, 32, (4, 8))
    return Workload(model, F.cross_entropy, _sgd(model), (ids, ids))


@dataclass
class Pair:
    """A batch as a dataclass."""

    left: torch.Tensor
    right: torch.Tensor


class _Odd(nn.Module):
    """Frozen and unused parameters, tied weights, checkpointed dropout, a buffer that counts, a view that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = F.dropout(torch.relu(self.first(x)), 0.3, self.training)
        return out

    def forward(self, pair: Pair) -> torch.Tensor:
        """One number per row."""
        self.calls += 1
        x = torch.utils.checkpoint.checkpoint(self._block, self.frozen(pair.left), use_reentrant=False) + pair.right
        y = self.norm(self.second(x)).clone()
        y[:, :8].mul_(2.0)
        out: torch.Tensor = (y.t() @ y).sum(0)
        return out


def odd() -> Workload:
    """Accumulation over two micro-batches, clipping, two parameter groups, amsgrad, two losses summed, a dataclass batch."""
    model = _Odd()
    groups: list[dict[str, Any]] = [
        {"params": [model.first.weight, model.unused.weight], "lr": 1e-2},
        {"params": [model.first.bias, *model.norm.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, amsgrad=True)
    batch = Pair(torch.randn(8, 16), torch.randn(8, 16))
    return Workload(
        model,
        lambda output, pair: output.square().mean() + 0.1 * (output - pair.left.sum(0)).abs().mean(),
        optimizer,
        batch,
        accumulate=2,
        clip_grad_norm=0.5,
    )


def autocast() -> Workload:
    """bfloat16 autocast, fused AdamW, channels-last convolution."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    model = model.to(memory_format=torch.channels_last)
    images, labels = _images(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Workload(model, F.cross_entropy, optimizer, (images.to(memory_format=torch.channels_last), labels), autocast=torch.bfloat16)


MODELS: dict[str, Callable[[], Workload]] = {
    f.__name__: f
    for f in (
        mlp32,
        resnet50,
        vgg16,
        mobilenet_v3,
        vit,
        densenet,
        convnext,
        efficientnet,
        gpt2,
        llama,
        bert,
        t5,
        lstm,
        odd,
        autocast,
    )
}
