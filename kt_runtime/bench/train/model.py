"""The checkpoint that both sides train: made from a preset, or an existing one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kt_runtime.bench.train.plan import Plan
from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.families import family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import is_preset, load_preset

OF_EACH_LAYER = ("layer_types", "no_rope_layers")
"""Keys of config.json with a list of as many values as the model has layers."""


def checkpoint(plan: Plan, directory: Path) -> Path:
    """The checkpoint's directory; a preset's checkpoint is written below `directory`.

    Raises NotFoundError for a model that is neither preset nor directory, and InvalidValueError for `layers` with a
    directory, for more layers than a preset has, and for so few that its family has not all kinds of them.
    """
    if not is_preset(plan.model):
        if not (Path(plan.model) / "config.json").is_file():
            raise NotFoundError(f"--model {plan.model!r}: neither a preset nor a checkpoint's directory")
        if plan.layers is not None:
            raise InvalidValueError("--layers is for presets; a checkpoint has the layers that it has")
        return Path(plan.model).resolve()
    preset = load_preset(plan.model)
    if plan.layers is not None:
        most = int(preset.config["num_hidden_layers"])
        if plan.layers > most:
            raise InvalidValueError(f"--layers is {plan.layers}; {preset.name} has {most}")
        of_layers = {key: preset.config[key][: plan.layers] for key in OF_EACH_LAYER if preset.config.get(key)}
        config = {**preset.config, **of_layers, "num_hidden_layers": plan.layers}
        family_for(config).check(config)
        preset = msgspec.structs.replace(preset, config=config)
    return make_model(preset, directory / preset.name)


def vocabulary(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


def faster_dtype() -> str:
    """bfloat16 if PyTorch multiplies bfloat16 by hardware instructions of this machine, else float32."""
    import torch

    from kt_runtime import device

    if device.accelerator() is not None or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16"
    return "float32"
