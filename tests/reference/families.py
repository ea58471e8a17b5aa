"""One tiny preset for each model family, by the family's name."""

from __future__ import annotations

from reference.parity import tiny_deepseek_v2

from kt_runtime.serve.models.presets import Preset, load_preset

MADE = {
    "deepseek_v3": "tiny-deepseek-v3",
    "qwen3_moe": "tiny-qwen3-moe",
    "mixtral": "tiny-mixtral",
    "olmoe": "tiny-olmoe",
    "glm4_moe": "tiny-glm4-moe",
    "glm4_moe_lite": "tiny-glm4-moe-lite",
    "minimax_m2": "tiny-minimax-m2",
    "gpt_oss": "tiny-gpt-oss",
    "llama4_text": "tiny-llama4",
    "qwen3_next": "tiny-qwen3-next",
    "deepseek_v32": "tiny-deepseek-v32",
    "glm_moe_dsa": "tiny-glm-moe-dsa",
    "qwen3_5_moe_text": "tiny-qwen3-5-moe-text",
}
PRESETS: dict[str, Preset] = {
    "deepseek_v2": tiny_deepseek_v2(),
    **{family: load_preset(preset) for family, preset in MADE.items()},
}
