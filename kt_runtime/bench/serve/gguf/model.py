"""The checkpoint as a GGUF file: its matrices in bf16 or quantized (`mix.py`), and the tokenizer.

As in llama.cpp's own files, vectors and the router are float32, the experts of a layer are stacked, gate and up apart;
`families.gguf.layout` says how the other tensors are held. Keys: `keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from kt_runtime.bench.experts.gguf_blocks import to_blocks
from kt_runtime.bench.serve.gguf.keys import add_keys
from kt_runtime.bench.serve.gguf.mix import NO_MIX, type_of
from kt_runtime.bench.serve.gguf.tokens import Tokens, add_tokens, tokens_of
from kt_runtime.checkpoint_file import read_header
from kt_runtime.errors import CheckpointError
from kt_runtime.experts.gguf import to_parts
from kt_runtime.families import family_for
from kt_runtime.families.base import integer
from kt_runtime.families.gguf import Held, alternatives, expert_prefix, expert_tensors
from kt_runtime.families.gguf.keys import ARCHITECTURES, OF_LLAMA_CPP, WITHOUT_QK_NORM_EXPERTS, llama3_factors
from kt_runtime.families.quantization import quantization_of
from kt_runtime.files import write_new_file
from kt_runtime.gguf_file import BLOCKS
from kt_runtime.serve.models.checkpoint import dense_tensors
from kt_runtime.serve.models.checkpoint_files import read_config, weight_files

INDEX_HEAD = 64
"""Elements of the Hadamard matrix of llama.cpp's indexer (src/llama-kv-cache.cpp)."""
_PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Tensor:
    """`name`: GGUF's. `kind`: its type in the file. `read`: returns the values in `shape`, of any float dtype."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in elements for plain types, else with a row's bytes as the last size, as the `gguf` package asks."""
        if self.kind in _PLAIN:
            return self.shape
        per_block, block_bytes = BLOCKS[self.kind]
        return (*self.shape[:-1], self.shape[-1] // per_block * block_bytes)

    @property
    def num_bytes(self) -> int:
        per_block, block_bytes = BLOCKS[self.kind]
        return torch.Size(self.shape).numel() // per_block * block_bytes

    def contents(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes in the file."""
        if self.kind in _PLAIN:
            return self.read().to(_PLAIN[self.kind]).contiguous().reshape(-1).view(torch.uint8).numpy()
        values = self.read()
        matrices = values.reshape(-1, *values.shape[-2:])  # one by one: float32 of all experts is large
        return np.stack([to_blocks(matrix.float().numpy(), self.kind) for matrix in matrices]).reshape(-1)


def write_gguf_model(model: Path, path: Path, mix: str = NO_MIX) -> None:
    """Writes the checkpoint in the directory `model` as the new file `path`, its matrices in the types of `mix`.

    Raises CheckpointError for a quantized checkpoint, for a family that was not compared with llama.cpp, for a config
    that llama.cpp computes otherwise, for a tokenizer that is no byte-level BPE, and for one with more tokens than the
    model has. UnknownNameError: the mix. OSError: the file can't be written.
    """
    config = read_config(model)
    _check(model, config)
    tokens = tokens_of(model, integer(config, "vocab_size"))
    tensors = [_in_mix(tensor, mix, config) for tensor in _tensors(model, config)]
    write_new_file(path, partial(_write, config, tokens, tensors, mix))


def _check(model: Path, config: Mapping[str, Any]) -> None:
    family = family_for(config)
    if family.gguf_architecture not in ARCHITECTURES:
        raise CheckpointError(f"{model}: no GGUF file of {family.name} was compared with llama.cpp")
    if quantization_of(config) is not None:
        raise CheckpointError(f"{model}: is quantized; a GGUF file is written from bf16 checkpoints only")
    for key, value in OF_LLAMA_CPP.get(family.name, {}).items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{model}: config.json: {key!r} is {config[key]!r}; llama.cpp computes {value!r} always"
            )
    if family.keeps_states and config["linear_key_head_dim"] != config["linear_value_head_dim"]:
        raise CheckpointError(
            f"{model}: config.json: 'linear_value_head_dim' is {config['linear_value_head_dim']}; llama.cpp has one "
            f"size for keys and values ('linear_key_head_dim' is {config['linear_key_head_dim']})"
        )
    if family.chooses_keys and config["index_head_dim"] % INDEX_HEAD:
        raise CheckpointError(
            f"{model}: config.json: 'index_head_dim' is {config['index_head_dim']}; llama.cpp rotates the indexer's "
            f"queries and keys {INDEX_HEAD} elements at a time, so a multiple of that is written"
        )
    if family.name == "llama4_text":
        has_norms = family.num_experts(config) != WITHOUT_QK_NORM_EXPERTS
        if bool(config.get("use_qk_norm", True)) != has_norms:
            raise CheckpointError(
                f"{model}: config.json: 'use_qk_norm' is {config.get('use_qk_norm', True)!r}; llama.cpp computes "
                f"{has_norms} with {family.num_experts(config)} experts"
            )


def _in_mix(tensor: Tensor, mix: str, config: Mapping[str, Any]) -> Tensor:
    """Vectors and the router stay float32."""
    if tensor.kind == "F32":
        return tensor
    return replace(tensor, kind=type_of(mix, tensor.name, tensor.shape, config))


def _tensors(model: Path, config: Mapping[str, Any]) -> Iterator[Tensor]:
    opened = {file: safe_open(str(file), framework="pt", device="cpu") for file in weight_files(model)}
    family = family_for(config)
    places = {family.our_name(name): (file, name) for file in opened for name in read_header(file)}

    def load(name: str) -> torch.Tensor:
        file, stored = places[name]
        values: torch.Tensor = opened[file].get_tensor(stored)
        return values

    def part_of(held: Held, number: int) -> torch.Tensor:
        return to_parts(held, load(held.name))[number]

    for tensor in dense_tensors(config):
        held = alternatives(config, tensor.name, tensor.shape)[0]
        for number, part in enumerate(held.parts):
            kind = "F32" if part.is_float32 else "BF16"
            yield Tensor(part.name, part.shape, kind, partial(part_of, held, number))
    for layer in family.moe_layers(config):
        read = _fused_experts if f"{family.expert_prefix(layer)}.gate_up_proj" in places else _single_experts
        for name, shape in expert_tensors(config).items():
            kind = "F32" if name.endswith(".bias") else "BF16"
            whole = f"{expert_prefix(layer)}.{name}"
            yield Tensor(whole, shape, kind, partial(read, config, family.expert_prefix(layer), name, load))
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if family.name == "llama4_text" and scaling.get("rope_type") == "llama3":
        theta = config.get("rope_theta", scaling.get("rope_theta"))
        factors = torch.tensor(llama3_factors(scaling, float(theta), integer(config, "head_dim")))
        yield Tensor("rope_freqs.weight", tuple(factors.shape), "F32", lambda: factors)


def _single_experts(
    config: Mapping[str, Any], prefix: str, name: str, load: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """The experts' matrices or biases `name`, such as `ffn_up_exps.weight`, from one for each expert."""
    projection, kind = name.removeprefix("ffn_").split("_exps.")
    experts = range(family_for(config).num_experts(config))
    return torch.stack([load(f"{prefix}.{expert}.{projection}_proj.{kind}") for expert in experts])


def _fused_experts(
    config: Mapping[str, Any], prefix: str, name: str, load: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """The same, from one tensor for gate and up of all experts, and one for down."""
    mlp = family_for(config).expert_mlp(config)
    projection, kind = name.removeprefix("ffn_").split("_exps.")
    stored = f"{prefix}.{'down_proj' if projection == 'down' else 'gate_up_proj'}"
    found = load(stored if kind == "weight" else f"{stored}_bias")
    if kind == "weight" and mlp.is_transposed:
        found = found.transpose(1, 2)
    if projection == "down":
        return found
    is_up = projection == "up"
    return found[:, is_up::2] if mlp.is_interleaved else found.chunk(2, 1)[is_up]


def _write(config: Mapping[str, Any], tokens: Tokens, tensors: list[Tensor], mix: str, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, family_for(config).gguf_architecture)
    add_keys(writer, config, mix)
    add_tokens(writer, config, tokens)
    # numpy has no bfloat16; the writer needs the element's size only. It counts blocks in bytes.
    elements = {"F32": np.float32, "BF16": np.float16}
    for tensor in tensors:
        dtype, kind = np.dtype(elements.get(tensor.kind, np.uint8)), gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.stored_shape, dtype, tensor.num_bytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.contents())
    finally:
        writer.close()
