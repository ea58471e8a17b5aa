"""Batches with adapters in a few models: their slots, prefixes and faults, and what is left to SGLang's modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import lora
from reference.resident.native_step import (
    LENGTHS,
    Both,
    adapter,
    answers,
    answers_to_all,
    buffers_of,
    installed,
    prompt,
    run_step,
    small_batch,
)
from reference.resident.scheduler import Engine

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.step import AdapterRows, BatchLora, ExpertAdapter, LoraPool
from kt_runtime.families import family_for
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.lora import step as lora_step
from kt_runtime.sglang_patch.lora.pinned_memory import UnpinnedMemory
from kt_runtime.wire.replies import STEP_RUNNING


@pytest.mark.slow
@pytest.mark.once_a_family
def test_slots_take_other_adapters_after_an_eviction(served: Engine, both: Both) -> None:
    five = {f"a{rank}": adapter(served, rank, rank) for rank in (1, 3, 4, 6, 8)}
    owners: dict[int, set[str]] = {}
    with installed(served, **five) as manager:
        for turn in range(5):
            names = [f"a{(1, 3, 4, 6, 8)[(turn + place) % 5]}" for place in range(3)]
            served.run(*(served.request(f"{turn} {name}", prompt(20, 3 + turn), lora_id=name) for name in names))
            for name, slot in manager.memory_pool.uid_to_buffer_id.items():
                if name is not None:
                    owners.setdefault(slot, set()).add(name)
    assert not both.different
    assert any(len(names) > 1 for names in owners.values())


@pytest.mark.slow
@pytest.mark.once_a_family
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


@pytest.mark.once_a_family
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


@pytest.mark.once_a_family
def test_requests_of_the_base_have_the_same_bits_beside_an_adapter_s(served: Engine) -> None:
    alone = answers_to_all(served)
    with installed(served, id=adapter(served, 4, 1)):
        served.clear()
        base = [served.request(f"r{length}", prompt(length, length)) for length in LENGTHS]
        served.run(served.request("adapted", prompt(20), lora_id="id"), *base)
    assert len(served.tokens["adapted"]) == 4
    assert {rid: answer for rid, answer in answers(served).items() if rid != "adapted"} == alone


@pytest.mark.once_a_family
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


@pytest.mark.once_a_family
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


def without_a_factor(pool: LoraPool) -> LoraPool:
    return replace(pool, layers=[replace(pool.layers[0], out_b=None), *pool.layers[1:]])


@pytest.mark.once_a_family
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
    stack = family_for(served.config).decoder_stack(served.config)
    assert stack is not None
    pool = lora_step.lora_pool(runner.lora_manager, native_step.delta_layers(stack))
    assert pool is not None
    try:
        with monkeypatch.context() as patch:
            patch.setattr(lora_step, "lora_pool", lambda manager, delta: change(pool))
            native_step._build(None, runner)
            first = next(
                name
                for name in ("qkv", "inputs", "compress", "kv_b")
                if getattr(pool.layers[0], f"{name}_a") is not None
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


@pytest.mark.once_a_family
@pytest.mark.parametrize("name", WRONG_LORA)
def test_adapters_that_do_not_fit_are_refused_before_anything_is_written(served: Engine, name: str) -> None:
    served.clear()
    adapters, message = WRONG_LORA[name]
    program = native_step._program
    assert program is not None
    keys = buffers_of(served.scheduler.tp_worker.model_runner.token_to_kv_pool)[0]
    before = keys.clone()
    with pytest.raises(InvalidValueError, match=message):
        run_step(program, small_batch(), adapters)
    assert torch.equal(keys, before)
