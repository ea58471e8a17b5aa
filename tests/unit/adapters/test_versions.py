from __future__ import annotations

import hashlib
import math
import threading
from typing import Any

import pytest
import torch

from kt_runtime.adapters import AdapterTensors, AdapterVersion, LoraPair, VersionTable, content_hash
from kt_runtime.adapters.tensors import contents_of, measured
from kt_runtime.adapters.versions import _first_content_hash
from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError

FIRST_HASH = "c7b6bd486cda389e0428c86649e6e2a17bce5a3a6a8a44d5c2827b0699db2c8e"  # computed when it was the only form


def version(letter: str) -> AdapterVersion:
    return AdapterVersion(hash=letter * 64, created=0.0, rank=4, alpha=8.0, lora_id=f"id-{letter}")


def table_of(letters: str, kept: int = 8) -> VersionTable:
    table = VersionTable(kept)
    for letter in letters:
        table.publish("x", version(letter))
    return table


def known(table: VersionTable) -> str:
    return "".join(item.hash[0] for item in table.history("x"))


def served(table: VersionTable) -> str:
    return "".join(item[0] for item in table.served("x"))


def test_the_hash_is_of_the_content_alone(qwen: Any) -> None:
    adapter = qwen.adapter("o_proj", "experts", seed=0)
    backwards = AdapterTensors.from_modules(4, 8, dict(reversed(adapter.modules.items())), ("a note",))
    strided = {name: LoraPair(a.mT.contiguous().mT, b) for name, (a, b) in adapter.modules.items()}
    assert content_hash(adapter) == content_hash(backwards)
    assert content_hash(adapter) == content_hash(AdapterTensors.from_modules(4, 8.0, strided))
    assert content_hash(adapter) == content_hash(qwen.adapter("o_proj", "experts", seed=0))


def test_any_change_changes_the_hash(qwen: Any) -> None:
    adapter = qwen.adapter("o_proj")
    name, (a, b) = next(iter(adapter.modules.items()))
    flipped = a.clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    variants = [
        adapter,
        AdapterTensors.from_modules(4, 16.0, adapter.modules),
        AdapterTensors.from_modules(5, 8.0, adapter.modules),
        AdapterTensors.from_modules(4, 8.0, {**adapter.modules, name: (flipped, b)}),
        AdapterTensors.from_modules(4, 8.0, {**adapter.modules, name: (a.bfloat16(), b)}),
        AdapterTensors.from_modules(4, 8.0, {name: (a, b)}),
    ]
    assert len({content_hash(variant) for variant in variants}) == len(variants)


def test_the_first_form_of_the_hash_is_what_it_was() -> None:
    """Directories on users' disks are named after it."""
    pairs = {
        "model.layers.0.self_attn.o_proj": LoraPair(torch.arange(6.0).reshape(2, 3), torch.ones(4, 2)),
        "model.layers.0.mlp.experts.up_proj": LoraPair(torch.arange(12.0).reshape(2, 2, 3), torch.ones(2, 4, 2)),
    }
    adapter = AdapterTensors.from_modules(2, 4.0, pairs)
    assert _first_content_hash(adapter) == FIRST_HASH


def test_contents_that_are_known_are_not_measured_again(qwen: Any) -> None:
    adapter = qwen.adapter("o_proj", "experts", seed=0)
    contents = contents_of(adapter)
    for name, pair in adapter.modules.items():
        for letter, tensor in zip("AB", pair, strict=True):
            digest = hashlib.sha256(tensor.numpy().tobytes()).digest()
            assert contents[f"{name}.lora_{letter}"] == (digest, float(tensor.abs().max()))
    before = content_hash(adapter)
    for pair in adapter.modules.values():
        pair.a.zero_()
    assert content_hash(adapter, contents) == before != content_hash(adapter)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_single_element_that_is_not_finite_is_found(value: float) -> None:
    tensor = torch.randn(3, 50, 70)
    tensor[2, 49, 69] = value
    assert not math.isfinite(measured(tensor).largest)


def test_publishing_moves_the_name_and_returns_what_it_meant() -> None:
    table = VersionTable()
    assert table.publish("x", version("a")) is None
    before = table.publish("x", version("b"))
    assert before is not None
    assert before.hash == "a" * 64
    assert table.current("x") == version("b")
    assert table.current_versions() == {"x": version("b")}


def test_rolling_back_twice_goes_back_twice_and_publishing_goes_on_from_there() -> None:
    table = table_of("abc")
    assert table.rollback("x", lora_id="new").hash[0] == "b"
    assert table.current("x").lora_id == "new"
    assert table.rollback("x").hash[0] == "a"
    table.publish("x", version("d"))
    assert served(table) == "ad"
    assert table.rollback("x").hash[0] == "a"
    with pytest.raises(ConflictError, match="no version is known from before aaaaaaaaaaaaaaaa"):
        table.rollback("x")


def test_a_version_that_was_cut_off_can_be_returned_to_by_hash() -> None:
    table = table_of("abc")
    table.rollback("x", "aaaa")
    assert served(table) == "a"
    assert table.rollback_target("x", "cccccc").hash[0] == "c"
    assert table.rollback("x", "cccccc").hash[0] == "c"
    assert served(table) == "ac"


def test_unknown_short_and_current_hashes_are_refused() -> None:
    table = table_of("ab")
    table.publish("x", AdapterVersion("a" * 60 + "0000", 0.0, 4, 8.0))
    with pytest.raises(UnknownNameError, match="adapter 'x': unknown version 'ffff'"):
        table.rollback("x", "ffff")
    for short in ("bb", "2"):
        with pytest.raises(
            InvalidValueError, match=f"version '{short}': versions have no numbers; give the first 4 or"
        ):
            table.rollback("x", short)
    with pytest.raises(InvalidValueError, match=r"oldest first: a{16}, b{16}, a{16}; a{16} is served now"):
        table.rollback("x", "2")
    with pytest.raises(ConflictError, match="beginning of 2 versions"):
        table.rollback("x", "aaaa")
    with pytest.raises(ConflictError, match="is the current version already"):
        table.rollback("x", "a" * 60 + "0000")


def test_history_is_bounded_and_the_current_version_is_never_forgotten() -> None:
    table = table_of("abcdef", kept=3)
    assert known(table) == served(table) == "def"
    table.rollback("x")
    table.rollback("x")
    assert served(table) == "d"
    table.publish("x", version("g"))
    assert (known(table), served(table)) == ("efg", "g")


def test_publishing_the_same_content_again_keeps_one_version() -> None:
    table = table_of("aba")
    assert (known(table), served(table)) == ("ba", "ba")


def test_unload_forgets_the_name() -> None:
    table = table_of("ab")
    assert table.unload("x") == version("b")
    for call in (table.current, table.unload, table.history, table.served, table.rollback):
        with pytest.raises(UnknownNameError, match="unknown adapter 'x'"):
            call("x")


def test_bad_names_and_bounds_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="adapter name 'a:b'"):
        VersionTable().publish("a:b", version("a"))
    with pytest.raises(InvalidValueError, match="kept versions: 0"):
        VersionTable(0)


def test_what_was_saved_is_restored() -> None:
    table = table_of("abc")
    table.rollback("x")
    again = VersionTable()
    again.restore("x", table.history("x"), table.served("x"))
    again.loaded("x", "id")
    assert again.current("x").lora_id == "id"
    assert (known(again), served(again)) == (known(table), served(table))
    with pytest.raises(UnknownNameError, match="version"):
        again.restore("y", [], ["f" * 64])


def test_threads_that_publish_at_once_lose_nothing() -> None:
    table = VersionTable(kept=1000)

    def publish(thread: int) -> None:
        for count in range(50):
            table.publish("x", AdapterVersion(f"{thread:032x}{count:032x}", 0.0, 4, 8.0))
            table.current_versions()

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(table.history("x")) == len(table.served("x")) == 400
