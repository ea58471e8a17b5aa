"""`kt-runtime serve --exact`: training's log-probabilities equal served ones to the bit, or the server does not start.

What is known before the model is loaded is checked here. The resident knows the rest (`StatusReply.not_exact`) after
the server's first tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.machine import has_gpu
from kt_runtime.serve.options.named import ServeOptions


def check_exact(options: ServeOptions, config: Mapping[str, Any]) -> None:
    """With `--exact`, raises InvalidValueError for a machine, option or model with which it can't hold.

    `config`: the model's config.json.
    """
    if not options.exact:
        return
    if options.no_step:
        raise InvalidValueError("--exact and --no-step exclude each other: leave out one of them")
    if options.gpu_experts_bytes:
        raise InvalidValueError(
            "--exact and --gpu-experts exclude each other: experts on the device round in other places than the store, "
            "with which training computes; leave out one of them"
        )
    if has_gpu():
        raise InvalidValueError(
            not_exact("this machine has a GPU, on which SGLang and PyTorch compute in other orders")
        )
    family = family_for(config)
    if family.decoder_stack(config) is None:
        raise InvalidValueError(not_exact(f"the family {family.name} has no table of its decoder stack"))


def not_exact(why: str) -> str:
    """The message for `--exact` where it does not hold."""
    return (
        f"--exact: training's log-probabilities may differ from served ones: {why}; start without --exact, "
        "and /kt/status says the same in `not_exact`"
    )
