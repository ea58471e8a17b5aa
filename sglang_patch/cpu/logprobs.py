"""Log-probabilities without CUDA kernels are `torch.log_softmax` of the logits in float32, as in training.

Symbols (SGLang 0.5.23), whose constructors read whether SGLang runs in its deterministic mode:

- `layers.sampler.Sampler`: sampled tokens. SGLang returns the logarithm of the rounded softmax. Its attribute
  `enable_deterministic` selects `log_softmax`, and changes nothing else where kt-runtime serves.
- `layers.logprob_processor.InputLogprobProcessor`: prompt tokens. SGLang subtracts maximum and log-sum in another
  order. Its attribute `enable_fast_input_logprobs` selects that order.

Reason: the three differ in the last bits. Log-probabilities of training (`resident.training.losses.log_softmax`) must
equal those with which a token was sampled. `torch.log_softmax` computes each row alone.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.layers.sampler.Sampler.__init__",
    "sglang.srt.layers.logprob_processor.InputLogprobProcessor.__init__",
)


def install(hooks: Hooks) -> None:
    if not hooks.has_cuda_kernels:
        hooks.after(SYMBOLS[0], _of_sampled_tokens)
        hooks.after(SYMBOLS[1], _of_prompt_tokens)


def _of_sampled_tokens(result: None, sampler: Any, *args: Any, **kwargs: Any) -> None:
    sampler.enable_deterministic = True


def _of_prompt_tokens(result: None, processor: Any, *args: Any, **kwargs: Any) -> None:
    processor.enable_fast_input_logprobs = False
