"""Reads KTransformers' placement rules (`kt_optimize_rule` files) and reports what kt-runtime does not support.

A file is a list of `{match: {name: regex, class: dotted}, replace: {class: dotted, kwargs: {...}}, recursive: bool}`;
the first rule that matches a module applies. kt-runtime uses only the routed experts' format and the number of devices.
A setting without an equivalent gives one note, a setting for unsupported hardware is an error, and all others are
details of the old engine and ignored.

One item of the list may be kt-runtime's own, `{gpu_experts: {LAYER: [EXPERT, ...]}}`: experts that `--gpu-experts`
keeps on the device for good.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kt_runtime.documents import Entry, Values, all_problems, read_file, shown, shown_key
from kt_runtime.errors import InvalidValueError, suggestion
from kt_runtime.families.registry import family_for
from kt_runtime.serve.memory import placement_names as known
from kt_runtime.serve.memory.expert_pins import read_pins
from kt_runtime.serve.models.checkpoint import dense_tensors
from kt_runtime.serve.options.named import Pins

NVIDIA = "cuda"  # as rule files name devices
_DEVICE = re.compile(rf"({NVIDIA}|xpu|npu)(:[0-9]{{1,2}})?|cpu")
_DEVICES = ("cpu", *(NVIDIA, *(f"{NVIDIA}:{index}" for index in range(8))), "xpu", "npu")
_DEVICE_KEYS = ("generate_device", "prefill_device", "out_device", "device")
_OP_KEYS = ("generate_op", "prefill_op")
_IGNORED_KEYS = ("per_layer_prefill_intput_threshold", "absorb_for_prefill", "dump_enable", "dump_dir")
_KWARGS = (*_DEVICE_KEYS, *_OP_KEYS, "backend", "transfer_map", *_IGNORED_KEYS)
_PLATFORMS = {known.NPU: "Ascend NPUs", known.XPU: "Intel XPUs"}
_LONGEST_REGEX = 500
_EXPERTS_MODULE = re.compile(r"\.experts$")


@dataclass(frozen=True)
class Placement:
    """`expert_format`: int8 or bf16, None: the checkpoint's. `expert_isa`: "amx" when the rules ask for AMX.

    `num_devices`: GPUs that the rules spread the model over. `notes`: one line for each setting without an equivalent.
    `pinned_experts`: layer -> experts that stay on the device.
    """

    expert_format: str | None
    num_devices: int
    notes: tuple[str, ...]
    expert_isa: str | None = None
    pinned_experts: Pins = field(default_factory=dict)


@dataclass
class _Rule:
    """`name`: None when the rule matches by class alone. `devices`: indices of GPUs."""

    where: str
    name: re.Pattern[str] | None = None
    matched_class: str | None = None
    replacement: str = "default"
    kwargs: dict[str, Any] = field(default_factory=dict)
    devices: set[int] = field(default_factory=set)


def read_placement(path: Path, module_names: Sequence[str] | None, num_gpus: int | None = None) -> Placement:
    """The placement that a rule file asks for. `module_names`: the model's modules; None: rules are not matched.

    `num_gpus`: a device with a higher index is a problem; None: devices are not compared with the machine's.

    Raises NotFoundError for a missing file, and InvalidValueError that lists every problem with its line. A regex that
    matches none of the modules is a problem.
    """
    node = read_file(path, "placement file")
    if not isinstance(node, yaml.SequenceNode):
        raise InvalidValueError(f"{path}:{node.start_mark.line + 1}: a placement file is a list of rules")
    problems: list[str] = []
    reader = _Reader(Values(str(path), problems), problems, num_gpus)
    pins, items = read_pins(node.value, reader.values, problems, module_names)
    rules = [reader.rule(item) for item in items]
    if module_names is not None:
        for rule in rules:
            if rule.name is not None and not any(map(rule.name.search, module_names)):
                problems.append(
                    f"{rule.where}: match.name: {shown('', rule.name.pattern)}: matches no module of the model"
                )
    if problems:
        raise all_problems(path, problems)
    placement = _placement(str(path), rules, reader.notes, module_names)
    return replace(placement, pinned_experts=pins)


def module_names(config: Mapping[str, Any]) -> list[str]:
    """The module names that rules may match, as in transformers 4, where every expert is a module."""
    family = family_for(config)
    names: dict[str, None] = {"model": None, "lm_head": None}
    for tensor in dense_tensors(config):
        parts = tensor.name.split(".")[:-1]
        names.update({".".join(parts[:end]): None for end in range(1, len(parts) + 1)})
    num_experts = family.num_experts(config)
    for layer in family.moe_layers(config):
        experts = family.expert_prefix(layer)
        names[experts] = None
        for expert in range(num_experts):
            prefix = f"{experts}.{expert}"
            names.update(dict.fromkeys([prefix, *(f"{prefix}.{part}_proj" for part in ("gate", "up", "down"))]))
    attentions = [name for name in names if name.endswith(".self_attn")]
    names.update(dict.fromkeys(["model.rotary_emb", *(f"{name}.rotary_emb" for name in attentions)]))
    return list(names)


def _placement(
    path: str, rules: list[_Rule], notes: dict[str, tuple[str, int]], modules: Sequence[str] | None
) -> Placement:
    experts = list(_expert_rules(rules, modules))
    formats = dict.fromkeys(known.BACKENDS[rule.kwargs.get("backend") or "llamafile"] for rule in experts)
    lines = [f"{where}: {text}{f' ({count} rules)' * (count > 1)}" for text, (where, count) in notes.items()]
    if not experts:
        lines.append(f"{path}: no rule places the routed experts: they are on the CPU, as the checkpoint has them")
    if len(formats) > 1:
        listed = ", ".join(str(name or "the checkpoint's") for name in formats)
        lines.append(f"{path}: layers ask for several expert formats ({listed}): the first holds for all")
    num_devices = len(set().union(*(rule.devices for rule in rules)))
    if num_devices > 1:
        lines.append(f"{path}: spreads layers over {num_devices} GPUs: kt-runtime serves on one device")
    wants_amx = any(str(rule.kwargs.get("backend", "")).startswith("AMX") for rule in experts)
    return Placement(next(iter(formats), None), num_devices, tuple(lines), "amx" if wants_amx else None)


def _expert_rules(rules: list[_Rule], modules: Sequence[str] | None) -> Iterator[_Rule]:
    """The rules for routed experts: the first match of each module; `modules` None: all rules that place experts.
    Rules that match by class never apply to experts, which are a plain list of modules."""
    if modules is None:
        yield from (rule for rule in rules if known.REPLACEMENTS.get(rule.replacement) == known.EXPERTS)
        return
    seen: set[int] = set()
    for module in filter(_EXPERTS_MODULE.search, modules):
        for rule in rules:
            if rule.name is not None and rule.matched_class is None and rule.name.search(module):
                if known.REPLACEMENTS[rule.replacement] == known.EXPERTS and id(rule) not in seen:
                    seen.add(id(rule))
                    yield rule
                break


class _Reader:
    """Reads rules one by one; collects problems, and notes: text -> (first place, number of occurrences)."""

    def __init__(self, values: Values, problems: list[str], num_gpus: int | None) -> None:
        self.values, self._problems, self._num_gpus = values, problems, num_gpus
        self.notes: dict[str, tuple[str, int]] = {}

    def rule(self, node: yaml.Node) -> _Rule:
        rule = _Rule(self.values.where(node))
        try:
            value = self.values.value(node)
        except ValueError as error:
            self._problems.append(f"{rule.where}: {error}")
            return rule
        if not isinstance(value, tuple):
            self._problems.append(f"{rule.where}: a rule is a mapping with match and replace")
            return rule
        parts = self._parts(rule.where, value, ("match", "replace", "recursive"))
        for key in ("match", "replace"):
            if not isinstance(parts[key].value if key in parts else None, tuple):
                self._problem(parts.get(key), rule.where, f"{key}: must be a mapping")
        if "recursive" in parts and not isinstance(parts["recursive"].value, bool):
            self._problem(parts["recursive"], rule.where, "must be true or false")
        if "match" in parts and isinstance(parts["match"].value, tuple):
            self._match(rule, parts["match"])
        if "replace" in parts and isinstance(parts["replace"].value, tuple):
            self._replace(rule, parts["replace"])
        return rule

    def _match(self, rule: _Rule, entry: Entry) -> None:
        parts = self._parts(entry.where, entry.value, ("name", "class"))
        if not parts:
            self._problem(entry, entry.where, "needs a name, a class or both")
        if "name" in parts:
            rule.name, rule.where = self._regex(parts["name"]), parts["name"].where
        if "class" in parts:
            rule.matched_class = self._name(parts["class"], "class", known.MATCHED)

    def _replace(self, rule: _Rule, entry: Entry) -> None:
        parts = self._parts(entry.where, entry.value, ("class", "kwargs"))
        if "class" not in parts:
            self._problem(None, entry.where, "replace: class is missing")
        elif self._name(parts["class"], "class", known.REPLACEMENTS):
            rule.replacement = parts["class"].value
            self._platform(parts["class"], known.REPLACEMENTS[rule.replacement])
        kwargs = parts["kwargs"].value if "kwargs" in parts else ()
        if kwargs is not None and not isinstance(kwargs, tuple):
            self._problem(parts["kwargs"], entry.where, "must be a mapping")
            return
        for part in self._parts(entry.where, kwargs or (), _KWARGS).values():
            self._kwarg(rule, part)

    def _kwarg(self, rule: _Rule, part: Entry) -> None:
        rule.kwargs[part.key] = part.value
        if part.key in _DEVICE_KEYS:
            self._device(rule, part, part.value)
        elif part.key in _OP_KEYS and part.value not in (
            None,
            "None",
        ):  # shipped files say None, which YAML has as text
            if self._name(part, "operator", known.OPS):
                meaning = known.OPS[part.value]
                if meaning in _PLATFORMS:
                    self._platform(part, meaning)
                elif meaning != known.DETAIL:
                    self._note(part, f"{part.value}: {meaning}")
        elif part.key == "backend":
            self._name(part, "backend", known.BACKENDS)
        elif part.key == "transfer_map":
            self._transfer_map(rule, part)
        elif part.key == "absorb_for_prefill" and not isinstance(part.value, bool):
            self._problem(part, part.where, "must be true or false")

    def _device(self, rule: _Rule, part: Entry, device: Any) -> None:
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            self._problem(part, part.where, f"unknown device{suggestion(str(device)[:80], _DEVICES)}")
            return
        kind, _, index = device.partition(":")
        self._platform(part, kind)
        if kind == NVIDIA:
            rule.devices.add(int(index or 0))
            if self._num_gpus is not None and int(index or 0) >= self._num_gpus:
                there = ", ".join(f"{NVIDIA}:{one}" for one in range(self._num_gpus))
                self._problem(part, part.where, f"{device} is not there: this machine has {there}")
        on_cpu = device == "cpu" and part.key == "generate_device"
        if on_cpu and rule.name is not None and rule.name.search("model.embed_tokens"):
            self._note(part, "embeddings on the CPU have no equivalent: they are on the server's device")

    def _transfer_map(self, rule: _Rule, part: Entry) -> None:
        if not isinstance(part.value, tuple) or not all(item.key.isdecimal() for item in part.value):
            self._problem(part, part.where, "must be a mapping of layers to devices")
            return
        for item in part.value:
            self._device(rule, item, item.value)

    def _platform(self, part: Entry, kind: str) -> None:
        if kind in _PLATFORMS:
            self._problem(part, part.where, f"{_PLATFORMS[kind]} are not supported; use the rules for CPU and CUDA")

    def _regex(self, part: Entry) -> re.Pattern[str] | None:
        if not isinstance(part.value, str) or not 0 < len(part.value) <= _LONGEST_REGEX:
            self._problem(part, part.where, f"must be a regular expression of at most {_LONGEST_REGEX} characters")
            return None
        try:
            return re.compile(part.value)
        except (re.error, RecursionError, OverflowError) as error:
            self._problem(part, part.where, f"is not a regular expression: {error}")
            return None

    def _name(self, part: Entry, kind: str, names: Any) -> str | None:
        if isinstance(part.value, str) and part.value in names:
            return part.value
        self._problem(part, part.where, f"unknown {kind}{suggestion(str(part.value)[:120], names)}")
        return None

    def _parts(self, where: str, entries: tuple[Entry, ...], allowed: tuple[str, ...]) -> dict[str, Entry]:
        for entry in entries:
            if entry.key not in allowed:
                self._problems.append(
                    f"{entry.where}: unknown key {shown_key(entry.key)}{suggestion(entry.key, allowed)}"
                )
        return {entry.key: entry for entry in entries if entry.key in allowed}

    def _problem(self, part: Entry | None, where: str, what: str) -> None:
        at = f"{part.where}: {part.key}: {shown(part.key, part.value)}" if part else where
        self._problems.append(f"{at}: {what}")

    def _note(self, part: Entry, text: str) -> None:
        where, count = self.notes.get(text, (part.where, 0))
        self.notes[text] = where, count + 1
