"""`adapter_config.json` of PEFT 0.21: which keys are used, which must be off, and which do not affect the tensors.

PEFT's scaling is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora. rank_pattern and alpha_pattern override r and
lora_alpha for modules whose name they match (`peft.utils.other.get_pattern_key`: the regular expression must match the
end of the name, from a dot or from its beginning; the first match wins). PEFT sorts the patterns when it saves, so
their order is lost: two patterns that match the same name with different values are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kt_runtime.adapters.validator import check_alpha, check_rank
from kt_runtime.errors import AdapterError, suggestion

_Number = TypeVar("_Number", int, float)

MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 10_000
_MAX_PATTERN_CHARACTERS = 256
_MAX_QUANTIFIERS = 3

_USED = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "base_model_name_or_path"}

# Keys about training, or about how PEFT finds modules; which modules are adapted follows from the tensors.
_SAYS_NOTHING = {
    *("auto_mapping", "ensure_weight_tying", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("target_modules", "task_type", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
}

# Key: why an adapter with any other value than None, False, empty or "none" can't be served.
_MUST_BE_OFF = {
    "use_dora": "DoRA is not supported",
    "bias": "trained biases can't be served",
    "modules_to_save": "modules trained in full can't be served",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "fan_in_fan_out": "transposed layers do not occur in this model",
    "kasa_config": "KaSA is not supported",
    "layer_replication": "replicated layers are not supported",
    "lora_bias": "a bias on lora_B can't be served",
    "megatron_config": "Megatron layers are not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "trainable_token_indices": "trained embeddings can't be served",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "velora_config": "VeLoRA is not supported",
}

# Initialisations that keep the base weights; PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA change them.
_KNOWN_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")

_KNOWN = _USED | _SAYS_NOTHING | set(_MUST_BE_OFF) | {"init_lora_weights", "target_parameters"}


@dataclass(frozen=True)
class PeftSettings:
    """A config's statements about the tensors. `base_model` is the name as its author wrote it, or None."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    base_model: str | None

    def rank_of(self, name: str) -> int:
        """Raises AdapterError if patterns contradict each other, as `scaling_of` does."""
        return _matching("rank_pattern", self.rank_pattern, name, self.rank)

    def alpha_of(self, name: str) -> float:
        return _matching("alpha_pattern", self.alpha_pattern, name, self.alpha)

    def scaling_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def is_plain(self) -> bool:
        """True if every module has rank `rank` and scaling `alpha / rank`."""
        return not (self.use_rslora or self.rank_pattern or self.alpha_pattern)


def parse_config(
    data: bytes | bytearray | memoryview, max_rank: int, where: str, fused: Collection[str] = ()
) -> PeftSettings:
    """Raises AdapterError, beginning with `where`, naming the key that can't be honoured.

    `fused`: fused parameters that may be adapted (`fused.parameters.parameters_of`). The rank of gate and up in one may
    be twice `max_rank`.
    """
    config = _decode(bytes(data), where)
    for key, value in config.items():
        _check_key(key, value, where, fused)
    peft_type = config.get("peft_type")
    if str(peft_type).upper() != "LORA":
        raise AdapterError(f"{where}: peft_type is {peft_type!r}; only 'LORA' can be served")
    for key in ("r", "lora_alpha"):
        if config.get(key) is None:
            raise AdapterError(f"{where}: {key!r} is missing; an adapter without it has no defined scaling")
    if not isinstance(config.get("use_rslora", False), bool):
        raise AdapterError(f"{where}: use_rslora is {config['use_rslora']!r}; expected true or false")
    base_model = config.get("base_model_name_or_path")
    return PeftSettings(
        rank=check_rank(config["r"], max_rank, where),
        alpha=check_alpha(config["lora_alpha"], where),
        use_rslora=config.get("use_rslora", False),
        rank_pattern=tuple(
            (pattern, check_rank(value, _most(text, max_rank, fused), where, f"rank_pattern[{text!r}]"))
            for text, pattern, value in _patterns(config, "rank_pattern", where)
        ),
        alpha_pattern=tuple(
            (pattern, check_alpha(value, where, f"alpha_pattern[{text!r}]"))
            for text, pattern, value in _patterns(config, "alpha_pattern", where)
        ),
        base_model=base_model if isinstance(base_model, str) and base_model else None,
    )


def _most(pattern: str, max_rank: int, fused: Collection[str]) -> int:
    return 2 * max_rank if fused and pattern.endswith("gate_up_proj") else max_rank


def make_config(
    rank: int,
    alpha: float,
    targets: list[str],
    base_model: str | None,
    parameters: list[str] | None = None,
    doubled: Collection[str] = (),
) -> dict[str, Any]:
    """The content of `adapter_config.json` for tensors of one rank and one scaling, generated by PEFT itself.

    `parameters`: the config's `target_parameters`, see `peft_directory`; None for none. `doubled`: those of them whose
    rank is twice `rank`, with the same scaling.
    """
    from peft import LoraConfig  # imports half of transformers, so it is loaded only for writing

    # PEFT declares lora_alpha an integer but accepts any number; a whole number is written as an integer.
    whole_alpha: Any = int(alpha) if float(alpha).is_integer() else float(alpha)
    config = LoraConfig(
        r=rank,
        lora_alpha=whole_alpha,
        target_modules=targets,
        target_parameters=parameters or None,
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
        rank_pattern=dict.fromkeys(doubled, 2 * rank),
        alpha_pattern=dict.fromkeys(doubled, 2 * whole_alpha),
    ).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return dict(sorted(plain.items()))


def _decode(data: bytes, where: str) -> dict[str, Any]:
    def refuse_constant(name: str) -> None:
        raise AdapterError(f"{where}: contains {name}, which is no JSON number")

    try:
        config = json.loads(data, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise AdapterError(f"{where}:{error.lineno}: invalid JSON: {error.msg} (column {error.colno})") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise AdapterError(f"{where}: invalid JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{where}: expected a JSON object, found {type(config).__name__}")
    return config


def _check_key(key: str, value: Any, where: str, fused: Collection[str]) -> None:
    is_off = value is None or value is False or value == "none" or (isinstance(value, list | dict | str) and not value)
    if key in _MUST_BE_OFF and not is_off:
        raise AdapterError(f"{where}: {key} is {str(value)[:80]!r}: {_MUST_BE_OFF[key]}")
    if key == "target_parameters" and not is_off:
        _check_parameters(value, where, fused)
    # A newer PEFT may write keys that are unknown here; a key that is switched off has no effect.
    if key not in _KNOWN and not is_off:
        raise AdapterError(f"{where}: unknown key {key!r} (value {str(value)[:80]!r}){suggestion(key, _KNOWN)}")
    if key == "init_lora_weights" and value not in _KNOWN_INITIALISATIONS:
        raise AdapterError(
            f"{where}: init_lora_weights is {str(value)[:80]!r}: it changes the base weights, which stay as they are "
            "here; convert the adapter to plain LoRA first (PEFT: path_initial_model_for_weight_conversion)"
        )


def _check_parameters(value: Any, where: str, allowed: Collection[str]) -> None:
    """Accepts names of linears' weights, which repeat the tensors' names, and those that end with one of `allowed`.
    Refuses other fused parameters: the tensors' names don't tell which parameter is adapted."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{where}: target_parameters is {str(value)[:80]!r}; expected a list of names")
    fused = next((name for name in value if not name.endswith((".weight", *allowed))), None)
    if fused is not None:
        raise AdapterError(
            f"{where}: target_parameters is {str(value)[:80]!r}: {fused[:80]!r} is no linear's weight: PEFT adapts "
            "experts as one fused parameter, and its file does not say which parameter is which; save the adapter with "
            "one pair per expert (....mlp.experts.0.gate_proj.lora_A.weight)"
        )


def _patterns(config: Mapping[str, Any], key: str, where: str) -> list[tuple[str, re.Pattern[str], Any]]:
    table = config.get(key) or {}
    if not isinstance(table, dict) or len(table) > _MAX_PATTERNS:
        raise AdapterError(f"{where}: {key} must map at most {_MAX_PATTERNS} module names to numbers")
    return [(text, _compile(text, key, where), value) for text, value in table.items()]


def _matching(key: str, patterns: Iterable[tuple[re.Pattern[str], _Number]], name: str, default: _Number) -> _Number:
    values = {value for pattern, value in patterns if pattern.match(name)}
    if len(values) > 1:
        raise AdapterError(
            f"{key}: several patterns match {name!r}, with the values {sorted(values)}; which of them comes first is "
            "not in the file, so that it can't be known which holds"
        )
    return values.pop() if values else default


def _compile(pattern: str, key: str, where: str) -> re.Pattern[str]:
    """Compiles as PEFT does. Refuses patterns that may backtrack without end: few quantifiers, none on a group."""
    quantifiers = len(re.findall(r"(?<!\\)[*+?{]", pattern))
    is_costly = re.search(r"\)[*+?{]|\\[1-9]|\(\?", pattern) is not None
    if len(pattern) > _MAX_PATTERN_CHARACTERS or quantifiers > _MAX_QUANTIFIERS or is_costly:
        raise AdapterError(
            f"{where}: {key}: pattern {pattern[:80]!r} is too complex; at most {_MAX_PATTERN_CHARACTERS} characters, "
            f"{_MAX_QUANTIFIERS} quantifiers, and none after a parenthesis"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise AdapterError(f"{where}: {key}: {pattern[:80]!r} is no regular expression: {error}") from None
