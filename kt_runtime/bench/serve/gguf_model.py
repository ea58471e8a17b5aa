"""The checkpoint as a GGUF file: its matrices in bf16 or quantized (`quantized/mix.py`), and the tokenizer.

Names are those of the `gguf` package's map. As in llama.cpp's own files, vectors and the router are float32, the
experts of a layer are stacked, and MLA's kv_b_proj is split by head: attn_k_b is transposed, [heads, latent, nope], and
attn_v_b is [heads, value, latent]. A `llama` (Mixtral) has the halves of each head of queries and keys interleaved.
Keys: llama.cpp, src/models/qwen3moe.cpp, deepseek2.cpp, llama.cpp, olmoe.cpp, glm4-moe.cpp and minimax-m2.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from kt_runtime.bench.experts.gguf_blocks import to_blocks
from kt_runtime.bench.serve.quantized.mix import FILE_TYPES, NO_MIX, type_of
from kt_runtime.checkpoint_file import read_header
from kt_runtime.errors import CheckpointError
from kt_runtime.families import family_for
from kt_runtime.families import gguf as names_of_gguf
from kt_runtime.families.base import integer
from kt_runtime.families.quantization import quantization_of
from kt_runtime.files import write_new_file
from kt_runtime.gguf_file import BLOCKS
from kt_runtime.serve.models.checkpoint import dense_tensors
from kt_runtime.serve.models.checkpoint_files import read_config, weight_files

if TYPE_CHECKING:
    import gguf

ROUTER = ".mlp.gate.weight"
CORRECTION_BIAS = ".e_score_correction_bias"
OF_THE_MLP = ".mlp.e_score_correction_bias"  # MiniMax-M2's
KV_B = ".kv_b_proj.weight"
_PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16}
WITHOUT_EXPERT_SIZE = ("llama", "olmoe")  # feed_forward_length is the experts' there
ROTATED: Mapping[str, Callable[[Mapping[str, Any], int], int]] = {
    "llama": lambda config, head: head,
    "glm4moe": lambda config, head: int(head * config["partial_rotary_factor"]),
    "minimax-m2": lambda config, head: int(config["rotary_dim"]),
}
"""By architecture, elements of a head that are rotated, for those that have a key for it. `head`: its size."""


@dataclass(frozen=True)
class Tensor:
    """`name`: GGUF's. `kind`: its type in the file. `read`: returns the values in `shape`, of any float dtype."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In elements for plain types, else with the bytes of a row as the last size, as the `gguf` package asks."""
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

    Raises CheckpointError for a quantized checkpoint, for a family whose files are not read, for a tokenizer that is no
    byte-level BPE, and for one with more tokens than the model has. UnknownNameError: the mix. OSError: the
    file can't be written.
    """
    config = read_config(model)
    family = family_for(config)
    if family.gguf_architecture not in names_of_gguf.ARCHITECTURES:
        raise CheckpointError(f"{model}: no GGUF file of {family.name} was compared with llama.cpp")
    if quantization_of(config) is not None:
        raise CheckpointError(f"{model}: is quantized; a GGUF file is written from bf16 checkpoints only")
    tokens = _tokenizer(model, integer(config, "vocab_size"))
    tensors = [_in_mix(tensor, mix, config) for tensor in _tensors(model, config)]
    write_new_file(path, partial(_write, config, tokens, tensors, mix))


def _in_mix(tensor: Tensor, mix: str, config: Mapping[str, Any]) -> Tensor:
    """Vectors and the router stay float32."""
    if tensor.kind == "F32":
        return tensor
    return replace(tensor, kind=type_of(mix, tensor.name, tensor.shape, config))


def _tensors(model: Path, config: Mapping[str, Any]) -> Iterator[Tensor]:
    opened = {file: safe_open(str(file), framework="pt", device="cpu") for file in weight_files(model)}
    family = family_for(config)
    places = {family.our_name(name): (file, name) for file in opened for name in read_header(file)}
    name_of = _names(config)

    def load(name: str) -> torch.Tensor:
        file, stored = places[name]
        values: torch.Tensor = opened[file].get_tensor(stored)
        heads = names_of_gguf.interleaved_heads(config, name)
        return _interleaved(values, heads) if heads else values

    def load_stacked(*names: str) -> torch.Tensor:
        return torch.stack([load(name) for name in names])

    for tensor in dense_tensors(config):
        if tensor.name.endswith(KV_B):
            yield from _kv_b(tensor.name, config, name_of, partial(load, tensor.name))
        else:
            is_float32 = len(tensor.shape) == 1 or tensor.name.endswith(ROUTER)
            kind = "F32" if is_float32 else "BF16"
            yield Tensor(name_of(tensor.name), tensor.shape, kind, partial(load, tensor.name))
    num_experts, hidden, intermediate = family.expert_shape(config)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    for layer in family.moe_layers(config):
        prefix = family.expert_prefix(layer)
        for projection, shape in shapes.items():
            names = [f"{prefix}.{expert}.{projection}_proj.weight" for expert in range(num_experts)]
            stacked = name_of(f"{prefix}.{projection}_proj.weight")
            yield Tensor(stacked, (num_experts, *shape), "BF16", partial(load_stacked, *names))


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * size, in]: in each head a row of the first half, then the one of the second half, and so on."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _kv_b(
    name: str, config: Mapping[str, Any], name_of: Callable[[str], str], load: Callable[[], torch.Tensor]
) -> Iterator[Tensor]:
    heads, latent = integer(config, "num_attention_heads"), integer(config, "kv_lora_rank")
    nope, value = integer(config, "qk_nope_head_dim"), integer(config, "v_head_dim")

    def by_head() -> torch.Tensor:
        return load().reshape(heads, nope + value, latent)

    def keys() -> torch.Tensor:
        return by_head()[:, :nope].transpose(1, 2)

    def values() -> torch.Tensor:
        return by_head()[:, nope:]

    yield Tensor(name_of(name.replace("kv_b", "k_b")), (heads, latent, nope), "BF16", keys)
    yield Tensor(name_of(name.replace("kv_b", "v_b")), (heads, value, latent), "BF16", values)


def _names(config: Mapping[str, Any]) -> Callable[[str], str]:
    """The function from a Hugging Face tensor's name to GGUF's."""
    import gguf  # takes half a second

    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[family_for(config).gguf_architecture]
    known = gguf.get_tensor_name_map(architecture, integer(config, "num_hidden_layers"))

    def name_of(name: str) -> str:
        spelled = name.replace(OF_THE_MLP, ".block_sparse_moe.e_score_correction.bias")
        spelled = spelled.replace(CORRECTION_BIAS, ".e_score_correction.bias")
        found = known.get_name(spelled, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"the gguf package has no name for {name}"
        return str(found)

    return name_of


@dataclass(frozen=True)
class _Tokens:
    texts: list[str]
    types: list[int]
    merges: list[str]


def _tokenizer(model: Path, vocab_size: int) -> _Tokens:
    """The vocabulary of tokenizer.json by id; ids without a token are marked unused."""
    import gguf

    path = model / "tokenizer.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    bpe = found.get("model", {})
    if bpe.get("type") != "BPE":
        raise CheckpointError(
            f"{path}: is {bpe.get('type', 'missing')}; a GGUF file is written with byte-level BPE only"
        )
    texts = [f"[PAD{token}]" for token in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    special = {token["content"]: token["id"] for token in found.get("added_tokens", [])}
    for ids, kind in ((bpe["vocab"], gguf.TokenType.NORMAL), (special, gguf.TokenType.CONTROL)):
        for text, token in ids.items():
            if token >= vocab_size:
                raise CheckpointError(
                    f"{path}: token {text!r} has id {token}; config.json has a vocab_size of {vocab_size}"
                )
            texts[token], types[token] = text, int(kind)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    return _Tokens(texts, types, merges)


def _write(config: Mapping[str, Any], tokens: _Tokens, tensors: list[Tensor], mix: str, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, family_for(config).gguf_architecture)
    _add_keys(writer, config, mix)
    _add_tokens(writer, config, tokens)
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


def _add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], mix: str) -> None:
    import gguf

    family = family_for(config)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[mix]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(integer(config, "vocab_size"))
    writer.add_block_count(integer(config, "num_hidden_layers"))
    writer.add_context_length(integer(config, "max_position_embeddings"))
    writer.add_embedding_length(integer(config, "hidden_size"))
    writer.add_feed_forward_length(integer(config, "intermediate_size"))
    writer.add_head_count(integer(config, "num_attention_heads"))
    _add_rope(writer, config)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_expert_count(family.num_experts(config))
    writer.add_expert_used_count(family.num_experts_per_tok(config))
    if family.gguf_architecture not in WITHOUT_EXPERT_SIZE:
        writer.add_expert_feed_forward_length(family.expert_intermediate(config))
    if config.get("kv_lora_rank"):
        _add_latent_keys(writer, config)
        _add_router_keys(writer, config)
    else:
        writer.add_head_count_kv(integer(config, "num_key_value_heads"))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if family.gguf_architecture in ROTATED:
            writer.add_rope_dimension_count(ROTATED[family.gguf_architecture](config, head_dim))
        if family.gguf_architecture == "glm4moe":
            _add_router_keys(writer, config)
        if family.gguf_architecture == "minimax-m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_latent_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Latent attention counts as one head for keys and values; its own sizes are the `_mla` keys."""
    latent, rope = integer(config, "kv_lora_rank"), integer(config, "qk_rope_head_dim")
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(integer(config, "qk_nope_head_dim") + rope)
    writer.add_value_length_mla(integer(config, "v_head_dim"))
    writer.add_rope_dimension_count(rope)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(integer(config, "q_lora_rank"))


def _add_router_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Of the families with leading dense layers and shared experts. GLM's configs do not say `scoring_func`."""
    import gguf

    writer.add_leading_dense_block_count(int(config["first_k_dense_replace"]))
    writer.add_expert_shared_count(integer(config, "n_shared_experts"))
    writer.add_expert_weights_scale(float(config.get("routed_scaling_factor", 1.0)))
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    if config.get("n_group"):
        writer.add_expert_group_count(integer(config, "n_group"))
        writer.add_expert_group_used_count(integer(config, "topk_group"))
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if family_for(config).has_correction_bias(config) else kinds.SOFTMAX)


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`."""
    import gguf

    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta, kind = config.get("rope_theta", scaling.get("rope_theta")), scaling.get("rope_type", scaling.get("type"))
    if theta is None:
        raise CheckpointError("config.json: 'rope_theta' is missing; a GGUF file has it")
    writer.add_rope_freq_base(float(theta))
    if kind in (None, "default"):
        return
    if kind != "yarn":
        raise CheckpointError(f"config.json: the rope is {kind!r}; a GGUF file is written with yarn or without scaling")
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(float(scaling["factor"]))
    writer.add_rope_scaling_orig_ctx_len(int(scaling["original_max_position_embeddings"]))
    writer.add_rope_scaling_yarn_beta_fast(float(scaling.get("beta_fast", 32)))
    writer.add_rope_scaling_yarn_beta_slow(float(scaling.get("beta_slow", 1)))
    if scaling.get("mscale_all_dim"):
        # llama.cpp's deepseek2 divides this key by 0.1.
        writer.add_rope_scaling_yarn_log_mul(0.1 * float(scaling["mscale_all_dim"]))


def _add_tokens(writer: gguf.GGUFWriter, config: Mapping[str, Any], tokens: _Tokens) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # how a made tokenizer splits text; the bench sends token ids only
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    writer.add_token_merges(tokens.merges)
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(config.get(key), int):
            add(config[key])
