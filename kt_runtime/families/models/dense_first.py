"""What families share whose first layers are dense and whose others have shared and routed experts, under DeepSeek's
keys of config.json."""

from __future__ import annotations

from kt_runtime.families.base import Config, Family, first_moe_layer, integer


class DenseFirstFamily(Family):
    def moe_layers(self, config: Config) -> list[int]:
        return list(range(first_moe_layer(config), integer(config, "num_hidden_layers")))

    def num_experts(self, config: Config) -> int:
        return integer(config, "n_routed_experts", "num_local_experts", "num_experts")

    def shared_intermediate(self, config: Config) -> int:
        return integer(config, "moe_intermediate_size") * integer(config, "n_shared_experts")
