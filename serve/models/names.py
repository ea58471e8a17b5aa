"""Facts about models by name alone, for the error message about a model that is not on this machine.

Names are those on the hub. A checkpoint is judged by its config.json (`families.registry`), never by its name: this
table only helps a user to find a checkpoint.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kt_runtime.families.registry import FAMILIES
from kt_runtime.families.wrapped import WRAPPERS
from kt_runtime.serve.models.hub_cache import is_hub_id, repository_directory
from kt_runtime.serve.models.presets import preset_names


@dataclass(frozen=True)
class Served:
    """`pattern`: matches the name without organisation, in lower case. `preset`: one of the same architecture."""

    pattern: str
    organisation: str
    preset: str


# The first match applies.
SERVED = (
    Served(r"deepseek-(v3|v3-0324|v3-base|v3\.1(-base|-terminus)?|r1|r1-0528|r1-zero)", "deepseek-ai", "DeepSeek-V3"),
    Served(r"deepseek-v3\.2(-exp(-base)?|-speciale)?", "deepseek-ai", "DeepSeek-V3.2"),
    Served(r"deepseek-(coder-)?v2(\.5)?(-.*)?", "deepseek-ai", "DeepSeek-V2-Lite"),
    Served(r"glm-4\.5-air(-base)?", "zai-org", "GLM-4.5-Air"),
    Served(r"glm-4\.7-flash", "zai-org", "GLM-4.7-Flash"),
    Served(r"glm-4\.[567](-base)?", "zai-org", "GLM-4.5"),
    Served(r"glm-5(\.1)?", "zai-org", "GLM-5"),
    Served(r"glm-5\.2", "zai-org", "GLM-5.2"),
    Served(r"gpt-oss-120b", "openai", "gpt-oss-120b"),
    Served(r"gpt-oss-20b", "openai", "gpt-oss-20b"),
    Served(r"kimi-k2\.[567](-code)?", "moonshotai", "Kimi-K2.5"),
    Served(r"kimi-k2-thinking", "moonshotai", "Kimi-K2-Thinking"),
    Served(r"kimi-k2-(base|instruct)(-0905)?", "moonshotai", "Kimi-K2"),
    Served(r"llama-4-maverick-17b-128e(-instruct)?", "meta-llama", "Llama-4-Maverick"),
    Served(r"llama-4-scout-17b-16e(-instruct)?", "meta-llama", "Llama-4-Scout"),
    Served(r"minimax-m2(\.[157])?", "MiniMaxAI", "MiniMax-M2"),
    Served(r"mixtral-8x(7|22)b(-instruct)?-v0\.1", "mistralai", "Mixtral-8x7B"),
    Served(r"olmoe-1b-7b-.*", "allenai", "OLMoE-1B-7B"),
    Served(r"qwen3\.[56]-35b-a3b(-base)?", "Qwen", "Qwen3.5-35B-A3B"),
    Served(r"qwen3\.[56]-122b-a10b(-base)?", "Qwen", "Qwen3.5-122B-A10B"),
    Served(r"qwen3\.[56]-397b-a17b(-base)?", "Qwen", "Qwen3.5-397B-A17B"),
    Served(r"qwen3-(next-80b-a3b.*|coder-next.*)", "Qwen", "Qwen3-Next-80B-A3B"),
    Served(r"qwen3-(coder-)?\d+b-a\d+b(-.*)?", "Qwen", "Qwen3-30B-A3B"),
)

# (pattern, its architecture)
NOT_SERVED = (
    (r"deepseek-v4.*", "DeepseekV4ForCausalLM"),
    (r"deepseek-r1-distill-.*", "a dense model"),
    (r"glm-4\.[5-7]v.*", "Glm4vMoeForConditionalGeneration"),
    (r"minimax-m3.*", "MiniMaxM3SparseForConditionalGeneration"),
    (r"qwen3\.[56]-\d+(\.\d+)?b(-base)?", "a dense model"),
    (r"qwen3-vl.*", "Qwen3VLMoeForConditionalGeneration"),
    (r"qwen(1\.5|2)-.*a\d+(\.\d+)?b.*", "Qwen2MoeForCausalLM"),
    (r"qwen3-(0\.6|1\.7|4|8|14|32)b.*|qwen2(\.5)?-\d.*|llama-[23].*|mistral-.*|gemma.*|phi-[34].*", "a dense model"),
)


def advice(text: str) -> str:
    """One or two sentences about a model that was not found and is no preset: what it is, how to get it."""
    name = text.rpartition("/")[2].casefold()
    for pattern, architecture in NOT_SERVED:
        if re.fullmatch(pattern, name):
            return f"{_of(text)} is {_described(architecture)}, which kt-runtime doesn't serve; {_served_families()}"
    for served in SERVED:
        if re.fullmatch(served.pattern, name):
            hub_id = text if is_hub_id(text) else f"{served.organisation}/{text}"
            return f"It has the architecture of the preset {served.preset}, which is served. {download(hub_id)}"
    names = {preset.casefold(): preset for preset in preset_names()}
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    hint = f"Did you mean {names[near[0]]!r}? " if near else ""
    found = f"{download(text)}. " if is_hub_id(text) else ""
    return f"{hint}{found}Presets: {', '.join(preset_names())}; `kt-runtime models` says more"


def download(hub_id: str, name: str | None = None) -> str:
    """How to download the checkpoint `hub_id`: command, destination, and its `name` for --model (None: `hub_id`)."""
    return (
        f"Download it with `hf download {hub_id}`, which puts it into {repository_directory(hub_id)}, "
        f"and pass --model {name or hub_id}"
    )


def _of(text: str) -> str:
    return text.rpartition("/")[2]


def _described(architecture: str) -> str:
    return architecture if " " in architecture else f"of the architecture {architecture}"


def _served_families() -> str:
    wrappers = (wrapper.architecture for wrapper in WRAPPERS)
    names = (name for family in FAMILIES for name in family.architectures)
    return f"served are {', '.join([*names, *wrappers])}"
