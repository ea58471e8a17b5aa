"""gpt-oss: all its tensors in the model's dtype, and kt-runtime's attention backend among those that may compute it.

Symbols (SGLang 0.5.23):

- `arg_groups.model_hook.attention_backends_of`: SGLang serves gpt-oss with the attention backends of a list, which are
  those that compute sinks and sliding windows. `kt_cpu` does, too (`cpu/attention.py`). In this module only, SGLang
  sees the name of its own backend for CPUs in its place; other backends are refused as before.
- `models.gpt_oss.GptOssForCausalLM.__init__`: SGLang makes attention's matrices and the router's in the dtype that
  config.json names, whatever `--dtype` says. Here the config names the dtype in which SGLang makes all others.
- `models.gpt_oss.GptOssAttention.__init__`: SGLang makes the sinks in bfloat16, whatever the model's dtype is. Hugging
  Face's, and therefore the training twin's, have the model's.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.options import ATTENTION_BACKEND

SYMBOLS = (
    "sglang.srt.arg_groups.model_hook.attention_backends_of",
    "sglang.srt.models.gpt_oss.GptOssAttention.__init__",
    "sglang.srt.models.gpt_oss.GptOssForCausalLM.__init__",
    "sglang.srt.arg_groups.model_override_base.attention_backends_of",
)
SGLANG_S = "intel_amx"


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.set(SYMBOLS[0], _known_backends)  # a hook would hold for the function's other callers too
        hooks.after(SYMBOLS[1], _give_sinks_the_dtype)
    hooks.before(SYMBOLS[2], _name_the_dtype)


def _known_backends(arguments: Any) -> tuple[str, str]:
    """Prefill's and decode's."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of

    prefill, decode = (SGLANG_S if name == ATTENTION_BACKEND else name for name in attention_backends_of(arguments))
    return prefill, decode


def _give_sinks_the_dtype(_result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    sinks = torch.empty_like(attention.sinks, dtype=attention.o_proj.weight.dtype)
    attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)


def _name_the_dtype(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    config.dtype = torch.get_default_dtype()  # SGLang sets it while it makes a model
