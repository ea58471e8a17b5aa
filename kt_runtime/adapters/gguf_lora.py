"""LoRA adapters as GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them and `llama-adapter.cpp` reads them.

Keys: general.type "adapter", general.architecture, adapter.type "lora", adapter.lora.alpha (float32). Each module has
two tensors, `blk.0.attn_q.weight.lora_a` [R, in] and `.lora_b` [out, R]; routed experts are stacked,
`blk.0.ffn_gate_exps.weight.lora_a` [E, R, in]. Names are those of the `gguf` package's map for the architecture. The
scaling of a module is alpha / R with R its own rank; without an alpha, or with 0, it is 1. Of a `llama` (Mixtral) the
rows of q_proj's and k_proj's B are those of the file's matrices: the halves of each head are interleaved
(`families.gguf.interleaved_heads`). In the other architectures they keep their order.

kv_b_proj can't be exported. llama.cpp splits it into attn_k_b, transposed, and attn_v_b; its converter has no such form
for LoRA, and its graph multiplies both without LoRA. Older files, without that split, have `attn_kv_b`, which is read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kt_runtime.adapters.folding import Part
from kt_runtime.adapters.gguf_file import MAX_HEADER_BYTES, GgufFile, parse_gguf
from kt_runtime.adapters.paths import open_directory
from kt_runtime.adapters.peft_directory import filler_notes, folded_whole, largest_file
from kt_runtime.adapters.tensors import AdapterTensors, LoraPair, complete_groups, expected_shapes
from kt_runtime.adapters.validator import check_adapter, check_rank, check_shape, unknown_module
from kt_runtime.errors import AdapterError
from kt_runtime.families import Family, LoraModule
from kt_runtime.families.gguf import interleaved_heads
from kt_runtime.files import write_new_file

if TYPE_CHECKING:
    import gguf

SUFFIX = ".gguf"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEY = re.compile(r"(?P<base>.+)\.weight\.lora_(?P<letter>[ab])")

WRITER_KEY, WRITER = "kt_runtime.writer", "kt-runtime"  # marks files from `write_gguf_adapter`

COMPARED = (
    *("qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral", "olmoe"),
    *("glm4_moe", "glm4_moe_lite", "minimax_m2"),
)
"""The families whose files were compared with llama.cpp. Of others' q_proj and k_proj it may permute the rows."""
NOT_EXPRESSIBLE = ("kv_b_proj",)
NOT_APPLIED = {"deepseek2": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")}
"""llama.cpp loads these parts, but its graph (src/models/deepseek2.cpp, seen until October 2026) does not use them."""


def read_gguf_adapter(
    path: str | os.PathLike[str], family: Family, config: Mapping[str, Any], max_rank: int
) -> AdapterTensors:
    """The adapter in the file `path`, checked before use: one rank, one scaling, complete groups.

    Raises NotFoundError or AdapterError; the message begins with the file.
    """
    place = Path(path)
    where = str(place)
    _require_compared(family, where)
    with open_directory(place.parent.resolve()) as directory:
        data = directory.read(place.name, largest_file(family, config, max_rank) + MAX_HEADER_BYTES)
    file = parse_gguf(data, where)
    alpha = _check_keys(file, family, where)
    parts = _parts(file, alpha, family, config, max_rank, where)
    ranks = {part.pair.a.shape[-2] for part in parts}
    common = alpha if alpha and len(ranks) == 1 else None
    adapter, filled = folded_whole(parts, common, family, config, max_rank, where)
    return replace(adapter, notes=(*adapter.notes, *filler_notes(filled)))


def write_gguf_adapter(
    path: Path,
    adapter: AdapterTensors,
    family: Family,
    config: Mapping[str, Any],
    *,
    max_rank: int,
    base_model: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the new file `path` atomically. Modules whose A or B is all zero are left out.

    Raises AdapterError as `check_adapter`, and for modules that GGUF can't express; ConflictError if the file exists.
    """
    _require_compared(family, str(path))
    completed = complete_groups(adapter, family, config) if adapter.modules else adapter
    check_adapter(completed, family, config, max_rank, str(path))
    used = {name: pair for name, pair in completed.modules.items() if bool(pair.a.any()) and bool(pair.b.any())}
    refused = [name for name in used if name.rpartition(".")[2] in NOT_EXPRESSIBLE]
    if refused:
        raise AdapterError(
            f"{path}: {refused[0]!r}{f' and {len(refused) - 1} more' if len(refused) > 1 else ''}: llama.cpp has no "
            "LoRA for kv_b_proj, which it splits into attn_k_b and attn_v_b; export with --format merged and convert "
            "that checkpoint, or train without kv_b_proj"
        )
    if not used:
        raise AdapterError(f"{path}: the adapter changes nothing: every A or B is zero")
    names = tensor_names(family, config)
    tensors = {
        f"{names[name]}.weight.lora_{letter}": tensor
        for name, pair in used.items()
        for letter, tensor in zip("ab", (pair.a, _interleaved(pair.b, _heads(config, name))), strict=True)
    }
    write_new_file(path, partial(_write, tensors, family.gguf_architecture, adapter.alpha, base_model, dtype))


def _require_compared(family: Family, where: str) -> None:
    if family.name not in COMPARED:
        raise AdapterError(
            f"{where}: GGUF adapters of {family.name} are neither read nor written: they were not compared with "
            f"llama.cpp, as those of {', '.join(COMPARED)} were; use a PEFT directory, or export with --format merged "
            "and convert that checkpoint"
        )


def is_written_here(path: Path) -> bool:
    """Whether `write_gguf_adapter` wrote the file. False also for a file that is not GGUF."""
    import gguf

    try:
        field = gguf.GGUFReader(path).fields.get(WRITER_KEY)
    except (OSError, ValueError, IndexError, KeyError):
        return False
    return field is not None and field.contents() == WRITER


def not_applied(adapter: AdapterTensors, family: Family) -> list[str]:
    """The projections of `adapter` that llama.cpp loads but does not apply, sorted."""
    used = {name.rpartition(".")[2] for name, pair in adapter.modules.items() if bool(pair.b.any())}
    return sorted(used & set(NOT_APPLIED.get(family.gguf_architecture, ())))


def tensor_names(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """The GGUF name, without `.weight`, of every module that LoRA may adapt: `model.layers.0.mlp.gate_proj` is
    `blk.0.ffn_gate`."""
    import gguf  # takes half a second, and only this function needs it

    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[family.gguf_architecture]
    modules = family.lora_modules(config)
    known = gguf.get_tensor_name_map(architecture, max(module.layer for module in modules) + 1)
    names = {module.name: known.get_name(module.name) for module in modules}
    missing = [name for name, found in names.items() if found is None]
    assert not missing, f"the gguf package has no name for {missing[0]}"
    return {name: str(found) for name, found in names.items()}


def _check_keys(file: GgufFile, family: Family, where: str) -> float:
    """Returns alpha, 0 if there is none."""
    expected = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": family.gguf_architecture,
    }
    for key, value in expected.items():
        if file.values.get(key) != value:
            found = f"is {str(file.values[key])[:80]!r}" if key in file.values else "is missing"
            raise AdapterError(f"{where}: {key} {found}; expected {value!r} for a LoRA adapter of this model")
    if "adapter.alora.invocation_tokens" in file.arrays:
        raise AdapterError(f"{where}: adapter.alora.invocation_tokens: activated LoRA is not supported")
    alpha = file.values.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha < 0:
        raise AdapterError(f"{where}: adapter.lora.alpha is {alpha!r}; expected a finite number, not below 0")
    return float(alpha)


def _parts(
    file: GgufFile, alpha: float, family: Family, config: Mapping[str, Any], max_rank: int, where: str
) -> list[Part]:
    """One part per dense module and per expert, in the model's order. A tensor that is not used raises AdapterError."""
    modules, names = family.lora_modules(config), tensor_names(family, config)
    module_of = {names[module.name]: module for module in modules}
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in file.tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"{where}: unknown tensor {key!r}; expected NAME.weight.lora_a or NAME.weight.lora_b")
        if match["base"] not in module_of:
            raise _unknown(match["base"], module_of, family, f"{where}: unknown tensor {key!r}")
        pairs.setdefault(match["base"], {})[match["letter"]] = tensor
    if not pairs:
        raise AdapterError(f"{where}: has no LoRA tensors")
    order = {module.name: position for position, module in enumerate(modules)}
    named = sorted(pairs.items(), key=lambda item: order[module_of[item[0]].name])
    return [
        part
        for base, pair in named
        for part in _module_parts(
            base, pair, module_of[base], alpha, max_rank, where, _heads(config, module_of[base].name)
        )
    ]


def _module_parts(
    base: str,
    pair: Mapping[str, torch.Tensor],
    module: LoraModule,
    alpha: float,
    max_rank: int,
    where: str,
    interleaved_heads: int,
) -> Iterable[Part]:
    for letter in "ab":
        if letter not in pair:
            raise AdapterError(f"{where}: '{base}.weight.lora_{letter}' is missing; its other half is there")
    a, b = pair["a"], pair["b"]
    rank = check_rank(int(a.shape[-2]) if a.dim() > 1 else 0, max_rank, where, f"'{base}.weight.lora_a': its rank")
    for letter, expected in zip("ab", expected_shapes(module, rank), strict=True):
        check_shape(f"{base}.weight.lora_{letter}", pair[letter], expected, where)
    scaling = alpha / rank if alpha else 1.0
    if not module.num_experts:
        return [Part(module, None, LoraPair(a, _with_halves(b, interleaved_heads)), scaling)]
    return [Part(module, expert, LoraPair(a[expert], b[expert]), scaling) for expert in range(module.num_experts)]


def _heads(config: Mapping[str, Any], module: str) -> int:
    return interleaved_heads(config, f"{module}.weight")


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * size, R]: in each head a row of the first half, then the one of the second half, and so on."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape) if heads else rows


def _with_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What `_interleaved` was made of."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape) if heads else rows


def _unknown(base: str, known: Mapping[str, LoraModule], family: Family, where: str) -> AdapterError:
    last = base.rpartition(".")[2]
    if last in ("attn_k_b", "attn_v_b"):
        return AdapterError(f"{where}: a half of kv_b_proj, for which llama.cpp itself has no LoRA")
    if last in ("token_embd", "output", "ffn_gate_inp"):
        return AdapterError(f"{where}: router, embeddings and lm_head are never adapted here")
    return unknown_module(base, list(known), family, where)


def _write(
    tensors: Mapping[str, torch.Tensor],
    architecture: str,
    alpha: float,
    base_model: str | None,
    dtype: torch.dtype,
    path: Path,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_string(WRITER_KEY, WRITER)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    if base_model:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base_model)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kind, array_dtype = _kinds()[dtype]
    for name, tensor in tensors.items():
        writer.add_tensor_info(name, tensor.shape, array_dtype, tensor.numel() * dtype.itemsize, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors.values():
            stored = tensor.detach().to("cpu", dtype).contiguous()
            writer.write_tensor_data(stored.reshape(-1).view(torch.uint8).numpy())
    finally:
        writer.close()


def _kinds() -> dict[torch.dtype, tuple[gguf.GGMLQuantizationType, Any]]:
    import gguf
    import numpy as np

    # numpy has no bfloat16; only the element size matters here.
    return {
        torch.float32: (gguf.GGMLQuantizationType.F32, np.dtype(np.float32)),
        torch.float16: (gguf.GGMLQuantizationType.F16, np.dtype(np.float16)),
        torch.bfloat16: (gguf.GGMLQuantizationType.BF16, np.dtype(np.float16)),
    }
