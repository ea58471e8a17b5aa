from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kt_runtime.adapters.tensors import AdapterTensors, LoraPair, expected_shapes
from kt_runtime.families import Family, family_for, resolve_targets

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 4,
}
DEEPSEEK_V3 = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "kv_lora_rank": 8,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1}
MIXTRAL = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "sliding_window": None,
}
OLMOE = _COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
}
GLM4_MOE = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GLM4_MOE_LITE = DEEPSEEK_V3 | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 5,
    "index_head_dim": 8,
    "index_n_heads": 4,
}
GLM_MOE_DSA = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "topk_group": 1,
}
MINIMAX_M2 = _COMMON | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rotary_dim": 6,
    "num_local_experts": 4,
}
GPT_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
LLAMA4 = _COMMON | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
}
QWEN3_NEXT = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
}
QWEN3_5_MOE = QWEN3_NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
CONFIGS: dict[str, dict[str, Any]] = {"qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}
MAX_RANK = 8


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A family with a tiny config, and what tests make of it."""

    config: dict[str, Any]

    @property
    def family(self) -> Family:
        return family_for(self.config)

    def adapter(self, *targets: str, rank: int = 4, alpha: float = 8.0, seed: int = 0) -> AdapterTensors:
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for module in resolve_targets(self.config, targets or ("all",)):
            a, b = expected_shapes(module, rank)
            pairs[module.name] = LoraPair(
                torch.randn(a, generator=generator) * 0.3, torch.randn(b, generator=generator) * 0.3
            )
        return AdapterTensors.from_modules(rank, alpha, pairs)

    def build(self) -> Any:
        """The Hugging Face model in float32, with the same random weights every time."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config), dtype=torch.float32).eval()


@pytest.fixture
def qwen() -> TinyModel:
    return TinyModel(dict(QWEN3_MOE))


@pytest.fixture
def deepseek() -> TinyModel:
    return TinyModel(dict(DEEPSEEK_V3))


@pytest.fixture
def deepseek_v2() -> TinyModel:
    return TinyModel(dict(DEEPSEEK_V2))


@pytest.fixture
def deepseek_v2_lite() -> TinyModel:
    return TinyModel(dict(DEEPSEEK_V2_LITE))


@pytest.fixture
def mixtral() -> TinyModel:
    return TinyModel(dict(MIXTRAL))


@pytest.fixture
def olmoe() -> TinyModel:
    return TinyModel(dict(OLMOE))


@pytest.fixture
def glm4_moe() -> TinyModel:
    return TinyModel(dict(GLM4_MOE))


@pytest.fixture
def glm4_moe_lite() -> TinyModel:
    return TinyModel(dict(GLM4_MOE_LITE))


@pytest.fixture
def deepseek_v32() -> TinyModel:
    return TinyModel(dict(DEEPSEEK_V32))


@pytest.fixture
def glm_moe_dsa() -> TinyModel:
    return TinyModel(dict(GLM_MOE_DSA))


@pytest.fixture
def minimax_m2() -> TinyModel:
    return TinyModel(dict(MINIMAX_M2))


@pytest.fixture
def gpt_oss() -> TinyModel:
    return TinyModel(dict(GPT_OSS))


@pytest.fixture
def llama4() -> TinyModel:
    return TinyModel(dict(LLAMA4))


@pytest.fixture
def qwen3_next() -> TinyModel:
    return TinyModel(dict(QWEN3_NEXT))


@pytest.fixture
def qwen3_5_moe() -> TinyModel:
    return TinyModel(dict(QWEN3_5_MOE))


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(dict(CONFIGS[request.param]))


@pytest.fixture
def max_rank() -> int:
    return MAX_RANK


@pytest.fixture
def write_raw() -> Callable[..., Path]:
    """Writes a PEFT directory as PEFT would, checking nothing: `tensors` by flat name without prefix."""

    def write(path: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
        path.mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]} | settings
        config = {key: value for key, value in config.items() if value is not ...}
        (path / "adapter_config.json").write_text(json.dumps(config))
        prefixed = {"base_model.model." + name: tensor.clone() for name, tensor in tensors.items()}
        save_file(prefixed, path / "adapter_model.safetensors")
        return path

    return write
