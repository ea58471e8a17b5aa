"""The model behind the API, and what of it can be trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families import Family, resolve_targets


@dataclass(frozen=True)
class ModelFacts:
    """`name`: for clients; `names`: all that mean this model. `directory` also holds its tokenizer."""

    name: str
    names: Collection[str]
    directory: Path
    family: Family
    config: Mapping[str, Any]
    context_tokens: int
    any_name: bool = False

    def check(self, name: str) -> None:
        if name not in self.names and not self.any_name:
            raise UnknownNameError("base model", name, self.names)

    def targets(self, *, attention: bool, mlp: bool) -> list[str]:
        """LoRA targets of the training protocol. Raises InvalidValueError if nothing is left to train."""
        wanted = (("attention",) if attention else ()) + (("mlp", "shared", "experts") if mlp else ())
        groups = {module.group for module in self.family.lora_modules(self.config)}
        found = [group for group in wanted if group in groups]
        if not found:
            raise InvalidValueError(
                "nothing to train: this server adapts attention (train_attn) and MLPs with experts (train_mlp); "
                "embedding and unembedding (train_unembed) are never adapted"
            )
        resolve_targets(self.config, found)
        return found
