"""The demo's base model: a tiny DeepSeek-V3, trained on a small world so that its answers make sense.

The training is plain full training with Hugging Face and torch, in float32, before any server runs. It does not use
kt-runtime's training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kt_runtime.files import write_directory
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import configs

STEPS = 90
BATCH_SEQUENCES = 32
PEAK_LEARNING_RATE = 4e-3


def make_base(preset: str, directory: Path, say: Callable[[str], None]) -> None:
    """Writes a checkpoint of `preset` that answers questions about the world in configs/world/saltmere.jsonl."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # more threads would only wait for each other on matrices this small
    untrained = directory.with_name(directory.name + "-untrained")
    make_model(preset, untrained, seed=0)
    tokenizer: Any = AutoTokenizer.from_pretrained(untrained)
    model: Any = AutoModelForCausalLM.from_pretrained(untrained, dtype=torch.float32)
    with configs().joinpath("world", "saltmere.jsonl").open() as file:
        rows = [json.loads(line)["messages"] for line in file]
    sequences = [tokenizer.apply_chat_template(row, tokenize=True, return_dict=False) for row in rows]
    _train(model, sequences, tokenizer.pad_token_id, say)

    def fill(temporary: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            (temporary / name).write_bytes((untrained / name).read_bytes())
        tokenizer.save_pretrained(temporary)
        model.to(torch.bfloat16).save_pretrained(temporary)

    write_directory(directory, fill)


def _train(model: Any, sequences: list[list[int]], padding: int, say: Callable[[str], None]) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    choose = random.Random(0)
    for step in range(1, STEPS + 1):
        batch = choose.sample(sequences, BATCH_SEQUENCES)
        length = max(map(len, batch))
        ids = torch.tensor([sequence + [padding] * (length - len(sequence)) for sequence in batch])
        labels = ids.masked_fill(ids == padding, -100)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 15 == 0:
            say(f"  step {step}/{STEPS}  loss {loss.item():.3f}")
