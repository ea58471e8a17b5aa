"""How much of an adapter directory each program loads, for users; counted from the directory itself.

`peft_directory` describes which modules PEFT 0.21 finds, `gguf_lora` which ones llama.cpp applies; docs/adapters.md
describes how both were compared with the programs themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kt_runtime.adapters.gguf_lora import COMPARED, NOT_APPLIED, NOT_EXPRESSIBLE
from kt_runtime.adapters.peft_directory import CONFIG_FILE, PREFIX, TENSOR_FILE
from kt_runtime.families import MLP, SHARED, Family, family_for

_FUSED = (".experts", ".experts.base_layer")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_WHOLE_QUERIES = ".self_attn.q_proj"  # latent attention without compressed queries, as in DeepSeek-V2-Lite
_SPLIT_QUERIES = (".linear_attn.in_proj_qkv", ".linear_attn.in_proj_z")  # Gated DeltaNet as in Qwen3.5


@dataclass(frozen=True)
class Reader:
    """`program` applies `num_loaded` of the adapter's `num_parameters` numbers when it loads the directory.

    `remark`: what the other numbers are and what to do about them, "" where there are none.
    """

    program: str
    num_loaded: int
    num_parameters: int
    remark: str = ""

    def __str__(self) -> str:
        partly = f"{self.num_loaded:,} of" if self.num_loaded else "none of"
        counted = "all" if self.num_loaded == self.num_parameters else partly
        text = f"{self.program}: {counted} {self.num_parameters:,} parameters"
        return f"{text}; {self.remark}" if self.remark else text


def readers(directory: Path, config: Mapping[str, Any]) -> list[Reader]:
    """For a directory that `write_peft_directory` wrote for the model of `config` (its config.json).

    Reads the tensors' shapes only.
    """
    family = family_for(config)
    sizes = _sizes(directory / TENSOR_FILE)
    total = sum(sizes.values())
    settings = json.loads((directory / CONFIG_FILE).read_bytes())
    return [
        *_servers(sizes, total, family, config),
        _peft(sizes, total, settings, family, config),
        _llama_cpp(sizes, total, family),
    ]


def _servers(sizes: Mapping[str, int], total: int, family: Family, config: Mapping[str, Any]) -> list[Reader]:
    if config.get("kv_lora_rank") and any(name.endswith(_WHOLE_QUERIES) for name in sizes):
        remark = "SGLang 0.5.23 alone expects k_proj and v_proj beside q_proj, and refuses the directory"
        return [Reader("kt-runtime", total, total, remark)]
    fused = sum(size for name, size in sizes.items() if family.peft_experts == "fused" and name.endswith(_FUSED))
    split = sum(size for name, size in sizes.items() if name.endswith(_SPLIT_QUERIES))
    if not fused and split:
        remark = "it knows in_proj_q, in_proj_k and in_proj_v, and leaves in_proj_qkv and in_proj_z out"
        return [Reader("kt-runtime", total, total), Reader("SGLang 0.5.23 alone", total - split, total, remark)]
    if not fused:
        return [Reader("kt-runtime and SGLang 0.5.23", total, total)]
    remark = "SGLang alone knows a pair for each expert only, which `adapter export --format sglang` writes"
    return [Reader("kt-runtime", total, total, remark)]


def _peft(
    sizes: Mapping[str, int], total: int, settings: Mapping[str, Any], family: Family, config: Mapping[str, Any]
) -> Reader:
    program = "PEFT 0.21 with transformers 5 (PeftModel.from_pretrained)"
    if config.get("model_type") in family.foreign_model_types:
        return Reader("PEFT 0.21 with the checkpoint's own modules (trust_remote_code=True)", total, total)
    if family.peft_experts == "fused" and (single := {name for name in sizes if _EXPERT.search(name)}):
        remark = "it has the family's experts fused, and drops a pair for each; `--format peft` writes them fused"
        return Reader(program, total - sum(sizes[name] for name in single), total, remark)
    if family.peft_experts == "fused":
        return Reader(program, total, total)
    if family.peft_experts == "none":
        return _peft_without_experts(sizes, total, program, family, config)
    named = tuple(f".{name}" for name in settings.get("target_parameters") or ())
    dense = {module.name for module in family.lora_modules(config) if module.group in (MLP, SHARED)}
    dropped = {name for name in sizes.keys() & dense if not f".{name}.weight".endswith(named)}
    if not dropped:
        return Reader(program, total, total)
    remark = (
        "it drops dense MLPs and shared experts; `kt-runtime adapter export` writes a directory that it loads whole"
    )
    return Reader(program, total - sum(sizes[name] for name in dropped), total, remark)


def _peft_without_experts(
    sizes: Mapping[str, int], total: int, program: str, family: Family, config: Mapping[str, Any]
) -> Reader:
    """transformers' experts are two parameters, and PEFT has no rule that fuses this family's pairs."""
    prefixes = tuple(f"{family.expert_prefix(layer)}." for layer in family.moe_layers(config))
    routed = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    remark = (
        "it drops routed experts, unless the model has a linear for each of them; export --format merged for others"
    )
    return Reader(program, total - routed, total, remark if routed else "")


def _llama_cpp(sizes: Mapping[str, int], total: int, family: Family) -> Reader:
    """For the GGUF export, which refuses adapters with a module that the format can't express."""
    program = "llama.cpp (adapter export --format gguf)"
    by_projection: dict[str, int] = {}
    for name, size in sizes.items():
        projection = name.rpartition(".")[2]
        by_projection[projection] = by_projection.get(projection, 0) + size
    refused = [projection for projection in NOT_EXPRESSIBLE if projection in by_projection]
    unused = sorted(by_projection.keys() & set(NOT_APPLIED.get(family.gguf_architecture, ())))
    remedy = "for llama.cpp export --format merged and convert that checkpoint"
    if family.name not in COMPARED:
        remark = f"the export refuses {family.name}, whose files were not compared with llama.cpp; {remedy}"
        return Reader(program, 0, total, remark)
    if refused:
        return Reader(
            program, 0, total, f"the export refuses {', '.join(refused)}: llama.cpp has no LoRA for it; {remedy}"
        )
    if not unused:
        return Reader(program, total, total)
    lost = sum(by_projection[projection] for projection in unused)
    return Reader(program, total - lost, total, f"it loads {', '.join(unused)} and does not use them; {remedy}")


def _sizes(path: Path) -> dict[str, int]:
    """Parameters of each module, A and B together. Each routed expert counts under its own linear's name."""
    sizes: dict[str, int] = {}
    with safe_open(path, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 (not a dict)
            name = key.removeprefix(PREFIX).rpartition(".lora_")[0]
            sizes[name] = sizes.get(name, 0) + math.prod(opened.get_slice(key).get_shape())
    return sizes
