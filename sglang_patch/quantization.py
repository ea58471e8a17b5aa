"""Keeps SGLang from finding out by itself how a checkpoint is quantized.

Symbols (SGLang 0.5.23): `configs.model_config.ModelConfig._parse_quant_hf_config` and `._find_quant_modelslim_config`.
Reason: `arguments.NOT_QUANTIZED` takes `quantization_config` out of the config.json that SGLang sees, since the expert
store holds the experts and `cpu/weights.py` dequantizes all else. SGLang then looks for the files hf_quant_config.json,
which NVIDIA's ModelOpt writes next to its config.json, and quant_model_description.json, and would build quantized
layers. `serve/models/checkpoint_files.py` refuses a checkpoint that only such a file describes.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
    "sglang.srt.configs.model_config.ModelConfig._find_quant_modelslim_config",
)


def install(hooks: Hooks) -> None:
    for symbol in SYMBOLS:
        hooks.around(symbol, _none)


def _none(_original: Any, _config: Any) -> None:
    return None
