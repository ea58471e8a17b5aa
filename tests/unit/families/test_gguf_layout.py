"""How GGUF files hold the tensors of a checkpoint: names as the `gguf` package has them, orders and values as the
converter of llama.cpp makes them (conversion/qwen.py and llama.py, at llama-cpp-python 0.3.36)."""

from __future__ import annotations

import gguf
import pytest
import torch
from reference.checkpoints.gguf_models import expressible

from kt_runtime.errors import CheckpointError
from kt_runtime.experts.gguf import from_parts, to_parts
from kt_runtime.families import family_for
from kt_runtime.families.gguf import alternatives, config_of, held
from kt_runtime.families.gguf.keys import ARCHITECTURES, llama3_factors

MODELS = (
    *("tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-mixtral", "tiny-olmoe"),
    *("tiny-gpt-oss", "tiny-llama4", "tiny-qwen3-next", "tiny-qwen3-5-moe-text"),
    *("tiny-deepseek-v32", "tiny-glm-moe-dsa"),
)
WITH_NAMES_OF = {"deepseek32": "glm-dsa"}  # the `gguf` package 0.19 knows the second
NEXT, QWEN3_5 = (expressible(name).config for name in ("tiny-qwen3-next", "tiny-qwen3-5-moe-text"))
LAYER = "model.layers.0.linear_attn"


def reordered(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`_LinearAttentionVReorderBase._reorder_v_heads` for two key heads of two value heads each."""
    shape = list(tensor.shape)
    split = tensor.reshape(*shape[:dim], 2, 2, size, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).reshape(shape)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_the_gguf_package_s_and_every_tensor_comes_back(name: str) -> None:
    config = expressible(name).config
    family = family_for(config)
    assert family.gguf_architecture in ARCHITECTURES
    named = WITH_NAMES_OF.get(family.gguf_architecture, family.gguf_architecture)
    architecture = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[named]
    known = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    compared, generator = 0, torch.Generator().manual_seed(1)
    for source in family.twin_sources(config):
        tensor = torch.randn(source.shape, generator=generator)
        for way in alternatives(config, source.name, source.shape):
            parts = to_parts(way, tensor)
            assert [tuple(part.shape) for part in parts] == [part.shape for part in way.parts]
            # Adding one, and the logarithm of an exponential, round.
            torch.testing.assert_close(from_parts(way, parts), tensor, rtol=3e-6, atol=3e-7)
        spelled = f"{source.name}.weight" if source.name.endswith("sinks") else source.name  # as the converter does
        found = known.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if found is not None and len(way.parts) == 1 and ".in_proj_qkvz." not in source.name:
            assert way.parts[0].name == found
            compared += 1
    assert compared > 5 * config["num_hidden_layers"]


def test_qwen3_next_s_input_matrix_is_split_by_kind() -> None:
    """Of each of two key heads: a query and a key of 32, two values of 32, two gates of 32."""
    tensor = torch.randn(2 * (32 + 32 + 64 + 64), 8)
    q, k, v, z = tensor.reshape(2, 192, 8).split([32, 32, 64, 64], 1)
    way = held(NEXT, f"{LAYER}.in_proj_qkvz.weight", tuple(tensor.shape), {"blk.0.attn_qkv.weight"})
    assert [part.name for part in way.parts] == ["blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"]
    qkv, gate = to_parts(way, tensor)
    assert torch.equal(qkv, torch.cat([part.flatten(0, 1) for part in (q, k, v)]))
    assert torch.equal(gate, z.flatten(0, 1))
    older = held(NEXT, f"{LAYER}.in_proj_qkvz.weight", tuple(tensor.shape), {"blk.0.ssm_in.weight"})
    assert torch.equal(to_parts(older, tensor)[0], tensor)


@pytest.mark.parametrize(
    ("name", "before", "size", "dim"),
    [
        ("in_proj_qkv.weight", 128, 32, 0),
        ("in_proj_z.weight", 0, 32, 0),
        ("in_proj_a.weight", 0, 1, 0),
        ("in_proj_b.weight", 0, 1, 0),
        ("conv1d.weight", 128, 32, 0),
        ("dt_bias", 0, 1, 0),
        ("out_proj.weight", 0, 32, 1),
    ],
)
def test_qwen3_5_s_value_heads_are_in_llama_cpp_s_order(name: str, before: int, size: int, dim: int) -> None:
    shape = next(
        source.shape for source in family_for(QWEN3_5).twin_sources(QWEN3_5) if source.name == f"{LAYER}.{name}"
    )
    tensor = torch.randn(shape)
    (found,) = to_parts(alternatives(QWEN3_5, f"{LAYER}.{name}", shape)[0], tensor)
    kept, moved = tensor[:before], tensor[before:]
    assert torch.equal(found, torch.cat([kept, reordered(moved, dim, size)]).reshape(found.shape))


def test_norms_are_stored_as_factors_and_decays_negative() -> None:
    for config in (NEXT, QWEN3_5):
        for name, change in (
            ("model.norm.weight", 1.0),
            ("model.layers.3.self_attn.q_norm.weight", 1.0),
            ("model.layers.0.post_attention_layernorm.weight", 1.0),
            (f"{LAYER}.norm.weight", 0.0),
        ):
            (found,) = to_parts(alternatives(config, name, (8,))[0], torch.arange(8.0))
            assert torch.equal(found, torch.arange(8.0) + change)
    (found,) = to_parts(alternatives(NEXT, f"{LAYER}.A_log", (3,))[0], torch.tensor([0.0, 1.0, 2.0]))
    torch.testing.assert_close(found, -torch.tensor([0.0, 1.0, 2.0]).exp(), rtol=0, atol=0)


def test_a_llama_4_s_rotary_embedding_is_recognised_by_its_factors() -> None:
    keys = {
        "general.architecture": "llama4",
        **{f"llama4.{name}": 4 for name in ("block_count", "interleave_moe_layer_step", "expert_used_count")},
        **{f"llama4.{name}": 128 for name in ("embedding_length", "feed_forward_length", "expert_feed_forward_length")},
        **{f"llama4.attention.{name}": 2 for name in ("head_count", "head_count_kv")},
        "llama4.attention.layer_norm_rms_epsilon": 1e-5,
        "llama4.context_length": 4096,
        "llama4.expert_count": 16,
        "llama4.rope.dimension_count": 128,
        "llama4.rope.freq_base": 5e5,
    }
    shapes = {"token_embd.weight": (768, 128), "output.weight": (768, 128), "rope_freqs.weight": (64,)}
    shapes |= {f"blk.{layer}.attn_norm.weight": (128,) for layer in range(4)}
    scout = {"factor": 16.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    for high in (1.0, 4.0):
        factors = llama3_factors({**scout, "high_freq_factor": high}, 5e5, 128)
        assert config_of(keys, shapes, "m.gguf", lambda _, found=factors: found)["rope_scaling"] == {  # type: ignore[misc]
            **scout,
            "high_freq_factor": high,
        }
    with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' is not of a Llama 4's rotary embedding"):
        config_of(keys, shapes, "m.gguf", lambda _: [1.0, 2.0] * 32)
    del shapes["rope_freqs.weight"]
    assert config_of(keys, shapes, "m.gguf")["rope_scaling"] is None
    with pytest.raises(CheckpointError, match="a Llama 4 has chunks"):
        config_of({**keys, "llama4.attention.sliding_window": 0}, shapes, "m.gguf")


def test_which_layers_of_a_glm_have_an_indexer_is_read_or_follows_from_the_context() -> None:
    keys = {
        "general.architecture": "glm-dsa",
        **{f"glm-dsa.{name}": 8 for name in ("block_count", "expert_used_count", "expert_count", "head_count")},
        **{f"glm-dsa.{name}": 32 for name in ("embedding_length", "feed_forward_length", "expert_feed_forward_length")},
        **{f"glm-dsa.attention.{name}": 16 for name in ("head_count", "kv_lora_rank", "q_lora_rank", "key_length")},
        **{f"glm-dsa.attention.indexer.{name}": 4 for name in ("head_count", "key_length", "top_k")},
        **{f"glm-dsa.{name}": 1 for name in ("expert_shared_count", "leading_dense_block_count")},
        "glm-dsa.attention.value_length": 8,
        "glm-dsa.attention.layer_norm_rms_epsilon": 1e-5,
        "glm-dsa.rope.dimension_count": 8,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (768, 32), "output.weight": (768, 32)}
    shapes |= {f"blk.{layer}.attn_norm.weight": (32,) for layer in range(8)}

    def types(context: int, **more: object) -> str:
        config = config_of({**keys, "glm-dsa.context_length": context, **more}, shapes, "m.gguf")
        return "".join(kind[0] for kind in config["indexer_types"])

    assert types(202752) == "ffffffff"  # GLM-5 and 5.1
    assert types(1 << 20) == "fffsssfs"  # GLM-5.2, as its published config.json
    own = {"glm-dsa.attention.indexer.types": [True, True, False, False] * 2}
    assert types(202752, **own) == "ffssffss"
    with pytest.raises(CheckpointError, match=r"indexer\.types' is .*; expected 8 booleans"):
        types(202752, **{"glm-dsa.attention.indexer.types": [True]})
