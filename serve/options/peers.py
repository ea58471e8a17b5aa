"""Accepts the command lines of SGLang, vLLM and KTransformers users for `serve`.

SGLang's options may stand anywhere, with or without `--` before them. Aliases of kt-runtime's own options are
translated. The other options are checked later (`serve.options.sglang`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from kt_runtime.errors import InvalidValueError

# Option names of SGLang, vLLM, KTransformers and of earlier versions -> kt-runtime's names.
ALIASES = {
    "--model-path": "--model",
    "--context-length": "--context-tokens",
    "--max-model-len": "--context-tokens",
    "--max-loras-per-batch": "--lora-slots",
    "--max-num-seqs": "--max-running-requests",
    "--kt-cpuinfer": "--expert-threads",
    "--cpu-infer": "--expert-threads",
    "--cache-lens": "--max-total-tokens",
    "--training-share": "--train-share",
    "--optimize-config-path": "--placement",
    "--optimize-rule-path": "--placement",
}


def sorted_arguments(arguments: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The arguments with kt-runtime's own first, then `--`, then all others in their order.

    `takes_value`: kt-runtime's options with their dashes -> whether they take a value. A word before the first foreign
    option is the model. Raises InvalidValueError for a word that belongs to no option.
    """
    own: list[str] = []
    foreign: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            foreign += rest
            break
        name, equals, value = argument.partition("=")
        known = _own_name(name, takes_value)
        if known is not None:
            own.append(known + equals + value)
            if takes_value[known] and not equals and rest:
                own.append(rest.pop(0))
        elif argument.startswith("-") or foreign:
            foreign.append(argument)
        elif any(option.partition("=")[0] == "--model" for option in own):
            raise InvalidValueError(f"{argument!r}: belongs to no option; options begin with --")
        else:
            own += ["--model", argument]
    return [*own, *(["--", *foreign] if foreign else [])]


def _own_name(name: str, own: Collection[str]) -> str | None:
    """kt-runtime's option for `name`, or None. Underscores count as dashes, since KTransformers uses them."""
    if not name.startswith("-"):
        return None
    dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    dashed = ALIASES.get(dashed, dashed)
    return dashed if dashed in own else None


def nearest_options(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of `names` with the spelling closest to `name`, nearest first."""
    return difflib.get_close_matches(name, sorted(set(names)), n=count, cutoff=0.65)
