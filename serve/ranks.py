"""`kt-runtime serve --tp-size N`: what several ranks can serve, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import FAMILIES, family_for, gguf
from kt_runtime.gguf_file import BLOCKS
from kt_runtime.serve.memory.machine import has_gpu
from kt_runtime.serve.options.named import ServeOptions

LEAST_COLUMNS, BLOCK_ROWS = 32, 16
"""Columns of a packed matrix are a multiple of the first, its rows are in blocks of the second (csrc/kernels/layout.h:
kColumnUnit, kBlockRows)."""


def check_ranks(options: ServeOptions, config: Mapping[str, Any]) -> None:
    """Raises InvalidValueError for an option, machine or model with which several ranks can't be.

    `config`: the model's config.json.
    """
    from kt_runtime.ranks.share import check_divides  # imports torch

    ranks = options.tp_size
    if ranks == 1:
        return
    if has_gpu():
        raise _refused(ranks, "ranks are processes on CPUs so far: start the server with --device cpu")
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
    if options.registry is not None:
        _check_rows(ranks, config)


def _check_blocks(ranks: int, config: Mapping[str, Any]) -> None:
    """Checks the inputs of a GGUF model's quantized matrices. Training gives each rank some inputs of a matrix that it
    splits, in whole blocks of weights. Raises InvalidValueError."""
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


def _check_rows(ranks: int, config: Mapping[str, Any]) -> None:
    """Checks the rows of the same matrices. Servers of a registry compare a hash of the packed bytes, which equals that
    of one process only if each rank's rows are whole blocks. Raises InvalidValueError."""
    kinds, family = gguf.packed_tensors(config), family_for(config)
    modules = {f"{module.name}.weight": module for module in family.lora_modules(config)}
    for name in sorted(kinds.keys() & modules.keys()):
        module = modules[name]
        for rows in () if module.is_whole else module.pieces or (module.out_features,):
            if rows % (ranks * BLOCK_ROWS):
                raise _refused(
                    ranks,
                    f"--registry: {name} has {rows} rows in blocks of {BLOCK_ROWS}, which can't be split evenly over "
                    f"{ranks} ranks, so its hash would be another one than with one rank; allowed: a multiple of "
                    f"{ranks * BLOCK_ROWS}",
                )


def _refused(num_ranks: int, why: str) -> InvalidValueError:
    return InvalidValueError(f"--tp-size {num_ranks}: {why}")
