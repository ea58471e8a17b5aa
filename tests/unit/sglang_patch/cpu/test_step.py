"""The native step against SGLang's modules, in SGLang's own scheduler: equal hidden states and KV of every batch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from reference import lora
from reference.parity import tiny_deepseek_v2
from reference.scheduler import Engine, engine

from kt_runtime.adapters import AdapterTensors
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import available_isas
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.step import AdapterRows, BatchLora, ExpertAdapter, LoraPool
from kt_runtime.families import family_for
from kt_runtime.families.base import Family
from kt_runtime.families.qwen3_moe import Qwen3Moe
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.serve.models.presets import Preset, load_preset
from kt_runtime.sglang_patch.cpu import moe
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.lora import step as lora_step
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_adapter
from kt_runtime.sglang_patch.lora.pinned_memory import UnpinnedMemory
from kt_runtime.wire.messages import STEP_RUNNING

LENGTHS = (1, 2, 7, 33, 64, 150)  # in chunks of 64 tokens and pages of 8
NAN_TOKEN, NO_TOKEN = 700, 1 << 20
QWEN3, DEEPSEEK_V3, DEEPSEEK_V2 = load_preset("tiny-qwen3-moe"), load_preset("tiny-deepseek-v3"), tiny_deepseek_v2()
PADDED = {"vocab_size": 767}  # SGLang pads the embedding to a multiple of 64 rows
OTHER_QWEN3 = {"attention_bias": True, "norm_topk_prob": False, "num_key_value_heads": 1, **PADDED}
KIMI_K2 = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
WITH_QUERY_RANK = {"q_lora_rank": 48, "v_head_dim": 24, "first_k_dense_replace": 2, "n_shared_experts": 2}
UNGROUPED = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
# preset, changes of the model's configuration, dtype, arguments of the expert store
CASES: dict[str, tuple[Preset, dict[str, Any], str, dict[str, str]]] = {
    "float32": (QWEN3, {}, "float32", {}),
    "float32, int8 experts": (QWEN3, {}, "float32", {"expert_format": "int8"}),
    "bfloat16, int4 experts": (QWEN3, {}, "bfloat16", {"expert_format": "int4"}),
    "bfloat16, biases, one key head": (QWEN3, OTHER_QWEN3, "bfloat16", {}),
    **{f"bfloat16, {isa}": (QWEN3, {}, "bfloat16", {"isa": isa}) for isa in available_isas()},
    "DeepSeek-V3, float32": (DEEPSEEK_V3, {}, "float32", {}),
    **{f"DeepSeek-V3, bfloat16, {isa}": (DEEPSEEK_V3, {}, "bfloat16", {"isa": isa}) for isa in available_isas()},
    "Kimi-K2, bfloat16, int4 experts": (DEEPSEEK_V3, KIMI_K2, "bfloat16", {"expert_format": "int4"}),
    "Kimi-K2, float32": (DEEPSEEK_V3, KIMI_K2, "float32", {}),
    "DeepSeek-V2, bfloat16": (DEEPSEEK_V2, {}, "bfloat16", {}),
    "DeepSeek-V2, float32, one group": (DEEPSEEK_V2, UNGROUPED, "float32", {}),
    "DeepSeek-V2, bfloat16, compressed queries": (DEEPSEEK_V2, WITH_QUERY_RANK, "bfloat16", {}),
    "DeepSeek-V2, float32, compressed queries": (DEEPSEEK_V2, WITH_QUERY_RANK, "float32", {}),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SINGLE_CASES: dict[str, tuple[Preset, dict[str, Any], str, dict[str, str]]] = {  # of single tests
    f"{dtype}, YaRN": (QWEN3, {"rope_scaling": YARN}, dtype, {}) for dtype in ("float32", "bfloat16")
}


class Both:
    """Takes the place of the program: every batch runs on the step, on a step with three threads, and on SGLang's
    modules, whose result is returned. `different`: batches that differ; `modes` and `adapters` (how many): of the
    batches."""

    def __init__(self, runner: Any, program: native_step.Program) -> None:
        self.model, self.pool, self.has_moved = program.model, runner.token_to_kv_pool, program.has_moved
        self.no_adapters = program.no_adapters
        with mock.patch.object(moe.expert_store(), "num_threads", 3):
            self.programs = [program, native_step._program_of(runner)]
        self.different: list[str] = []
        self.modes: list[tuple[str, int]] = []
        self.adapters: list[int] = []

    def run(self, ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        mode = batch.forward_mode.name
        if mode == "EXTEND" and any(map(is_decode, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)):
            mode = "MIXED"
        self.modes.append((mode, len(batch.seq_lens)))
        self.adapters.append(len(set(batch.lora_ids) - {None}))
        found = [self._results(batch, program.run(ids, positions, batch)) for program in self.programs]
        hidden = type(self.model).forward.__wrapped__(self.model, ids, positions, batch)
        expected = self._results(batch, hidden, wipe=False)
        for threads, tensors in zip((1, 3), found, strict=True):
            if not all(same_bits(a, b) for a, b in zip(tensors, expected, strict=True)):
                self.different.append(f"{mode} of {len(ids)} tokens, {threads} threads")
        return hidden

    def _results(self, batch: Any, hidden: torch.Tensor, *, wipe: bool = True) -> list[torch.Tensor]:
        """Hidden states and the new keys and values, which are then wiped from the pool."""
        tensors = [hidden.clone()]
        for buffer in buffers_of(self.pool):
            tensors.append(buffer[batch.out_cache_loc].clone())
            if wipe:
                buffer[batch.out_cache_loc] = 9.0
        return tensors


def buffers_of(pool: Any) -> list[torch.Tensor]:
    return [buffer for layer in native_step.kv_buffers(pool) for buffer in layer]


def is_decode(prefix: int, new: int) -> bool:
    return prefix > 0 and new == 1


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.fixture(scope="module", params=CASES)
def served(
    request: pytest.FixtureRequest, patched_sglang: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """SGLang's own scheduler in this process, with a tiny model; prefills and decodes may share a batch."""
    from kt_runtime.serve.models.make_model import make_model

    preset, changes, dtype, store = (CASES | SINGLE_CASES)[request.param]
    model = tmp_path_factory.mktemp("model") / "tiny"
    make_model(msgspec.structs.replace(preset, config=preset.config | changes), model, seed=3)
    with engine(model, "--dtype", dtype, "--enable-mixed-chunk", **store) as started:
        yield started


@pytest.fixture
def both(served: Engine, monkeypatch: pytest.MonkeyPatch) -> Both:
    served.clear()
    assert native_step.state() == STEP_RUNNING
    program = native_step._program
    assert program is not None
    checked = Both(served.scheduler.tp_worker.model_runner, program)
    monkeypatch.setattr(native_step, "_program", checked)
    return checked


def prompt(length: int, first: int = 3) -> list[int]:
    return [first + (7 * place) % 600 for place in range(length)]


def test_prompts_of_all_lengths_alone(served: Engine, both: Both) -> None:
    for length in LENGTHS:
        served.run(served.request(f"r{length}", prompt(length, length)))
    assert not both.different
    assert {"EXTEND", "DECODE"} <= {mode for mode, _ in both.modes}


def test_a_batch_of_prompts_in_chunks_mixed_with_decodes(served: Engine, both: Both) -> None:
    requests = {
        length: served.request(f"r{length}", prompt(length, length), return_logprob=False) for length in LENGTHS
    }
    served.send(*(requests[length] for length in LENGTHS[:3]))
    for _ in range(3):
        served.step()
    served.run(*(requests[length] for length in LENGTHS[3:]))
    assert not both.different
    assert {"EXTEND", "MIXED", "DECODE"} <= {mode for mode, _ in both.modes}
    assert max(size for mode, size in both.modes if mode == "DECODE") > 1


def test_cached_prefixes(served: Engine, both: Both) -> None:
    served.run(served.request("cold", prompt(150)))
    served.run(served.request("hit", prompt(150)), served.request("longer", prompt(100) + prompt(60, 5)))
    assert not both.different
    assert served.cached_tokens() > 200


@pytest.mark.parametrize("fault", ["scaling", "position", "epsilon"])
def test_the_comparison_sees_a_step_with_a_fault(served: Engine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served.clear()
    runner = served.scheduler.tp_worker.model_runner
    attention = runner.model.model.layers[0].self_attn
    with monkeypatch.context() as patch:
        if fault == "scaling":
            patch.setattr(attention, "scaling", attention.scaling * 1.01)
        elif fault == "position":
            rotary = attention.rotary_emb
            patch.setitem(rotary._buffers, "cos_sin_cache", rotary.cos_sin_cache.roll(1, 0))
        else:
            family = family_for(served.config)
            table = family.decoder_stack(served.config)
            assert table is not None
            changed = replace(table, epsilon=0.01)
            patch.setattr(type(family), "decoder_stack", lambda *_: changed)
        checked = Both(runner, native_step._program_of(runner))
    monkeypatch.setattr(native_step, "_program", checked)
    served.run(served.request("r", prompt(33)))
    assert {text.rsplit(",")[0] for text in checked.different} >= {"EXTEND of 33 tokens", "DECODE of 1 tokens"}


def test_a_token_that_is_not_finite_ends_its_request_alone(served: Engine, both: Both) -> None:
    weight = both.model.embed_tokens.weight
    before = weight[NAN_TOKEN].clone()
    with torch.no_grad():
        weight[NAN_TOKEN] = float("nan")
    try:
        served.run(served.request("good", prompt(20)), served.request("bad", [*prompt(9), NAN_TOKEN, 5, 6]))
    finally:
        with torch.no_grad():
            weight[NAN_TOKEN] = before
    assert not both.different
    assert served.ended["bad"]["status_code"] == 422
    together = answers(served)["good"]
    served.clear()
    served.run(served.request("good", prompt(20)))
    assert answers(served)["good"] == together


def test_the_step_reports_the_tokens_that_the_experts_refuse(served: Engine) -> None:
    program = native_step._program
    assert program is not None
    weight = program.model.embed_tokens.weight
    before = weight[NAN_TOKEN].clone()
    with torch.no_grad():
        weight[NAN_TOKEN] = float("nan")
    try:
        hidden, refused = program._step.run(*small_batch(ids=[3, NAN_TOKEN]))
    finally:
        with torch.no_grad():
            weight[NAN_TOKEN] = before
    assert refused == [1] and hidden[0].isfinite().all() and hidden[1].isnan().all()


def test_a_token_with_finite_activations_and_routing_weights_that_are_not_ends_its_request(served: Engine) -> None:
    served.clear()
    program = native_step._program
    assert program is not None
    weight = program.model.layers[-1].mlp.gate.weight
    before = weight.clone()
    with torch.no_grad():
        if "topk_method" in served.config:
            weight.fill_(float("nan"))  # the sigmoid of Inf is finite
        else:
            weight[0], weight[1] = 3e38, -3e38
    try:
        hidden, refused = program._step.run(*small_batch())
        served.run(served.request("bad", prompt(9, 11)))
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert refused == [0, 1] and hidden.isfinite().all()
    assert served.ended["bad"]["status_code"] == 422


def test_an_id_outside_the_vocabulary_ends_its_request_alone(served: Engine) -> None:
    served.clear()
    served.run(served.request("good", prompt(20)))
    alone = answers(served)["good"]
    served.clear()
    served.run(served.request("good", prompt(20)), served.request("bad", [3, 4, NO_TOKEN]))
    assert f"is {NO_TOKEN}; allowed: 0 to" in served.ended["bad"]["message"]
    assert answers(served)["good"] == alone


def answers(served: Engine) -> dict[str, tuple[list[int], list[float]]]:
    return {rid: (tokens, served.logprobs.get(rid, [])) for rid, tokens in served.tokens.items()}


def answers_to_all(served: Engine) -> dict[str, tuple[list[int], list[float]]]:
    served.clear()
    served.run(*(served.request(f"r{length}", prompt(length, length)) for length in LENGTHS))
    return answers(served)


def test_greedy_answers_are_the_same_with_and_without_the_step(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_step = answers_to_all(served)
    monkeypatch.setattr(native_step, "_program", None)
    assert answers_to_all(served) == with_step


DENSE_MODULES = ("q_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_proj", "mlp")


def adapter(served: Engine, rank: int, seed: int, only: Collection[str] = ()) -> AdapterTensors:
    return lora.random_adapter(served.config, rank=rank, alpha=10 / 3, seed=seed, only=only)


@contextmanager
def installed(served: Engine, **adapters: AdapterTensors) -> Iterator[Any]:
    """In SGLang's LoRA manager, under their names."""
    manager = served.scheduler.tp_worker.model_runner.lora_manager
    for name, tensors in adapters.items():
        install_adapter(manager, served.config, name, name, f"content of {name}", tensors)
    try:
        yield manager
    finally:
        for name in adapters:
            drop_adapter(manager, name)


def test_adapters_of_several_ranks_and_the_base_in_one_batch(served: Engine, both: Both) -> None:
    three = {"all": adapter(served, 8, 1), "dense": adapter(served, 3, 2, DENSE_MODULES)}
    three["experts"] = adapter(served, 5, 3, ["experts"])
    exceptions = native_step.exceptions()
    with installed(served, **three):
        requests = [
            served.request(f"{name} {length}", prompt(length, length), return_logprob=False, lora_id=name)
            for length in LENGTHS[2:5]
            for name in ("all", None, "dense", "experts")
        ]
        served.send(*requests[:5])
        for _ in range(3):
            served.step()
        served.run(*requests[5:], served.request("long", prompt(150), return_logprob=False, lora_id="all"))
    assert not both.different
    assert {"EXTEND", "MIXED", "DECODE"} <= {mode for mode, _ in both.modes}
    decodes = [found for found, (mode, _) in zip(both.adapters, both.modes, strict=True) if mode == "DECODE"]
    assert max(decodes) == 3 and max(both.adapters) == 3
    assert native_step.exceptions() == exceptions


def test_slots_take_other_adapters_after_an_eviction(served: Engine, both: Both) -> None:
    five = {f"a{rank}": adapter(served, rank, rank) for rank in (1, 3, 4, 6, 8)}
    owners: dict[int, set[str]] = {}
    with installed(served, **five) as manager:
        for turn in range(5):
            names = [f"a{(1, 3, 4, 6, 8)[(turn + place) % 5]}" for place in range(3)]
            served.run(*(served.request(f"{turn} {name}", prompt(70, 3 + turn), lora_id=name) for name in names))
            for name, slot in manager.memory_pool.uid_to_buffer_id.items():
                if name is not None:
                    owners.setdefault(slot, set()).add(name)
    assert not both.different
    assert any(len(names) > 1 for names in owners.values())


def test_cached_prefixes_of_an_adapter(served: Engine, both: Both) -> None:
    with installed(served, one=adapter(served, 4, 1)):
        served.run(served.request("cold", prompt(150), lora_id="one"))
        served.run(
            served.request("hit", prompt(150), lora_id="one"),
            served.request("longer", prompt(100) + prompt(60, 5), lora_id="one"),
            served.request("base", prompt(150)),
        )
    assert answers(served)["hit"] == answers(served)["cold"] != answers(served)["base"]
    assert not both.different


def test_a_token_s_bits_do_not_depend_on_the_run_of_its_adapter(served: Engine) -> None:
    tokens, rank = 150, 5  # more tokens than a task of LoRA has
    slots = torch.arange(8, 8 + tokens)
    sequence = Sequences(torch.tensor([[0, tokens, 0, 0]]), slots.int()[None])
    batch = (torch.tensor(prompt(tokens)), slots - 8, slots, sequence)
    with installed(served, one=adapter(served, rank, 1)) as manager:
        served.clear()
        served.run(served.request("takes a slot", prompt(3), lora_id="one"))
        served.clear()
        program, slot = native_step._program, manager.memory_pool.uid_to_buffer_id["one"]
        assert program is not None
        experts, token_slots = [ExpertAdapter(slot, rank, 10 / 3 / rank)], torch.zeros(tokens, dtype=torch.int32)
        found = [
            program._step.run(*batch, BatchLora(rows, experts, token_slots))[0]
            for rows in (
                [AdapterRows(0, tokens, slot, rank, 10 / 3 / rank)],
                [AdapterRows(place, 1, slot, rank, 10 / 3 / rank) for place in range(tokens)],
                [AdapterRows(first, 30, slot, rank, 10 / 3 / rank) for first in range(0, tokens, 30)],
            )
        ]
        base = program._step.run(*batch)[0]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0] != base).any(-1).all()


def test_an_adapter_whose_activations_are_not_finite_ends_its_request_alone(served: Engine, both: Both) -> None:
    with installed(served, bad=lora.huge_adapter(served.config), good=adapter(served, 4, 1)):
        served.run(
            served.request("bad", prompt(20), lora_id="bad"),
            served.request("good", prompt(20), lora_id="good"),
            served.request("base", prompt(20)),
        )
        together = answers(served)
        assert served.ended["bad"]["status_code"] == 422
        served.clear()
        served.run(served.request("good", prompt(20), lora_id="good"), served.request("base", prompt(20)))
    assert not both.different
    assert answers(served) == {rid: together[rid] for rid in ("good", "base")}


def test_requests_of_the_base_have_the_same_bits_beside_an_adapter_s(served: Engine) -> None:
    alone = answers_to_all(served)
    with installed(served, id=adapter(served, 4, 1)):
        served.clear()
        base = [served.request(f"r{length}", prompt(length, length)) for length in LENGTHS]
        served.run(served.request("adapted", prompt(20), lora_id="id"), *base)
    assert len(served.tokens["adapted"]) == 8
    assert {rid: answer for rid, answer in answers(served).items() if rid != "adapted"} == alone


def test_the_step_and_sampling_are_timed_for_decoding_requests(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    served.clear()
    before = native_step.decoded()
    served.run(served.request("step", prompt(20)))
    after = native_step.decoded()
    assert len(served.tokens["step"]) == 8
    assert after.step_batches == before.step_batches + 7, "the prompt's batch gives the first token"
    assert after.step_seconds > before.step_seconds and after.sampling_seconds > before.sampling_seconds
    monkeypatch.setattr(native_step, "_program", None)
    served.run(served.request("modules", prompt(20)))
    with_modules = native_step.decoded()
    assert (with_modules.step_batches, with_modules.step_seconds) == (after.step_batches, after.step_seconds)
    assert with_modules.sampling_seconds > after.sampling_seconds
    served.run(served.request("prompt", prompt(20), max_new_tokens=1))
    assert native_step.decoded() == with_modules, "a prompt is not decoded"


def test_the_step_is_built_again_over_a_lora_pool_that_moved(served: Engine) -> None:
    def ask() -> dict[str, tuple[list[int], list[float]]]:
        served.clear()
        served.run(served.request("adapted", prompt(20), lora_id="id"))
        return answers(served)

    with installed(served, id=adapter(served, 4, 1)) as manager:
        before, program = ask(), native_step._program
        buffers = manager.memory_pool.B_buffer["o_proj"]
        buffers[1], old = buffers[1].clone(), buffers[1]
        old.fill_(float("nan"))
        with UnpinnedMemory():
            manager.update_lora_info()
        served.clear()
        served.run(served.request("base", prompt(20)))
        assert native_step._program is program  # batches without adapters do not read the pool
        assert ask() == before and native_step._program is not program
        assert native_step.state() == STEP_RUNNING


def test_what_lora_can_t_do_on_the_step_goes_to_sglang_s_modules(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = served.scheduler.tp_worker.model_runner
    monkeypatch.setattr(native_step, "_exceptions", [])
    with installed(served, id=adapter(served, 4, 1)) as manager:
        served.clear()
        served.run(served.request("adapted", prompt(20), lora_id="id"))
        expected = answers(served)
        assert native_step.exceptions() == []
        try:
            with monkeypatch.context() as patch:
                patch.setattr(manager.lora_backend, "name", "another")
                native_step._build(None, runner)
            assert native_step.state() == STEP_RUNNING
            served.clear()
            served.run(served.request("adapted", prompt(20), lora_id="id"))
        finally:
            native_step._build(None, runner)
    assert answers(served) == expected
    assert native_step.exceptions() == ["it has an adapter, and the LoRA backend is another"]


def test_the_step_is_built_again_over_parameters_and_a_pool_that_moved(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = served.scheduler.tp_worker.model_runner
    before, program = answers_to_all(served), native_step._program
    weight = runner.model.model.layers[0].self_attn.o_proj.weight
    weight.data, old = weight.data.clone(), weight.data
    old.fill_(float("nan"))
    assert answers_to_all(served) == before and native_step._program is not program
    monkeypatch.setattr(native_step, "_exceptions", ["it is padded"])
    program, pool = native_step._program, runner.token_to_kv_pool
    assert served.scheduler.flush_cache()
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer
    buffers[1], old = torch.zeros_like(buffers[1]), buffers[1]
    old.fill_(float("nan"))
    assert answers_to_all(served) == before and native_step._program is not program
    assert native_step.state() == STEP_RUNNING and native_step.exceptions() == ["it is padded"]


def test_the_model_of_speculative_decoding_leaves_the_step_alone(served: Engine) -> None:
    program = native_step._program
    native_step._build(None, SimpleNamespace(is_draft_worker=True))
    assert program is not None and native_step._program is program


def small_batch(rows: tuple[int, ...] = (0, 2, 0, 0), **changes: list[int]) -> tuple[Any, ...]:
    """Two tokens of one sequence; the slots 8 and 9 are free in an engine at rest."""
    values = {"ids": [3, 4], "positions": [0, 1], "slots": [8, 9]} | changes
    table = torch.tensor([[8, 9, 10], [8, -1, 10]], dtype=torch.int32)
    tensors = (torch.tensor(values[name]) for name in ("ids", "positions", "slots"))
    return (*tensors, Sequences(torch.tensor([rows]), table))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "id": ({"ids": [3, 1 << 20]}, r"ids\[1\] is 1048576; allowed: 0 to"),
    "position": ({"positions": [0, -1]}, r"positions\[1\] is -1; allowed: 0 to"),
    "slot": ({"slots": [8, 1 << 30]}, r"slots\[1\] is 1073741824"),
    "request": ({"rows": (0, 2, 0, 2)}, "sequence 0 has row 2 of slots; allowed: 0 to 1"),
    "length": ({"rows": (0, 2, 5, 0)}, r"sequence 0 has 5 \+ 2 keys; a row of slots has 3"),
    "sum": ({"rows": (0, 1, 0, 0)}, "the sequences have 1 new tokens; there are 2 ids"),
    "key": ({"rows": (0, 2, 0, 1)}, "sequence 0 has key 1 in slot -1"),
    "shape": ({"positions": [0]}, r"positions has shape \[1\]; expected \[2\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written(served: Engine, name: str) -> None:
    served.clear()
    changes, message = WRONG[name]
    program = native_step._program
    assert program is not None
    keys = buffers_of(served.scheduler.tp_worker.model_runner.token_to_kv_pool)[0]
    before = keys.clone()
    with pytest.raises(InvalidValueError, match=message):
        program._step.run(*small_batch(**changes))
    assert torch.equal(keys, before)
    hidden, refused = program._step.run(*small_batch())
    assert hidden.isfinite().all() and refused == []


def test_a_row_that_pads_the_embedding_is_no_token(served: Engine) -> None:
    size, program = served.config["vocab_size"], native_step._program
    assert program is not None
    program._step.run(*small_batch(ids=[3, size - 1]))
    with pytest.raises(InvalidValueError, match=rf"ids\[1\] is {size}; allowed: 0 to {size - 1}"):
        program._step.run(*small_batch(ids=[3, size]))


def without_a_factor(pool: LoraPool) -> LoraPool:
    return replace(pool, layers=[replace(pool.layers[0], out_b=None), *pool.layers[1:]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pool: replace(pool, rank=9), "layers[0].lora.FIRST_a has shape [4, "),
        (lambda pool: replace(pool, slots=0), "lora_slots is 0 and lora_rank 8; both are 0, or"),
        (without_a_factor, "layers[0].lora.out_b is missing: A and B come in pairs"),
    ],
)
def test_a_lora_pool_that_does_not_fit_leaves_no_step(
    served: Engine, change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = served.scheduler.tp_worker.model_runner
    pool = lora_step.lora_pool(runner.lora_manager)
    assert pool is not None
    try:
        with monkeypatch.context() as patch:
            patch.setattr(lora_step, "lora_pool", lambda manager: change(pool))
            native_step._build(None, runner)
            first = next(
                name for name in ("qkv", "compress", "kv_b") if getattr(pool.layers[0], f"{name}_a") is not None
            )
            assert native_step.state().startswith(reason.replace("FIRST", first))
    finally:
        native_step._build(None, runner)
    assert native_step.state() == STEP_RUNNING


TWO = torch.zeros(2, dtype=torch.int32)
WRONG_LORA: dict[str, tuple[BatchLora, str]] = {
    "slot": (BatchLora([AdapterRows(0, 2, 4, 1, 1.0)]), r"adapter_rows\[0\] has slot 4; allowed: 0 to 3"),
    "rank": (BatchLora([AdapterRows(0, 2, 3, 9, 1.0)]), r"adapter_rows\[0\] has rank 9; allowed: 1 to 8"),
    "no rank": (BatchLora([AdapterRows(0, 2, 3, 0, 1.0)]), r"adapter_rows\[0\] has rank 0; allowed: 1 to 8"),
    "scaling": (
        BatchLora([AdapterRows(0, 1, 3, 8, 1.0), AdapterRows(1, 1, 3, 8, float("inf"))]),
        r"adapter_rows\[1\] has a scaling that is not a finite number",
    ),
    "rows": (BatchLora([AdapterRows(1, 2, 0, 1, 1.0)]), "begins at token 1 and has 2; there are 2 tokens"),
    "order": (
        BatchLora([AdapterRows(0, 2, 0, 1, 1.0), AdapterRows(1, 1, 0, 1, 1.0)]),
        r"adapter_rows\[1\] begins at token 1 .* the first 2 are taken",
    ),
    "experts' slot": (BatchLora([], [ExpertAdapter(-1, 1, 1.0)], TWO), r"expert_adapters\[0\] has slot -1"),
    "index": (BatchLora([], [ExpertAdapter(0, 1, 1.0)], TWO + 1), r"token_slots\[0\] is 1; allowed: -1 to 0"),
    "no indices": (BatchLora([], [ExpertAdapter(0, 1, 1.0)]), "token_slots is missing"),
    "indices": (BatchLora([], [], torch.zeros(3, dtype=torch.int32)), r"token_slots has shape \[3\]; expected \[2\]"),
}


@pytest.mark.parametrize("name", WRONG_LORA)
def test_adapters_that_do_not_fit_are_refused_before_anything_is_written(served: Engine, name: str) -> None:
    served.clear()
    adapters, message = WRONG_LORA[name]
    program = native_step._program
    assert program is not None
    keys = buffers_of(served.scheduler.tp_worker.model_runner.token_to_kv_pool)[0]
    before = keys.clone()
    with pytest.raises(InvalidValueError, match=message):
        ids, positions, slots, sequences = small_batch()
        program._step.run(ids, positions, slots, sequences, adapters)
    assert torch.equal(keys, before)


def test_a_batch_without_tokens_gives_no_rows(served: Engine) -> None:
    program, none = native_step._program, torch.zeros(0, dtype=torch.int64)
    assert program is not None
    hidden, refused = program._step.run(none, none, none, Sequences(torch.zeros(0, 4, dtype=torch.int64), None))
    assert hidden.shape == (0, served.config["hidden_size"]) and refused == []


def test_memory_of_a_large_batch_is_given_back_after_many_small_ones(served: Engine) -> None:
    served.clear()
    step = native_step._program_of(served.scheduler.tp_worker.model_runner)._step
    slots = torch.arange(8, 1008)
    large = Sequences(torch.tensor([[0, 1000, 0, 0]]), slots.int()[None])
    small = small_batch()
    step.run(*small)
    needed = step.scratch_bytes
    wanted = step.run(torch.tensor(prompt(1000)), slots - 8, slots, large)[0]
    assert step.scratch_bytes > 50 * needed > 0
    for _ in range(3 * 1024):  # windows (csrc/base/scratch.h): the large batch's, the one that remembers it, one more
        step.run(*small)
    assert step.scratch_bytes == needed
    assert torch.equal(step.run(torch.tensor(prompt(1000)), slots - 8, slots, large)[0], wanted)


# What changes in SGLang's runner, by attribute, and why there is then no step.
NO_STEP: dict[str, tuple[str, Any, str]] = {
    "attention in prefill": ("prefill_attention_backend_str", "torch_native", "the attention backend is torch_native"),
    "attention in decode": ("decode_attention_backend_str", "torch_native", "the attention backend is torch_native"),
    "wrapped attention": ("attn_backend", SimpleNamespace(), "the attention backend is wrapped in SimpleNamespace"),
    "KV dtype": ("token_to_kv_pool.store_dtype", torch.uint8, "the KV pool is a POOL of "),
    "KV layout": ("token_to_kv_pool.kv_cache_layout", "hnd", "the KV pool is a POOL of "),
    "rotary": ("model.model.layers[1].self_attn.rotary_emb.is_neox_style", False, "the rotary embedding is ROTARY"),
    "rotary module": (  # as SGLang's embeddings for "longrope" and FoPE, which are not RotaryEmbedding's subclasses
        "model.model.layers[1].self_attn.rotary_emb",
        torch.nn.Identity(),
        "the rotary embedding is Identity",
    ),
    "packed weights": ("model.lm_head.use_intel_amx_backend", True, "the weights of lm_head are packed"),
    "residual": ("model.model.norm.fp32_residual", True, "model.norm has a residual in float32"),
    "hook": ("model.model.norm._forward_hooks", {0: print}, "model.norm has a forward hook"),
    "dtype of a weight": (
        "model.model.norm.weight.data",
        torch.zeros(1, dtype=torch.float16),
        "model.norm.weight is torch.float16; allowed: torch.float32 or torch.bfloat16",
    ),
    "shape of a weight": (
        "model.model.layers[-1].mlp.gate.weight.data",
        torch.zeros(3, 5),
        "layers[LAST].routed.gate has ",
    ),
}
NO_DEEPSEEK_STEP: dict[str, tuple[str, Any, str]] = {
    "KV layout": ("token_to_kv_pool.use_dsa", True, "the KV pool is a POOL of "),
    "rotary": ("model.model.layers[1].self_attn.rotary_emb.is_neox_style", True, "the rotary embedding is ROTARY"),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_a_model_that_the_step_does_not_fit_is_left_to_sglang(
    served: Engine, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = served.scheduler.tp_worker.model_runner
    path, value, reason = (NO_STEP | NO_DEEPSEEK_STEP if "kv_lora_rank" in served.config else NO_STEP)[name]
    layers = runner.model.model.layers
    words = {
        "POOL": type(runner.token_to_kv_pool).__name__,
        "ROTARY": type(layers[0].self_attn.rotary_emb).__name__,
        "LAST": str(len(layers) - 1),
    }
    for word, found in words.items():
        reason = reason.replace(word, found)
    try:
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
            parent, attribute = owner(runner, path)
            if isinstance(value, torch.nn.Module):  # setattr's undo would delete the module
                patch.setitem(parent._modules, attribute, value)
            else:
                patch.setattr(parent, attribute, value, raising=False)
            native_step._build(None, runner)
            assert native_step.state().startswith(reason)
            assert native_step.state() in caplog.text
    finally:
        native_step._build(None, runner)
    assert native_step.state() == STEP_RUNNING


def test_a_rotary_embedding_with_a_forward_of_its_own_is_left_to_sglang(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.rotary_embedding.bailing_mrope import BailingMRotaryEmbedding

    runner = served.scheduler.tp_worker.model_runner
    try:
        with monkeypatch.context() as patch:
            patch.setattr(runner.model.model.layers[0].self_attn.rotary_emb, "__class__", BailingMRotaryEmbedding)
            native_step._build(None, runner)
            assert native_step.state() == "the rotary embedding is BailingMRotaryEmbedding"
    finally:
        native_step._build(None, runner)
    assert native_step.state() == STEP_RUNNING


def test_training_is_exact_while_the_step_computes_everything(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    program, runner = native_step._program, served.scheduler.tp_worker.model_runner
    monkeypatch.setattr(native_step, "_exceptions", [])
    assert native_step.not_exact() == ""
    with monkeypatch.context() as patch:
        patch.setattr(program, "no_adapters", "LoRA adapts the embedding")
        assert native_step.not_exact().endswith("does not compute batches with adapters: LoRA adapts the embedding")
    with monkeypatch.context() as patch:
        patch.setattr(runner.model.logits_processor, "use_fp32_lm_head", True)
        assert native_step.not_exact() == (
            "" if runner.dtype == torch.float32 else "serving multiplies the head in float32, training in bfloat16"
        )
    with monkeypatch.context() as patch:
        patch.setattr(native_step, "_exceptions", ["it is padded", "its mode is IDLE"])
        assert native_step.not_exact() == "the native step has left a batch to SGLang's modules: it is padded"
    with monkeypatch.context() as patch:
        patch.setattr(native_step, "_program", None)
        patch.setattr(native_step, "_reason", "--no-step")
        assert native_step.not_exact() == "the native step does not compute the model: --no-step"


def test_a_step_that_could_not_be_built_is_no_step(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: Any) -> str:
        raise RuntimeError("unexpected")

    runner = served.scheduler.tp_worker.model_runner
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="unexpected"):
        patch.setattr(native_step, "_why_not", fail)
        native_step._build(None, runner)
    assert native_step.state() == "the step could not be built; the log has the reason"
    native_step._build(None, runner)
    assert native_step.state() == STEP_RUNNING


def owner(runner: Any, path: str) -> tuple[Any, str]:
    *parents, name = path.replace("[", ".").replace("]", "").split(".")
    for parent in parents:
        runner = runner[int(parent)] if parent.lstrip("-").isdigit() else getattr(runner, parent)
    return runner, name


def test_other_models_and_options_are_left_to_sglang(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.runtime_context import get_exec, get_observability, get_parallel

    def why_not(config: Mapping[str, Any]) -> str:
        config_object = SimpleNamespace(to_dict=lambda: dict(config))
        return native_step._why_not(SimpleNamespace(model_config=SimpleNamespace(hf_config=config_object)))

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3Moe, "decoder_stack", Family.decoder_stack)
        assert why_not(QWEN3.config) == "the family qwen3_moe has no table of its decoder stack"
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert why_not(llama) == "'llama' is not one of kt-runtime's model families"
    with monkeypatch.context() as patch:
        patch.setitem(get_parallel()._overrides, "tp_size", 2)
        assert why_not(served.config) == "the model is split over several ranks"
    runner = served.scheduler.tp_worker.model_runner
    assert native_step._why_not(runner) == ""
    with get_exec().moe.override(expert_distribution_recorder_mode="stat"):
        assert native_step._why_not(runner) == "the distribution of experts is recorded"
    with get_observability().override(forward_hooks=[{"name": "x"}]):
        assert native_step._why_not(runner) == "forward hooks are asked for"
    places: dict[str, Any] = dict.fromkeys(
        ("model", "model_directory", "wire_address", "names_address", "adapter_directory"), "x"
    )
    for key, value in ResidentSettings(**places, step=False).to_environment().items():
        monkeypatch.setenv(key, value)
    assert why_not(served.config) == "--no-step"


def test_what_the_step_leaves_to_sglang(
    patched_sglang: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.state_capturer import routed_experts

    class Refusing:
        def run(self, *_: Any) -> None:
            raise AssertionError("the step must not run")

    model = SimpleNamespace(layers_to_capture=[])
    program = SimpleNamespace(
        model=model, run=Refusing().run, has_moved=lambda adapted: False, no_adapters="LoRA adapts the embedding"
    )
    monkeypatch.setattr(native_step, "_program", program)
    monkeypatch.setattr(native_step, "_exceptions", [])
    batch = {
        "forward_mode": ForwardMode.DECODE, "lora_ids": [None, None], "replace_embeds": None, "can_run_tbo": False,
        "seq_lens": torch.tensor([3, 4]),
    }  # fmt: skip
    ids = torch.zeros(2, dtype=torch.int64)
    old = object()

    def computed(model: Any, ids: torch.Tensor, batch: dict[str, Any], *more: Any) -> bool:
        return native_step.forward(lambda *_: old, model, ids, ids, SimpleNamespace(**batch), *more) is old

    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert computed(model, ids, batch | {"lora_ids": [None, "an adapter"]})
        assert computed(model, ids, batch | {"forward_mode": ForwardMode.IDLE})
        assert computed(model, ids, batch | {"forward_mode": ForwardMode.TARGET_VERIFY})
        assert computed(model, ids, batch, torch.zeros(2, 4))
        assert computed(model, ids, batch | {"replace_embeds": torch.zeros(1, 4)})
        assert computed(model, ids, batch, None, object())
        assert computed(model, ids, batch | {"can_run_tbo": True})
        assert computed(model, torch.zeros(3, dtype=torch.int64), batch)
        assert computed(SimpleNamespace(layers_to_capture=[]), ids, batch)
        model.layers_to_capture = [1]
        assert computed(model, ids, batch)
        model.layers_to_capture = []
        with monkeypatch.context() as patch:
            patch.setattr(routed_experts, "get_global_experts_capturer", object)
            assert computed(model, ids, batch)
    assert native_step.exceptions() == [
        "it has an adapter, and LoRA adapts the embedding",
        "its mode is IDLE",
        "its mode is TARGET_VERIFY",
        "its input has embeddings",
        "it continues another rank's layers",
        "it is computed in two halves",
        "it is padded",
        "states of single layers are captured",
        "the chosen experts are captured",
    ]
    assert all(caplog.text.count(reason) == 1 for reason in native_step.exceptions())
    with pytest.raises(AssertionError, match="the step must not run"):
        computed(model, ids, batch)


@pytest.mark.parametrize("served", SINGLE_CASES, indirect=True)
def test_yarns_rotary_table(served: Engine, both: Both) -> None:
    rotary = both.model.layers[0].self_attn.rotary_emb
    assert type(rotary).__name__ == "YaRNScalingRotaryEmbedding"
    assert rotary.cos_sin_cache[0, 0] > 1.1, "YaRN's attention factor is a factor of the table"
    requests = [served.request(f"r{length}", prompt(length, length), return_logprob=False) for length in LENGTHS]
    served.send(*requests[:3])
    for _ in range(3):
        served.step()
    served.run(*requests[3:])
    assert not both.different
    assert {"EXTEND", "MIXED", "DECODE"} <= {mode for mode, _ in both.modes}
