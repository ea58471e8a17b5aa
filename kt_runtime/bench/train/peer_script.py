"""Fine-tunes the same checkpoint with Hugging Face + PEFT, in a separate process.

Reads JSON from stdin (`peer.Peer._ask`) and prints one JSON line: seconds and losses of the steps, peak memory of the
steps and of loading, on the host and on the accelerator. Does not import kt_runtime.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

ATTENTION = {
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_5_moe_text": [
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
    ],
    "deepseek": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
EAGER = ("gpt_oss",)  # transformers has no sdpa attention with sinks
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model: Any, question: dict[str, Any]) -> Any:
    names = ATTENTION.get(model.config.model_type, ATTENTION["deepseek"])
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config = LoraConfig(
        r=question["rank"],
        lora_alpha=question["alpha"],
        target_modules=[name for name in names if name in present],
        target_parameters=EXPERTS if "experts" in question["targets"] else None,
    )
    return get_peft_model(model, config).train()


def step(model: Any, optimizer: Any, tokens: torch.Tensor, micro_batches: list[list[int]]) -> float:
    """Runs one optimizer step; returns the mean loss per predicted token."""
    loss = 0.0
    for first, end in micro_batches:
        some = tokens[first:end]
        share = model(input_ids=some, labels=some, use_cache=False).loss * (len(some) / len(tokens))
        share.backward()
        loss += float(share.detach())
    optimizer.step()
    optimizer.zero_grad()
    return loss


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    question = json.load(sys.stdin)
    torch.set_num_threads(question["threads"])
    torch.manual_seed(0)
    dtype, device = getattr(torch, question["dtype"]), torch.device(question["device"])
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    attention = "eager" if AutoConfig.from_pretrained(question["model"]).model_type in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        question["model"], dtype=dtype, attn_implementation=attention, **placed
    )
    if question["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = adapted(model, question)
    loading_peak_bytes = peak_bytes()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=question["learning_rate"], weight_decay=0.0)
    tokens = torch.tensor(question["sequences"], device=device)
    seconds, losses = [], []
    for _ in range(question["steps"]):
        started = time.perf_counter()
        losses.append(step(model, optimizer, tokens, question["micro_batches"]))
        if device.type != "cpu":
            torch.accelerator.synchronize()  # the optimizer's work
        seconds.append(time.perf_counter() - started)
    answer = {"seconds": seconds, "losses": losses, "peak_bytes": peak_bytes()}
    answer |= {"loading_peak_bytes": loading_peak_bytes, "parameters": sum(each.numel() for each in parameters)}
    answer["experts"] = str(getattr(model.config, "_experts_implementation", None))
    answer["device"] = device.type
    answer["device_peak_bytes"] = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
