from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_runtime.bench.experts.gguf_blocks import to_blocks, write_tensors
from kt_runtime.errors import CheckpointError
from kt_runtime.experts.gguf import GgufTensors
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families.gguf import Held, Part
from kt_runtime.ops.rotary import Rotary
from kt_runtime.resident.twin import model as twin_model
from kt_runtime.resident.twin.model import Twin, bytes_not_shared


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def logits(twin: Twin, tokens: torch.Tensor) -> torch.Tensor:
    hidden = twin.embed(tokens)
    positions = twin.positions(hidden)
    for layer in range(twin.num_layers):
        hidden = twin.run_layer(layer, hidden, positions)
    assert isinstance(twin.head, torch.Tensor)
    return torch.nn.functional.linear(twin.final_norm(hidden), twin.head)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_equal_those_of_a_separate_hugging_face_load(lab: Any, tokens: torch.Tensor) -> None:
    expected = lab.host.hf(tokens).logits
    assert (logits(lab.twin, tokens) - expected).abs().max() <= 1e-5  # 3.1e-6 measured
    assert expected.std() > 0.1


@torch.no_grad()
def test_dense_parts_equal_hugging_face_s(lab: Any, tokens: torch.Tensor) -> None:
    twin, model = lab.twin, lab.host.hf.model
    hidden = twin.embed(tokens)
    positions, tables = twin.positions(hidden), model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])
    tolerance = 1e-6  # sums in another order: 3e-7 measured
    assert torch.equal(hidden, model.embed_tokens(tokens))
    for ours, theirs in zip(range(twin.num_layers), model.layers, strict=True):
        arguments = {"hidden_states": hidden, "attention_mask": None}
        found = twin.layer(ours).self_attn(**arguments, position_embeddings=positions)[0]
        wanted = theirs.self_attn(**arguments, position_embeddings=tables)[0]
        assert (found - wanted).abs().max() <= tolerance
        if twin.experts_of(ours) is not None:
            gate, expected = twin.layer(ours).mlp.gate, theirs.mlp.gate
            (logits, *ours), (wanted, *theirs) = gate(hidden), expected(hidden.view(-1, hidden.shape[-1]))
            # 1.5e-8 to 3e-8 measured
            torch.testing.assert_close(logits.reshape(wanted.shape), wanted, rtol=0, atol=1.5e-7)
            torch.testing.assert_close(by_expert(*ours), by_expert(*theirs), rtol=1e-6, atol=0)  # 1.9e-7


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, E]: the weight of each expert, 0 for those that were not chosen. There are eight."""
    flat = ids.reshape(-1, ids.shape[-1]).long()
    return torch.zeros(len(flat), 8).scatter(1, flat, weights.reshape(flat.shape))


@torch.no_grad()
def test_rotary_tables_are_the_engine_s(make_host: Any, tokens: torch.Tensor, family: str) -> None:
    host = make_host(family)
    name = Twin(host).family.rotary_table
    table = host.tensors()[name]
    host.tensors()[name] = table + 0.5
    twin = Twin(host)
    found = twin.positions(twin.embed(tokens), torch.tensor([[3, 4, 49]]))
    assert isinstance(found, Rotary)
    assert torch.equal(found.angles[found.places[0]], table[[3, 4, 49]] + 0.5)


def test_a_rotary_table_that_the_engine_lacks_is_an_error_with_its_name(make_host: Any, family: str) -> None:
    host = make_host(family)
    name = Twin(host).family.rotary_table
    host.tensors()[f"{name}s"] = host.tensors().pop(name)
    with pytest.raises(CheckpointError, match=rf"rotary table .* engine's '{name}', which is not there.*'{name}s'"):
        Twin(host)


@torch.no_grad()
def test_beside_an_engine_on_a_gpu_the_rotary_table_is_hugging_face_s(
    make_host: Any, tokens: torch.Tensor, family: str
) -> None:
    host = make_host(family, attends_in_float32=False)
    del host.tensors()[Twin(host).family.rotary_table]
    twin = Twin(host)
    hidden = twin.embed(tokens)
    found, wanted = twin.positions(hidden), host.hf.model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])
    assert not isinstance(found, Rotary)
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else list(zip(found, wanted, strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)


def a_model_with_one_copy(lab: Any) -> torch.nn.Module:
    """Its head is the engine's, but for a copy."""
    model = torch.nn.Module()
    for number, view in enumerate(lab.twin.views().values()):
        is_head = view.data_ptr() == lab.twin.head.data_ptr()
        model.register_buffer(str(number), view.clone() if is_head else view)
    return model


def test_every_tensor_lies_in_the_engine_s_storage(lab: Any) -> None:
    storages = {tensor.untyped_storage().data_ptr() for tensor in lab.host.tensors().values()}
    assert lab.twin.views()
    for name, view in lab.twin.views().items():
        assert view.untyped_storage().data_ptr() in storages, name
        assert not view.requires_grad, name
    assert lab.twin.copied_bytes == 0
    assert bytes_not_shared(a_model_with_one_copy(lab), lab.host.tensors()) == lab.twin.head.nbytes
    views = sum(view.nbytes for view in lab.twin.views().values())
    assert lab.twin.shared_bytes == views + lab.host.experts.resident_bytes


def test_a_twin_that_copied_the_engine_s_weights_would_say_so(make_lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, view = make_lab("qwen3_moe"), twin_model._view
    monkeypatch.setattr(twin_model, "_view", lambda source, engine: view(source, engine).clone())
    twin = Twin(lab.host)
    assert twin.copied_bytes == sum(copy.nbytes for copy in twin.views().values()) > 0


def packed(host: Any, fused: str, place: Path) -> PackedWeight:
    """The engine's matrix `fused` in Q8_0, read from a file: one tensor for each of the twin's."""
    sources = [source for source in Twin(host).family.twin_sources(host.config) if source.source == fused]
    rows = {source.name: host.tensors()[fused][source.start : source.stop].float().numpy() for source in sources}
    write_tensors(place, {name: ("Q8_0", to_blocks(values, "Q8_0")) for name, values in rows.items()})
    with GgufTensors([place]) as tensors:
        return tensors.packed([Held(name, (), (Part(name, ()),)) for name in rows], host.dtype)


def test_a_twin_that_copied_packed_matrices_would_say_so(
    make_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, fused = make_host("qwen3_moe"), "model.layers.1.self_attn.qkv_proj.weight"
    served, copied = (packed(host, fused, tmp_path / name) for name in ("served.gguf", "copy.gguf"))
    host.tensors()[fused] = served
    twin = Twin(host)
    assert sum(isinstance(view, PackedWeight) for view in twin.views().values()) == 3
    assert twin.copied_bytes == 0
    view = twin_model._view
    monkeypatch.setattr(twin_model, "_view", lambda source, engine: view(source, {**engine, fused: copied}))
    assert Twin(host).copied_bytes == copied.nbytes > 0


def test_data_pointers_are_those_of_the_fused_rows(make_lab: Any) -> None:
    lab = make_lab("qwen3_moe")
    views, fused = lab.twin.views(), lab.host.tensors()["model.layers.1.self_attn.qkv_proj.weight"]
    queries = views["model.layers.1.self_attn.q_proj.weight"]
    keys = views["model.layers.1.self_attn.k_proj.weight"]
    assert queries.data_ptr() == fused.data_ptr()
    assert keys.data_ptr() == fused[len(queries) :].data_ptr()


def test_the_fingerprint_follows_the_weights(deepseek_lab: Any) -> None:
    before = deepseek_lab.fingerprint()
    assert before == deepseek_lab.fingerprint()
    engine = deepseek_lab.host.tensors()["model.layers.2.self_attn.o_proj.weight"]
    engine[3, 5] += 1
    assert deepseek_lab.fingerprint() != before
    engine[3, 5] -= 1


def test_a_tensor_that_the_engine_lacks_is_an_error_with_its_name(deepseek_host: Any) -> None:
    del deepseek_host._tensors["model.layers.1.mlp.shared_experts.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"shared_experts\.down_proj\.weight"):
        Twin(deepseek_host)


def test_a_tensor_of_another_shape_is_an_error_with_both_shapes(deepseek_host: Any) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    deepseek_host._tensors[name] = deepseek_host._tensors[name][:, :10]
    with pytest.raises(CheckpointError, match=r"o_proj.*\[64, 64\].*\[64, 10\]"):
        Twin(deepseek_host)


def test_a_parameter_that_the_family_does_not_map_is_an_error(deepseek_host: Any) -> None:
    host = copy.copy(deepseek_host)
    host.config = host.config | {"num_hidden_layers": 3}
    twin = Twin(host)
    twin._model.register_parameter("extra", torch.nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(CheckpointError, match="extra"):
        twin._refuse_leftovers()


@torch.no_grad()
def test_padding_rows_leave_the_others_as_they_are(deepseek_lab: Any, tokens: torch.Tensor) -> None:
    twin = deepseek_lab.twin
    hidden = twin.embed(tokens)
    positions = twin.positions(hidden)
    padding = torch.zeros(tokens.shape, dtype=torch.bool)
    padding[1, 30:] = True
    plain = twin.run_layer(1, hidden, positions)
    with twin.padding(padding.view(-1)):
        padded = twin.run_layer(1, hidden, positions)
    assert torch.equal(plain[~padding], padded[~padding])
    assert not torch.equal(plain[padding], padded[padding])
