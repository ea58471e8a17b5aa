"""Families whose first layers are dense: `first_k_dense_replace` of config.json."""

from __future__ import annotations

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer


def first_moe_layer(config: Config) -> int:
    """The first layer with routed experts. Raises InvalidValueError unless at least one layer has them."""
    layers, first = integer(config, "num_hidden_layers"), config.get("first_k_dense_replace")
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first < layers:
        raise InvalidValueError(
            f"config.json: 'first_k_dense_replace' is {first!r}; expected 0 to {layers - 1} "
            f"(num_hidden_layers is {layers} and one layer at least must have routed experts)"
        )
    return first
