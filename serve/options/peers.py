"""The command line of `serve` as users of SGLang, vLLM and KTransformers type it.

Options of SGLang may stand anywhere, with or without `--` before them; those that name one of kt-runtime's own options
by another name mean that option. What is left over is checked later against SGLang's parser (`sglang_options`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from kt_runtime.errors import InvalidValueError

# Names of SGLang, vLLM and KTransformers for options that kt-runtime has under another name.
ALIASES = {
    "--model-path": "--model",
    "--context-length": "--context-tokens",
    "--max-model-len": "--context-tokens",
    "--max-loras-per-batch": "--lora-slots",
    "--max-num-seqs": "--max-running-requests",
    "--kt-cpuinfer": "--expert-threads",
    "--cpu-infer": "--expert-threads",
    "--cache-lens": "--max-total-tokens",
    "--optimize-config-path": "--placement",
    "--optimize-rule-path": "--placement",
}


def sorted_arguments(arguments: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The same arguments with kt-runtime's own first, then `--`, then all others in their order.

    `takes_value`: kt-runtime's options, with their dashes. A word before the first foreign option is the model. Raises
    InvalidValueError for a word that belongs to nothing.
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
    """The option of kt-runtime's that `name` means. Underscores count as dashes, as KTransformers has them."""
    if not name.startswith("-"):
        return None
    dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    dashed = ALIASES.get(dashed, dashed)
    return dashed if dashed in own else None


def nearest_options(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The options among `names` that are spelt most like `name`, nearest first."""
    return difflib.get_close_matches(name, sorted(set(names)), n=count, cutoff=0.65)
