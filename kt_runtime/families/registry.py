"""Finds the family of a checkpoint by its config."""

from __future__ import annotations

from kt_runtime.errors import UnknownNameError
from kt_runtime.families.base import Config, Family
from kt_runtime.families.models.deepseek import DeepseekV2, DeepseekV3
from kt_runtime.families.models.deepseek_v32 import DeepseekV32, GlmMoeDsa
from kt_runtime.families.models.glm4_moe import Glm4Moe, Glm4MoeLite
from kt_runtime.families.models.gpt_oss import GptOss
from kt_runtime.families.models.llama4 import Llama4
from kt_runtime.families.models.minimax_m2 import MinimaxM2
from kt_runtime.families.models.mixtral import Mixtral
from kt_runtime.families.models.olmoe import Olmoe
from kt_runtime.families.models.qwen3_5_moe import Qwen35Moe
from kt_runtime.families.models.qwen3_moe import Qwen3Moe
from kt_runtime.families.models.qwen3_next import Qwen3Next
from kt_runtime.families.traits import nearest

FAMILIES: tuple[Family, ...] = (
    *(Qwen3Moe(), DeepseekV2(), DeepseekV3()),
    *(Mixtral(), Olmoe(), Glm4Moe(), Glm4MoeLite(), MinimaxM2()),
    *(GptOss(), Llama4(), Qwen3Next()),
    *(DeepseekV32(), GlmMoeDsa()),
    Qwen35Moe(),
)


def family_for(config: Config) -> Family:
    """The family of a config.json: by `architectures` first, `model_type` second.

    Raises UnknownNameError("model family") listing the known model types, the nearest family, and what differs.
    """
    architectures = config.get("architectures") or []
    by_architecture = {name: family for family in FAMILIES for name in family.architectures}
    for name in architectures:
        if name in by_architecture:
            return by_architecture[name]
    model_type = str(config.get("model_type"))
    by_type = {name: family for family in FAMILIES for name in family.model_types}
    if architectures or model_type not in by_type:
        unknown = architectures[0] if architectures else model_type
        known = by_architecture if architectures else by_type
        note = nearest(config, FAMILIES)
        raise UnknownNameError("model family", str(unknown), known, "config.json", typed=False, note=note)
    return by_type[model_type]
