"""Hostile GGUF models: keys, tensors and parts of a split file that contradict each other are refused with the file's
name, and an accepted model is exactly the one that was written."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import EACH_RUN_ALIKE, choose, examples
from reference.checkpoints.gguf_models import requantize

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.errors import CheckpointError, KtError, NotFoundError
from kt_runtime.gguf_file import read_gguf, read_gguf_model
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.report import resolve_model

PRESETS = ("tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-mixtral", "tiny-glm4-moe")
NUMBERS = [0, 1, 2, 3, 5, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
REALS = [0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan")]
FLAGS = [0, 1, 2, 255]
WIDTHS = {"UINT32": "<I", "INT32": "<i", "FLOAT32": "<f", "BOOL": "<B"}


@pytest.fixture(scope="module", params=choose(few=PRESETS[:2], usual=PRESETS, every=PRESETS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("hostile")
    model = make_model(request.param, place / "model", seed=3)
    write_gguf_model(model, place / "bf16.gguf")
    requantize(place / "bf16.gguf", place / "m.gguf", {"_exps": "Q8_0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        yield place / "m.gguf"


@cache
def places_of_values(path: Path) -> dict[str, tuple[int, str]]:
    """Of each key with one number: its byte in the file, and how it is packed. Every example asks."""
    found = {}
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF.") and (letter := WIDTHS.get(field.types[-1].name)) and len(field.types) == 1:
            before = sum(part.nbytes for part in field.parts[:-1])
            found[name] = field.offset + before, letter
    return found


def other_value(data: Any, letter: str) -> bytes:
    if letter == "<f":
        return struct.pack(letter, data.draw(st.sampled_from(REALS)))
    if letter == "<B":
        return bytes([data.draw(st.sampled_from(FLAGS))])
    number = data.draw(st.sampled_from(NUMBERS))
    return struct.pack("<I", number)


@settings(max_examples=examples(24), deadline=None, derandomize=EACH_RUN_ALIKE)
@given(data=st.data())
def test_fuzz_keys_that_contradict_the_tensors_are_refused(written: Path, data: Any) -> None:
    """Sizes up to 2^32, no number, and flags that are none: refused at once, or of no consequence for the tensors."""
    content, places = bytearray(written.read_bytes()), places_of_values(written)
    for name in data.draw(st.lists(st.sampled_from(sorted(places)), min_size=1, max_size=2, unique=True)):
        at, letter = places[name]
        made = other_value(data, letter)
        content[at : at + len(made)] = made
    path = written.with_name("changed.gguf")
    path.write_bytes(content)
    check_refused_or_whole(path)


def check_refused_or_whole(path: Path) -> None:
    try:
        found = resolve_model(str(path))
    except KtError as error:
        assert len(str(error)) < 1000
        assert "config.json" in str(error) or path.stem.rstrip("0123456789-of") in str(error), str(error)
        return
    family, config = found.family, found.config
    tensors = {name: entry for file in read_gguf_model(path) for name, entry in file.tensors.items()}
    experts, hidden, intermediate = family.expert_shape(config)
    for layer in family.moe_layers(config):
        assert tensors[f"blk.{layer}.ffn_down_exps.weight"].shape == (experts, hidden, intermediate)


@settings(max_examples=examples(24), deadline=None, derandomize=EACH_RUN_ALIKE)
@given(seed=st.integers(0, 1 << 30))
def test_fuzz_parts_of_a_split_model_are_read_as_one_or_refused(written: Path, seed: int) -> None:
    """A part is cut, taken from another model, copied over another one, or missing."""
    random_one = random.Random(seed)
    place = written.with_name("split")
    if not place.is_dir():
        place.mkdir()
        requantize(written, place / "m.gguf", {}, split=13)
        requantize(written, place / "other.gguf", {"_exps": "Q4_0"}, split=17)
    attacked = written.with_name("attacked")
    shutil.rmtree(attacked, ignore_errors=True)
    attacked.mkdir()
    parts, others = sorted(place.glob("m-*.gguf")), sorted(place.glob("other-*.gguf"))
    for part in parts:
        shutil.copy(part, attacked / part.name)
    victim = attacked / random_one.choice(parts).name
    fault = random_one.choice(["cut", "foreign", "copied", "missing", "flipped"])
    if fault == "cut":
        content = victim.read_bytes()
        victim.write_bytes(content[: random_one.randrange(len(content))])
    elif fault == "foreign":
        shutil.copy(random_one.choice(others), victim)
    elif fault == "copied":
        shutil.copy(random_one.choice([part for part in parts if part.name != victim.name]), victim)
    elif fault == "missing":
        victim.unlink()
    else:
        flip_a_byte(victim, random_one)
    given_part = attacked / random_one.choice(parts).name
    if fault in ("cut", "copied", "missing"):
        with pytest.raises((CheckpointError, NotFoundError)):
            resolve_model(str(given_part) if given_part.is_file() else str(attacked / parts[0].name))
    elif given_part.is_file():
        check_refused_or_whole(given_part)


def flip_a_byte(path: Path, random_one: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[random_one.randrange(min(entry.start for entry in read_gguf(path).tensors.values()))] ^= 1 << (
        random_one.randrange(8)
    )
    path.write_bytes(content)
