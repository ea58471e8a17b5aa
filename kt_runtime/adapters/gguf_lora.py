"""LoRA adapters as GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them and `llama-adapter.cpp` reads them.

Keys: general.type "adapter", general.architecture, adapter.type "lora", adapter.lora.alpha (float32). Each matrix of
the model's file has two tensors, `blk.0.attn_q.weight.lora_a` [R, in] and `.lora_b` [out, R]; routed experts are
stacked, `blk.0.ffn_gate_exps.weight.lora_a` [E, R, in]. The scaling of a pair is alpha / R with R its own rank; without
an alpha, or with 0, it is 1.

`families.gguf.ways_of_linear` says which matrices of the model's file hold a module's, and in which order. B has the
file's order of rows, A its order of columns: of Mixtral's q_proj and k_proj, of Qwen3.5's Gated DeltaNet layers. A
module in two matrices (Qwen3-Next's `in_proj_qkvz`: attn_qkv and attn_gate) has two pairs with one A.

kv_b_proj can't be exported. llama.cpp splits it into attn_k_b, transposed, and attn_v_b; its converter has no such form
for LoRA, and its graph multiplies both without LoRA. Older files, without that split, have `attn_kv_b`, which is read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kt_runtime.adapters.folding import Part
from kt_runtime.adapters.paths import open_directory
from kt_runtime.adapters.peft_directory import filler_notes, folded_whole, largest_file
from kt_runtime.adapters.safetensors_file import DTYPES
from kt_runtime.adapters.tensors import AdapterTensors, LoraPair, complete_groups, expected_shapes
from kt_runtime.adapters.validator import check_adapter, check_rank, check_shape, unknown_module
from kt_runtime.checkpoint_file import Entry
from kt_runtime.errors import AdapterError
from kt_runtime.families import Family, LoraModule
from kt_runtime.families.gguf import Held, ways_of_linear
from kt_runtime.files import write_new_file
from kt_runtime.gguf_file import Rules, parse_gguf

if TYPE_CHECKING:
    import gguf

RULES = Rules(
    AdapterError,
    header_bytes=16 << 20,  # a model's vocabulary has no place in an adapter
    types=("F32", "F16", "BF16"),
    advice="convert the adapter with --outtype f32",
    least_alignment=8,
    is_whole=True,
)
_KEY = re.compile(r"(?P<matrix>.+\.weight)\.lora_(?P<letter>[ab])")

WRITER_KEY, WRITER = "kt_runtime.writer", "kt-runtime"  # marks files from `write_gguf_adapter`

COMPARED = (
    *("qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral", "olmoe"),
    *("glm4_moe", "glm4_moe_lite", "minimax_m2"),
    *("gpt_oss", "llama4_text", "qwen3_next", "qwen3_5_moe_text", "deepseek_v32", "glm_moe_dsa"),
)
"""The families whose files were compared with llama.cpp. It may order the rows of others differently."""
NOT_EXPRESSIBLE = ("kv_b_proj",)
_COMPRESSED = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
NOT_APPLIED = {"deepseek2": _COMPRESSED, "deepseek32": _COMPRESSED, "glm-dsa": _COMPRESSED}
"""llama.cpp loads these parts, but its graphs (src/models/deepseek2.cpp and the others, seen until October 2026) do not
use them."""


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
        # A module in two matrices has its A twice.
        data = directory.read(place.name, 2 * largest_file(family, config, max_rank) + RULES.header_bytes)
    file = parse_gguf(data, place, RULES)
    alpha = _check_keys(file.keys, family, where)
    tensors = {name: _view(data, entry) for name, entry in file.tensors.items()}
    parts = _parts(tensors, alpha, family, config, max_rank, where)
    forms = {(part.pair.a.shape[-2], part.scaling) for part in parts}
    common = alpha if alpha and len(forms) == 1 and all(scaling == alpha / rank for rank, scaling in forms) else None
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
    modules = {module.name: module for module in family.lora_modules(config)}
    tensors = {
        f"{matrix}.lora_{letter}": tensor
        for name, pair in used.items()
        for matrix, stored in _stored_pairs(pair, ways_of_linear(config, modules[name])[0])
        for letter, tensor in zip("ab", stored, strict=True)
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


@dataclass(frozen=True, slots=True)
class Place:
    """What a matrix of the model's file is: part `number` of the way `held` in which a file holds `module`'s matrix."""

    module: LoraModule
    held: Held
    number: int

    @property
    def rows(self) -> int:
        return self.held.parts[self.number].shape[-2]


def places(family: Family, config: Mapping[str, Any]) -> dict[str, Place]:
    """The matrices of a model's file for which LoRA is read, by names such as `blk.0.ffn_gate.weight`."""
    return {
        part.name: Place(module, held, number)
        for module in family.lora_modules(config)
        for held in ways_of_linear(config, module)
        for number, part in enumerate(held.parts)
    }


def _view(data: memoryview, entry: Entry) -> torch.Tensor:
    count, dtype = math.prod(entry.shape), DTYPES[entry.dtype]
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start).reshape(entry.shape)


def _check_keys(keys: Mapping[str, Any], family: Family, where: str) -> float:
    """Returns alpha, 0 if there is none."""
    expected = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": family.gguf_architecture,
    }
    for key, value in expected.items():
        if keys.get(key) != value:
            found = f"is {str(keys[key])[:80]!r}" if key in keys else "is missing"
            raise AdapterError(f"{where}: {key} {found}; expected {value!r} for a LoRA adapter of this model")
    if "adapter.alora.invocation_tokens" in keys:
        raise AdapterError(f"{where}: adapter.alora.invocation_tokens: activated LoRA is not supported")
    alpha = keys.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha < 0:
        raise AdapterError(f"{where}: adapter.lora.alpha is {repr(alpha)[:80]}; expected a finite number, not below 0")
    return float(alpha)


def _parts(
    file_tensors: Mapping[str, torch.Tensor],
    alpha: float,
    family: Family,
    config: Mapping[str, Any],
    max_rank: int,
    where: str,
) -> list[Part]:
    """One part per dense module and per expert, in the model's order. A tensor that is not used raises AdapterError."""
    known = places(family, config)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in file_tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"{where}: unknown tensor {key!r}; expected NAME.weight.lora_a or NAME.weight.lora_b")
        if match["matrix"] not in known:
            raise _unknown(match["matrix"], known, family, f"{where}: unknown tensor {key!r}")
        tensors.setdefault(match["matrix"], {})[match["letter"]] = tensor
    if not tensors:
        raise AdapterError(f"{where}: has no LoRA tensors")
    found: dict[str, dict[int, _Stored]] = {}
    for matrix, halves in tensors.items():
        stored = _checked(matrix, halves, known[matrix], alpha, max_rank, where)
        of_module = found.setdefault(stored.place.module.name, {})
        other = next((one for one in of_module.values() if one.place.held is not stored.place.held), None)
        if other is not None:
            raise AdapterError(f"{where}: {other.matrix!r} and {matrix!r} hold the same weights; LoRA for one is read")
        of_module[stored.place.number] = stored
    ordered = [found[module.name] for module in family.lora_modules(config) if module.name in found]
    return [part for stored in ordered for part in _module_parts(stored, max_rank, where)]


@dataclass(frozen=True, slots=True)
class _Stored:
    """The pair of one matrix of the file."""

    matrix: str
    place: Place
    pair: LoraPair
    scaling: float

    @property
    def rank(self) -> int:
        return self.pair.a.shape[-2]


def _checked(
    matrix: str, halves: Mapping[str, torch.Tensor], place: Place, alpha: float, max_rank: int, where: str
) -> _Stored:
    for letter in "ab":
        if letter not in halves:
            raise AdapterError(f"{where}: '{matrix}.lora_{letter}' is missing; its other half is there")
    a, b = halves["a"], halves["b"]
    rank = check_rank(int(a.shape[-2]) if a.dim() > 1 else 0, max_rank, where, f"'{matrix}.lora_a': its rank")
    shapes = expected_shapes(replace(place.module, out_features=place.rows), rank)
    for letter, expected in zip("ab", shapes, strict=True):
        check_shape(f"{matrix}.lora_{letter}", halves[letter], expected, where)
    return _Stored(matrix, place, LoraPair(a, b), alpha / rank if alpha else 1.0)


def _module_parts(stored: Mapping[int, _Stored], max_rank: int, where: str) -> Iterable[Part]:
    """`stored`: the pairs of a module's matrices, by their numbers."""
    first = next(iter(stored.values()))
    module, held = first.place.module, first.place.held
    if module.num_experts:
        a, b = first.pair
        return [Part(module, expert, LoraPair(a[expert], b[expert]), first.scaling) for expert in range(len(a))]
    pair = first.pair
    if len(held.parts) > 1:
        pair = _joined([stored.get(number) for number in range(len(held.parts))], held, first)
        label = " and ".join(f"{one.matrix!r}" for one in stored.values())
        check_rank(pair.a.shape[0], max_rank, where, f"{label}: their rank together")
    a = pair.a if held.columns is None else pair.a[:, torch.tensor(held.columns).argsort()]
    b = pair.b if held.rows is None else pair.b[torch.tensor(held.rows).argsort()]
    return [Part(module, None, LoraPair(a, b), first.scaling)]


def _joined(stored: Sequence[_Stored | None], held: Held, first: _Stored) -> LoraPair:
    """One pair for the rows of all matrices, at the scaling of `first`. None: LoRA does not change this matrix.

    Pairs with one A keep it. Otherwise the ranks add up, and each matrix has columns of its own in B.
    """
    present = [one for one in stored if one is not None]
    share = all(
        one.scaling == first.scaling
        and one.pair.a.dtype == first.pair.a.dtype
        and torch.equal(one.pair.a, first.pair.a)
        for one in present
    )
    rank = first.rank if share else sum(one.rank for one in present)
    rows, start = [], 0
    for one, part in zip(stored, held.parts, strict=True):
        b = torch.zeros(part.shape[0], rank, dtype=first.pair.b.dtype if one is None else one.pair.b.dtype)
        if one is not None:
            b[:, start : start + one.rank] = one.pair.scaled(one.scaling / first.scaling).b
            start += 0 if share else one.rank
        rows.append(b)
    a = first.pair.a if share else torch.cat([one.pair.a for one in present])
    return LoraPair(a, torch.cat(rows))


def _stored_pairs(pair: LoraPair, held: Held) -> Iterator[tuple[str, LoraPair]]:
    """(matrix of the file, its pair) for a module's pair."""
    a = pair.a if held.columns is None else pair.a[:, torch.tensor(held.columns)]
    b = pair.b if held.rows is None else pair.b[torch.tensor(held.rows)]
    for part, rows in zip(held.parts, b.split([part.shape[-2] for part in held.parts], -2), strict=True):
        yield part.name, LoraPair(a, rows)


def _unknown(matrix: str, known: Mapping[str, Place], family: Family, where: str) -> AdapterError:
    base = matrix.removesuffix(".weight")
    last = base.rpartition(".")[2]
    if last in ("attn_k_b", "attn_v_b"):
        return AdapterError(f"{where}: a half of kv_b_proj, for which llama.cpp itself has no LoRA")
    if last in ("token_embd", "output", "ffn_gate_inp"):
        return AdapterError(f"{where}: router, embeddings and lm_head are never adapted here")
    return unknown_module(base, [name.removesuffix(".weight") for name in known], family, where)


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
