"""Models that read images and text, whose language model is of a known family: Kimi-K2.5, K2.6 and K2.7, Llama 4,
Qwen3.5 and 3.6.

Their config.json has the language model's under `text_config`, and their checkpoints the language model's tensors under
`language_model.` (`naming.without_wrapper`) together with those of a vision tower. Only the language model is served
and trained: as a text model of its family, with SGLang's class of the family.

Hugging Face: `transformers.models.kimi_k25`. SGLang: `sglang.srt.models.kimi_k25`, whose `language_model` is
`DeepseekV3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import InvalidValueError

TEXT = "text_config"
_OF_BOTH = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """`inner`: the architecture of the language model. `what`: what is left out, for people; `left_out`: how its
    tensors' names begin, without a leading `model.`."""

    architecture: str
    model_type: str
    inner: str
    what: str
    left_out: tuple[str, ...]


WRAPPERS = (
    Wrapper(
        architecture="KimiK25ForConditionalGeneration",
        model_type="kimi_k25",
        inner="DeepseekV3ForCausalLM",
        what="the vision tower",
        left_out=("vision_tower.", "mm_projector."),
    ),
    Wrapper(
        architecture="Llama4ForConditionalGeneration",
        model_type="llama4",
        inner="Llama4ForCausalLM",
        what="the vision tower",
        left_out=("vision_model.", "multi_modal_projector."),
    ),
    Wrapper(
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        inner="Qwen3_5MoeForCausalLM",
        what="the vision tower",
        left_out=("visual.",),
    ),
)


def wrapper_of(config: Mapping[str, Any]) -> Wrapper | None:
    """The wrapper of a config.json; None: it is of a text model, or of no known wrapper."""
    names = {*(config.get("architectures") or ()), config.get("model_type")}
    return next((one for one in WRAPPERS if names & {one.architecture, one.model_type}), None)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language model alone; of a text model, its own.

    Keys that describe the checkpoint and its tokens are taken from the outside where the inside has none. Raises
    InvalidValueError for a missing `text_config`, and where both sides contradict each other about the head.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config)
    inside = config.get(TEXT)
    if not isinstance(inside, Mapping):
        raise InvalidValueError(f"config.json: {TEXT!r} is {str(inside)[:80]}; expected the language model's config")
    outside = {key: config[key] for key in _OF_BOTH if config.get(key) is not None}
    inside = {key: value for key, value in inside.items() if value is not None and key != "auto_map"}
    return {**outside, **inside, "architectures": [wrapper.inner], "tie_word_embeddings": _is_tied(config, inside)}


def is_left_out(name: str) -> bool:
    """Whether a checkpoint's tensor is of a part that no wrapper's language model has."""
    return name.removeprefix("model.").startswith(tuple(part for one in WRAPPERS for part in one.left_out))


def _is_tied(outside: Mapping[str, Any], inside: Mapping[str, Any]) -> bool:
    found = {bool(side["tie_word_embeddings"]) for side in (outside, inside) if "tie_word_embeddings" in side}
    if len(found) > 1:
        raise InvalidValueError(
            f"config.json: 'tie_word_embeddings' is {outside['tie_word_embeddings']!r}, but in {TEXT!r} "
            f"{inside['tie_word_embeddings']!r}: Hugging Face takes the first, SGLang 0.5.23 the second"
        )
    return found == {True}
