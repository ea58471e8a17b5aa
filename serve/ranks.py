"""`kt-runtime serve --tp-size N`: what several ranks can serve, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import FAMILIES, family_for, gguf
from kt_runtime.gguf_file import BLOCKS
from kt_runtime.serve.memory.machine import has_gpu
from kt_runtime.serve.options.named import ServeOptions

LEAST_COLUMNS = 32
"""Columns of a packed matrix are a multiple of it (csrc/kernels/layout.h: kColumnUnit)."""


def with_ranks(options: ServeOptions, config: Mapping[str, Any]) -> ServeOptions:
    """The options without the parts that several ranks have not; unchanged with one.

    `config`: the model's config.json. Raises InvalidValueError for an option, machine or model with which several ranks
    can't be.
    """
    if options.tp_size == 1:
        return options
    _check(options.tp_size, options, config)
    return replace(options, finetuning_dir="off")


def _check(ranks: int, options: ServeOptions, config: Mapping[str, Any]) -> None:
    from kt_runtime.ranks.share import check_divides  # imports torch

    if has_gpu():
        raise _refused(ranks, "ranks are processes on CPUs so far: start the server with --device cpu")
    for option, why in _excluded(options):
        raise _refused(ranks, f"{option} is for one rank: {why}")
    family = family_for(config)
    if not family.splits_over_ranks:
        split = ", ".join(sorted(each.name for each in FAMILIES if each.splits_over_ranks))
        raise _refused(ranks, f"the family {family.name} is not split over ranks yet; these are: {split}")
    for what, number in family.numbers_to_split(config).items():
        try:
            check_divides(ranks, number, what)
        except InvalidValueError as error:
            raise _refused(ranks, str(error)) from None
    _check_blocks(ranks, config)


def _check_blocks(ranks: int, config: Mapping[str, Any]) -> None:
    """Of the matrices of a GGUF model that stay quantized: training gives each rank some inputs of those it splits, and
    a block of weights is not cut."""
    kinds, family = gguf.packed_tensors(config), family_for(config)
    whole = {f"{module.name}.weight" for module in family.lora_modules(config) if module.is_whole}
    for source in family.twin_sources(config) if kinds else ():
        if source.name in kinds and source.name not in whole:
            kind, inputs = kinds[source.name], source.shape[1]
            block = max(BLOCKS[kind][0], LEAST_COLUMNS)
            if inputs % (ranks * block):
                raise _refused(
                    ranks,
                    f"{source.name} has {inputs} inputs in blocks of {block} ({kind}), which can't be split evenly "
                    f"over {ranks} ranks; allowed: a multiple of {ranks * block}",
                )


def _excluded(options: ServeOptions) -> list[tuple[str, str]]:
    """(option, why) of those that were given and need one rank."""
    given = {
        ("--registry", "the fingerprint of the weights covers those of one process"): options.registry is not None,
        ("--max-adapter-disk", "each rank would measure at another time"): options.max_adapter_disk_bytes is not None,
        ("--routing-replay", "it was not tried on several"): bool(options.routing_replay_bytes),
        ("--finetuning-dir", "its jobs were not tried on several"): options.finetuning_dir not in (None, "off"),
        ("--lora-memory", "adapters would leave their slots at other times on each rank"): (
            options.lora_memory_bytes is not None
        ),
    }
    return [which for which, is_given in given.items() if is_given]


def _refused(num_ranks: int, why: str) -> InvalidValueError:
    return InvalidValueError(f"--tp-size {num_ranks}: {why}")
