"""Models of transformers that return their own loss: `loss_fn=None`, the batch a dict, a learning rate schedule, a saved plan.

python examples/huggingface.py
schedopt run examples/huggingface.py:workload --memory 60% --set model=bert
schedopt plan examples/huggingface.py:workload --set model=llama-2-7b --set meta=true --machine h200 --memory 90GiB
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import schedopt


def build(model: str) -> PreTrainedModel:
    """A model with random weights: a small BERT, a small Llama, or the shape of Llama-2-7B."""
    if model == "bert":
        return BertForMaskedLM(BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024))
    if model == "llama-2-7b":
        return LlamaForCausalLM(LlamaConfig())
    small = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(small)


def workload(
    batch_size: int = 4,
    seq_len: int = 256,
    optimizer: Literal["sgd", "adamw"] = "adamw",
    model: Literal["bert", "llama", "llama-2-7b"] = "llama",
    meta: bool = False,
) -> schedopt.Workload:
    """A language model on random tokens. `meta`: without any memory for weights, to be planned only."""
    with torch.device("meta" if meta else "cpu"):
        network = build(model)
        ids = torch.randint(0, network.config.vocab_size, (batch_size, seq_len))
    rule: torch.optim.Optimizer
    if optimizer == "sgd":
        rule = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    else:
        rule = torch.optim.AdamW(network.parameters(), lr=3e-4)
    return schedopt.Workload(network, None, rule, {"input_ids": ids, "labels": ids}, name=model)


def main() -> None:
    """Train with a schedule of the learning rate, save the plan, go on from the saved plan."""
    torch.manual_seed(0)
    job = workload()
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.5)
    constraints = schedopt.Constraints(memory="60%")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "plan.json"
        with schedopt.compile(job.model, None, job.optimizer, job.batch, constraints=constraints) as step:
            for number in range(3):
                print(f"step {number}: loss {step(**job.batch).item():.4f}")
                schedule.step()
            print(step.plan.summary())
            step.plan.save(saved)
        with schedopt.compile(job.model, None, job.optimizer, job.batch, plan=saved) as step:
            print(f"from the saved plan: loss {step(job.batch).item():.4f}")


if __name__ == "__main__":
    main()
