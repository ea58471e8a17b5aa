"""GGUF LoRA files: what the `gguf` package reads of ours, what we read of everybody's, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.adapters import (
    AdapterTensors,
    content_hash,
    not_applied,
    read_adapter,
    read_gguf_adapter,
    read_peft_directory,
    write_gguf_adapter,
    write_peft_directory,
)
from kt_runtime.adapters.gguf_lora import COMPARED, NOT_EXPRESSIBLE, places
from kt_runtime.errors import AdapterError, ConflictError, NotFoundError, UserError
from kt_runtime.experts.gguf import to_parts
from kt_runtime.families.gguf import ways_of_linear

EXPRESSIBLE = {
    "qwen3moe": ("all",),
    "deepseek2": ("q_a_proj", "q_b_proj", "o_proj", "mlp", "shared", "experts"),
}
BLOCK0 = "blk.0.attn_output.weight"
Edit = Callable[[dict[str, Any], dict[str, np.ndarray[Any, Any]]], None]


def write(model: Any, path: Path, adapter: AdapterTensors, **options: Any) -> Path:
    write_gguf_adapter(path, adapter, model.family, model.config, max_rank=8, **options)
    return path


def read(model: Any, path: Path) -> AdapterTensors:
    return read_gguf_adapter(path, model.family, model.config, max_rank=8)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file with the `gguf` package itself: `make(edit)` for Qwen's o_proj in both layers, rank 4."""

    def make_file(edit: Edit | None = None, name: str = "made.gguf") -> Path:
        keys: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        for layer in range(2):
            tensors[f"blk.{layer}.attn_output.weight.lora_a"] = np.full((4, 48), 0.5, np.float32)
            tensors[f"blk.{layer}.attn_output.weight.lora_b"] = np.full((32, 4), 0.25, np.float32)
        if edit is not None:
            edit(keys, tensors)
        writer = gguf.GGUFWriter(tmp_path / name, keys.pop("arch", "qwen3moe"))
        for key, value in keys.items():
            add: dict[type, Callable[[str, Any], None]] = {
                str: writer.add_string,
                float: writer.add_float32,
                int: writer.add_uint32,
                list: writer.add_array,
            }
            add[type(value)](key, value)
        for key, tensor in tensors.items():
            writer.add_tensor(key, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return make_file


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_peft_to_gguf_to_peft_is_exact(
    data: st.DataObject, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("round")
    choices = EXPRESSIBLE[model.family.gguf_architecture]
    targets = data.draw(st.lists(st.sampled_from(choices), min_size=1, unique=True))
    rank, alpha = data.draw(st.integers(1, 8)), data.draw(st.floats(0.125, 64, width=32))
    adapter = model.adapter(*targets, rank=rank, alpha=alpha, seed=data.draw(st.integers(0, 99)))
    write_peft_directory(place / "a", adapter, model.family, model.config, max_rank=8)
    first = read_peft_directory(place / "a", model.family, model.config, 8)
    second = read(model, write(model, place / "b.gguf", first))
    write_peft_directory(place / "c", second, model.family, model.config, max_rank=8)
    assert content_hash(second) == content_hash(first)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (place / "c" / name).read_bytes() == (place / "a" / name).read_bytes()


def test_the_gguf_package_finds_llama_cpps_names_keys_and_shapes(tmp_path: Path, model: Any) -> None:
    adapter = model.adapter(*EXPRESSIBLE[model.family.gguf_architecture], rank=4, alpha=6.0)
    reader = gguf.GGUFReader(write(model, tmp_path / "a.gguf", adapter, base_model="tiny"))
    values = {key: reader.fields[key].contents() for key in reader.fields}
    assert values["general.type"] == "adapter"
    assert values["general.architecture"] == model.family.gguf_architecture
    assert (values["adapter.type"], values["adapter.lora.alpha"]) == ("lora", 6.0)
    found = {tensor.name: tensor for tensor in reader.tensors}
    last, hidden = "blk.1.ffn_gate_exps.weight.lora", model.config["hidden_size"]
    assert found[f"{last}_a"].shape.tolist() == [hidden, 4, 4]  # the innermost first: in, rank, experts
    assert found[f"{last}_b"].shape.tolist() == [4, 16, 4]
    experts = adapter.modules["model.layers.1.mlp.experts.gate_proj"]
    assert np.array_equal(found[f"{last}_a"].data, experts.a.numpy())
    assert np.array_equal(found[f"{last}_b"].data, experts.b.numpy())
    output = adapter.modules["model.layers.0.self_attn.o_proj"]
    assert np.array_equal(found[f"{BLOCK0}.lora_b"].data, output.b.numpy())


def test_every_module_of_a_family_has_the_name_that_llama_cpp_gives_it(qwen: Any, deepseek: Any) -> None:
    found = places(deepseek.family, deepseek.config) | places(qwen.family, qwen.config)
    names = {place.module.name: matrix.removesuffix(".weight") for matrix, place in found.items()}
    block0 = {name.removeprefix("model.layers.0."): found for name, found in names.items() if ".0." in name}
    assert block0 == {
        "self_attn.q_proj": "blk.0.attn_q",
        "self_attn.k_proj": "blk.0.attn_k",
        "self_attn.v_proj": "blk.0.attn_v",
        "self_attn.o_proj": "blk.0.attn_output",
        "self_attn.q_a_proj": "blk.0.attn_q_a",
        "self_attn.kv_a_proj_with_mqa": "blk.0.attn_kv_a_mqa",
        "self_attn.q_b_proj": "blk.0.attn_q_b",
        "self_attn.kv_b_proj": "blk.0.attn_kv_b",
        "mlp.gate_proj": "blk.0.ffn_gate",
        "mlp.up_proj": "blk.0.ffn_up",
        "mlp.down_proj": "blk.0.ffn_down",
        "mlp.experts.gate_proj": "blk.0.ffn_gate_exps",
        "mlp.experts.up_proj": "blk.0.ffn_up_exps",
        "mlp.experts.down_proj": "blk.0.ffn_down_exps",
    }
    assert names["model.layers.1.mlp.shared_experts.down_proj"] == "blk.1.ffn_down_shexp"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_written_rounded_and_read_as_it_is(tmp_path: Path, qwen: Any, dtype: torch.dtype) -> None:
    adapter = qwen.adapter("o_proj", "experts")
    found = read(qwen, write(qwen, tmp_path / "a.gguf", adapter, dtype=dtype))
    assert {tensor.dtype for tensor in found.tensors.values()} == {dtype}
    assert all(torch.equal(found.tensors[name], tensor.to(dtype)) for name, tensor in adapter.tensors.items())


def test_kv_b_proj_is_refused_by_name_unless_it_changes_nothing(tmp_path: Path, deepseek: Any) -> None:
    adapter = deepseek.adapter("attention")
    with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.kv_b_proj' and 1 more: llama\.cpp.*merged"):
        write(deepseek, tmp_path / "a.gguf", adapter)
    assert list(tmp_path.iterdir()) == []
    for name, pair in adapter.modules.items():
        if name.endswith("kv_b_proj"):
            pair.b.zero_()
    found = read(deepseek, write(deepseek, tmp_path / "a.gguf", adapter))
    assert not any(name.endswith("kv_b_proj") for name in found.modules)
    assert not_applied(found, deepseek.family) == ["kv_a_proj_with_mqa", "q_a_proj", "q_b_proj"]


def test_an_old_files_kv_b_is_read_and_the_split_halves_are_refused(make: Any, deepseek: Any) -> None:
    def old(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors.clear()
        keys["arch"] = "deepseek2"
        tensors["blk.1.attn_kv_b.weight.lora_a"] = np.ones((2, 8), np.float32)
        tensors["blk.1.attn_kv_b.weight.lora_b"] = np.ones((56, 2), np.float32)

    assert list(read(deepseek, make(old)).modules) == ["model.layers.1.self_attn.kv_b_proj"]

    def split(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        old(keys, tensors)
        tensors["blk.1.attn_k_b.weight.lora_a"] = np.ones((4, 2, 6), np.float32)

    with pytest.raises(AdapterError, match=r"attn_k_b.weight.lora_a': a half of kv_b_proj"):
        read(deepseek, make(split))


def test_ranks_may_differ_and_alpha_may_be_missing(make: Any, qwen: Any) -> None:
    def edit(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_output.weight.lora_a"] = np.full((2, 48), 0.5, np.float32)
        tensors["blk.1.attn_output.weight.lora_b"] = np.full((32, 2), 0.25, np.float32)

    adapter = read(qwen, make(edit))
    deltas = [adapter.scaling * (pair.b @ pair.a)[0, 0].item() for pair in adapter.modules.values()]
    assert deltas == [8 / 4 * 4 * 0.125, 8 / 2 * 2 * 0.125]

    def without_alpha(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        del keys["adapter.lora.alpha"]

    assert read(qwen, make(without_alpha)).scaling == 1.0


def key(name: str, value: Any) -> Edit:
    return lambda keys, tensors: keys.update({name: value})


def tensor(name: str, value: np.ndarray[Any, Any] | None) -> Edit:
    def edit(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return edit


F32 = np.float32


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (key("general.type", "model"), "general.type is 'model'; expected 'adapter'"),
        (key("adapter.type", "dora"), "adapter.type is 'dora'; expected 'lora'"),
        (key("arch", "deepseek2"), "general.architecture is 'deepseek2'; expected 'qwen3moe'"),
        (key("adapter.lora.alpha", float("nan")), "adapter.lora.alpha is nan"),
        (key("adapter.lora.alpha", -1.0), "adapter.lora.alpha is -1"),
        (key("adapter.lora.alpha", [1.0, 2.0]), r"adapter.lora.alpha is \[1.0, 2.0\]"),
        (key("adapter.alora.invocation_tokens", [1, 2]), "activated LoRA"),
        (key("general.alignment", 48), "'general.alignment' is 48; expected a power of two from 8"),
        (tensor(f"{BLOCK0}.lora_b", None), "'blk.0.attn_output.weight.lora_b' is missing"),
        (tensor(f"{BLOCK0}.lora_a", np.zeros((4, 49), F32)), r"lora_a' has shape \[4, 49\]; expected \[4, 48\]"),
        (tensor(f"{BLOCK0}.lora_b", np.zeros((32, 5), F32)), r"lora_b' has shape \[32, 5\]; expected \[32, 4\]"),
        (tensor(f"{BLOCK0}.lora_a", np.zeros((4, 4, 48), F32)), r"lora_a' has shape \[4, 4, 48\]"),
        (tensor(f"{BLOCK0}.lora_a", np.zeros((9, 48), F32)), "its rank .* is 9, above"),
        (tensor(f"{BLOCK0}.lora_a", np.full((4, 48), np.nan, F32)), "o_proj.lora_A.weight' contains NaN"),
        (tensor(f"{BLOCK0}.lora_a", np.zeros((4, 48), np.float64)), "has type F64; expected F32, F16, BF16"),
        (tensor(f"{BLOCK0}.lora_a", np.zeros(48, F32)), "its rank.* is 0"),
        (tensor("blk.0.attn_norm.weight", np.zeros(32, F32)), "unknown tensor 'blk.0.attn_norm.weight'; expected NAME"),
        (tensor("blk.0.attn_outptu.weight.lora_a", np.zeros((4, 4), F32)), "did you mean 'blk.0.attn_output'"),
        (tensor("blk.7.attn_output.weight.lora_a", np.zeros((4, 4), F32)), "unknown tensor 'blk.7"),
        (tensor("token_embd.weight.lora_a", np.zeros((4, 4), F32)), "never adapted"),
        (tensor("blk.0.ffn_gate_inp.weight.lora_a", np.zeros((4, 4), F32)), "never adapted"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(make: Any, qwen: Any, edit: Edit, message: str) -> None:
    path = make(edit)
    with pytest.raises(AdapterError, match=message) as refused:
        read(qwen, path)
    assert str(refused.value).startswith(str(path))


def test_a_quantized_file_is_refused_by_its_type(tmp_path: Path, qwen: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen3moe")
    kind = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quants.quantize(np.ones((4, 64), np.float32), kind)
    writer.add_tensor(f"{BLOCK0}.lora_a", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(AdapterError, match=r"has type Q8_0; expected F32, F16, BF16.*--outtype f32"):
        read(qwen, tmp_path / "q.gguf")


def test_no_tensors_no_file_a_directory_and_a_link_are_refused(make: Any, tmp_path: Path, qwen: Any) -> None:
    with pytest.raises(AdapterError, match="has no LoRA tensors"):
        read(qwen, make(lambda keys, tensors: tensors.clear()))
    with pytest.raises(AdapterError, match=r"nothing\.gguf: can't be opened"):
        read(qwen, tmp_path / "nothing.gguf")
    with pytest.raises(NotFoundError):
        read(qwen, tmp_path / "nowhere" / "a.gguf")
    (tmp_path / "d.gguf").mkdir()
    with pytest.raises(AdapterError, match="is a directory"):
        read(qwen, tmp_path / "d.gguf")
    (tmp_path / "link.gguf").symlink_to(make())
    with pytest.raises(AdapterError, match="link"):
        read(qwen, tmp_path / "link.gguf")


def test_an_existing_file_is_not_replaced(tmp_path: Path, qwen: Any) -> None:
    path = write(qwen, tmp_path / "a.gguf", qwen.adapter("o_proj"))
    before = path.read_bytes()
    with pytest.raises(ConflictError, match="exists already"):
        write(qwen, path, qwen.adapter("o_proj", seed=1))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.gguf"]


def test_the_ending_of_the_name_decides_what_is_read(tmp_path: Path, qwen: Any) -> None:
    adapter = qwen.adapter("o_proj")
    write_peft_directory(tmp_path / "a", adapter, qwen.family, qwen.config, max_rank=8)
    for path in (tmp_path / "a", write(qwen, tmp_path / "A.GGUF", adapter)):
        assert content_hash(read_adapter(path, qwen.family, qwen.config, 8)) == content_hash(adapter)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_but_never_crashes(
    data: st.DataObject, make: Any, tmp_path: Path, qwen: Any
) -> None:
    if not (tmp_path / "good.gguf").exists():
        make(name="good.gguf")
    whole = bytearray((tmp_path / "good.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, 500))
        whole[position : position + 8] = data.draw(
            st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f\0\0\0\0"]) | st.binary(min_size=1, max_size=8)
        )
    cut = data.draw(st.sampled_from([len(whole), len(whole) // 2, 100, 24, 3, 0]))
    (tmp_path / "bad.gguf").write_bytes(whole[:cut])
    try:
        read(qwen, tmp_path / "bad.gguf")
    except UserError as error:
        assert "bad.gguf" in str(error)


OTHERS = (
    *("deepseek_v2", "deepseek_v2_lite", "mixtral", "olmoe", "glm4_moe", "glm4_moe_lite", "minimax_m2"),
    *("gpt_oss", "llama4", "qwen3_next", "qwen3_5_moe", "deepseek_v32", "glm_moe_dsa"),
)


@pytest.mark.parametrize("fixture", OTHERS)
def test_of_the_other_families_every_module_comes_back_as_it_was(
    tmp_path: Path, request: pytest.FixtureRequest, fixture: str
) -> None:
    """And PEFT's directory of what was read is that of what was written."""
    model: Any = request.getfixturevalue(fixture)
    projections = [name for name in model.family.projections(model.config) if name not in NOT_EXPRESSIBLE]
    adapter = model.adapter(*projections, rank=3, alpha=5.0)
    found = read(model, write(model, tmp_path / "a.gguf", adapter))
    assert content_hash(found) == content_hash(adapter)
    for name, value in (("a", adapter), ("b", found)):
        write_peft_directory(tmp_path / name, value, model.family, model.config, max_rank=8)
    stored = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "ab"]
    assert stored[0] == stored[1]


def stored_in(path: Path) -> dict[str, torch.Tensor]:
    return {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("fixture", OTHERS)
def test_products_in_the_file_are_changes_of_the_matrices_in_the_model_s_file(
    tmp_path: Path, request: pytest.FixtureRequest, fixture: str
) -> None:
    """B A of each pair is what the converter of llama.cpp would make of the module's B A, as of its weights."""
    model: Any = request.getfixturevalue(fixture)
    projections = [name for name in model.family.projections(model.config) if name not in NOT_EXPRESSIBLE]
    adapter = model.adapter(*projections, rank=3)
    stored = stored_in(write(model, tmp_path / "a.gguf", adapter))
    for module in model.family.lora_modules(model.config):
        if module.name not in adapter.modules:
            continue
        way, pair = ways_of_linear(model.config, module)[0], adapter.modules[module.name]
        for part, change in zip(way.parts, to_parts(way, pair.b @ pair.a), strict=True):
            a, b = (stored.pop(f"{part.name}.lora_{letter}") for letter in "ab")
            assert a.shape[-2] == b.shape[-1] == 3
            assert torch.equal(b @ a, change.reshape(part.shape))
    assert not stored


def test_rows_of_mixtrals_queries_and_keys_are_interleaved_as_its_matrices_are(tmp_path: Path, mixtral: Any) -> None:
    """A head's rows are 0, size / 2, 1, size / 2 + 1, ... Values and outputs keep theirs."""
    adapter = mixtral.adapter("attention", rank=2)
    path = write(mixtral, tmp_path / "a.gguf", adapter)
    stored = stored_in(path)
    for part, projection, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        b = adapter.modules[f"model.layers.1.self_attn.{projection}"].b
        size = len(b) // heads
        pairs = [
            (head * size + row, head * size + size // 2 + row) for head in range(heads) for row in range(size // 2)
        ]
        order = [row for pair in pairs for row in pair]
        assert torch.equal(stored[f"blk.1.{part}.weight.lora_b"], b[order]) and not torch.equal(b[order], b)
    assert torch.equal(stored["blk.1.attn_v.weight.lora_b"], adapter.modules["model.layers.1.self_attn.v_proj"].b)


def test_every_family_that_is_compared_is_tested_here() -> None:
    named = {"llama4": "llama4_text", "qwen3_5_moe": "qwen3_5_moe_text", "deepseek_v2_lite": "deepseek_v2"}
    assert set(COMPARED) == {"qwen3_moe", "deepseek_v3", *(named.get(name, name) for name in OTHERS)}


def test_a_family_that_was_not_compared_with_llama_cpp_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen: Any
) -> None:
    monkeypatch.setattr("kt_runtime.adapters.gguf_lora.COMPARED", ("mixtral",))
    path = tmp_path / "a.gguf"
    refused = rf"{path}: GGUF adapters of qwen3_moe are neither read nor written.*as those of mixtral were"
    with pytest.raises(AdapterError, match=refused):
        write(qwen, path, qwen.adapter("o_proj"))
    assert not path.exists()
    path.write_bytes(b"GGUF")
    with pytest.raises(AdapterError, match=refused):
        read(qwen, path)


QKV, GATE, OLDER = "blk.0.attn_qkv.weight", "blk.0.attn_gate.weight", "blk.0.ssm_in.weight"
ROWS = {QKV: 2 * 2 * 8 + 4 * 12, GATE: 4 * 12, OLDER: 2 * (2 * 8 + 4 * 12)}
IN_PROJ = "model.layers.0.linear_attn.in_proj_qkvz"


def next_file(**ranks: int) -> tuple[Edit, dict[str, torch.Tensor]]:
    """LoRA of the matrices qkv, gate or older, at these ranks; and of each B A."""
    chosen = {{"qkv": QKV, "gate": GATE, "older": OLDER}[name]: rank for name, rank in ranks.items()}
    generator = np.random.default_rng(3)
    pairs = {
        matrix: tuple(generator.standard_normal(shape, np.float32) for shape in ((rank, 32), (ROWS[matrix], rank)))
        for matrix, rank in chosen.items()
    }

    def edit(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["arch"] = "qwen3next"
        tensors.clear()
        for matrix, pair in pairs.items():
            tensors |= {f"{matrix}.lora_{letter}": tensor for letter, tensor in zip("ab", pair, strict=True)}

    changes = {matrix: torch.from_numpy(8 / chosen[matrix] * (b @ a)) for matrix, (a, b) in pairs.items()}
    return edit, changes


@pytest.mark.parametrize("ranks", [{"qkv": 3}, {"gate": 2}, {"qkv": 3, "gate": 3}, {"qkv": 3, "gate": 5}, {"older": 4}])
def test_of_a_module_in_two_matrices_each_may_have_its_own_pair(
    make: Any, qwen3_next: Any, ranks: dict[str, int]
) -> None:
    """Qwen3-Next's queries, keys and values are one matrix of the file, the gate another; in older files one."""
    edit, changes = next_file(**ranks)
    adapter = read(qwen3_next, make(edit))
    assert adapter.rank == sum(ranks.values())
    pair = adapter.modules[IN_PROJ]
    module = next(one for one in qwen3_next.family.lora_modules(qwen3_next.config) if one.name == IN_PROJ)
    way = ways_of_linear(qwen3_next.config, module)["older" in ranks]
    for part, found in zip(way.parts, to_parts(way, adapter.scaling * (pair.b @ pair.a)), strict=True):
        expected = changes.get(part.name, torch.zeros(part.shape))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)  # sums of products up to 30


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            {"qkv": 5, "gate": 4},
            rf"'{QKV}' and '{GATE}': their rank together \(the rank\) is 9, above",
        ),
        ({"qkv": 2, "older": 2}, rf"'{QKV}' and '{OLDER}' hold the same weights"),
    ],
)
def test_pairs_that_do_not_fit_together_are_refused(
    make: Any, qwen3_next: Any, ranks: dict[str, int], message: str
) -> None:
    path = make(next_file(**ranks)[0])
    with pytest.raises(AdapterError, match=message) as refused:
        read(qwen3_next, path)
    assert str(refused.value).startswith(str(path))
