"""GPT-2 of transformers (random weights), in half of the memory that eager takes; or planned, not run, for a machine that is not here.

python examples/gpt2.py
schedopt run examples/gpt2.py:workload --memory 50% --steps 3 --set seq_len=256
schedopt plan examples/gpt2.py:workload --set size=xl --set meta=true --memory 24GiB --machine h200 -o gpt2-xl.json
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import schedopt

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512},
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}


def workload(
    batch_size: int = 4,
    seq_len: int = 512,
    optimizer: Literal["sgd", "adamw"] = "adamw",
    size: Literal["tiny", "small", "xl"] = "small",
    meta: bool = False,
) -> schedopt.Workload:
    """GPT-2 that returns its own loss. `meta`: without any memory for weights, to be planned only."""
    config = GPT2Config(n_positions=max(seq_len, 1024), bos_token_id=0, eos_token_id=0, **SIZES[size])
    with torch.device("meta" if meta else "cpu"):
        model = GPT2LMHeadModel(config)
        ids = torch.randint(0, config.vocab_size, (batch_size, seq_len))
    rule: torch.optim.Optimizer
    if optimizer == "sgd":
        rule = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        rule = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return schedopt.Workload(model, None, rule, {"input_ids": ids, "labels": ids}, name=f"GPT-2 {size}")


def main() -> None:
    """Compile, train three steps, show the plan."""
    torch.manual_seed(0)
    job = workload(batch_size=2, seq_len=256)
    with schedopt.compile(job, constraints=schedopt.Constraints(memory="50%")) as step:
        for number in range(3):
            print(f"step {number}: loss {step(job.batch).item():.4f}")
        print(step.plan.summary())


if __name__ == "__main__":
    main()
