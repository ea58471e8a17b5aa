"""What must be equal on all hosts, as text by name, and how hosts differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from kt_runtime import __version__
from kt_runtime.serve.hosts.checkpoint import sampled_fingerprint
from kt_runtime.serve.models.report import ResolvedModel
from kt_runtime.serve.options.named import NOT_OPTIONS, OPTION_NAMES, ServeOptions

PACKAGES = ("sglang", "torch", "transformers")
CLOCK_SECONDS = 5.0
"""Hosts' clocks may be so far apart: their logs must be readable side by side, files of one directory be in order."""

OF_ONE_HOST = {
    *("model", "host", "port", "api_key", "client_keys", "allow_no_key", "cors_origins", "max_body_bytes"),
    *("any_model_name", "adapter_dir", "registry", "expert_isa", "expert_threads", "node_rank", "dist_init_addr"),
    *("tool_call_parser", "reasoning_parser", "tinker_timeout_s", "finetuning_dir", "runtime_dir", "verbose"),
    *("session_memory_bytes", "placement", "cache_dir"),
}
"""Options in which hosts may differ: those of the HTTP server, which host 0 has, and of a machine. What a host makes of
`--model`, `--expert-isa` and `--placement` is compared instead."""


def facts_of(options: ServeOptions, model: ResolvedModel) -> dict[str, str]:
    """`options`: as this host's memory plan has completed them."""
    from kt_runtime.experts.native import resolve_isa  # imports torch

    found = {"kt-runtime": __version__, **{name: _version(name) for name in PACKAGES}}
    found["weights of the checkpoint"] = sampled_fingerprint(model.directory)
    found["name of the model"] = model.name
    found["instruction set (--expert-isa)"] = resolve_isa(options.expert_isa)
    for field in fields(options):
        if field.name not in {*OF_ONE_HOST, *NOT_OPTIONS}:
            name = OPTION_NAMES.get(field.name) or field.name.removesuffix("_bytes").replace("_", "-")
            found[f"--{name}"] = _text(getattr(options, field.name))
    found["options of SGLang's"] = " ".join(options.passed_on) or "none"
    found["pinned experts (--placement)"] = _text(dict(options.pinned_experts))
    return found


def differences(own: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each fact in which a host differs from host 0, with both values. `others`: facts by host's name."""
    lines = []
    for who, facts in others.items():
        for name in dict.fromkeys((*own, *facts)):
            here, there = own.get(name, "not stated"), facts.get(name, "not stated")
            if here != there:
                lines.append(f"{name}: host 0 has {here}, {who} has {there}")
    return lines


def clock_problem(who: str, here_s: float, there_s: float) -> str | None:
    """What is said of clocks that are too far apart: host 0's and the other's at one moment, in seconds since 1970."""
    if abs(there_s - here_s) <= CLOCK_SECONDS:
        return None
    return (
        f"clock: host 0 has {_utc(here_s)}, {who} has {_utc(there_s)}, {abs(there_s - here_s):.1f} s apart; "
        f"allowed are {CLOCK_SECONDS:g} s"
    )


def described(lines: Sequence[str]) -> str:
    return "the hosts differ, so nothing is loaded: " + "; ".join(lines)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _text(value: object) -> str:
    if value in (None, "", (), {}):
        return "none"
    return str(value)
