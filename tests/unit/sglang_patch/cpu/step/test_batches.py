"""The native step against SGLang's modules, in SGLang's own scheduler: equal hidden states and KV of every batch, also
of those with adapters. What is tested in every case is here: each case starts a scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.resident.native_step import (
    LENGTHS,
    QWEN3,
    SINGLE_CASES,
    Both,
    adapter,
    answers,
    answers_to_all,
    attention_of,
    buffers_of,
    installed,
    prompt,
    run_step,
    small_batch,
)
from reference.resident.scheduler import Engine

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.step import AdapterRows, BatchLora, ExpertAdapter
from kt_runtime.families import family_for
from kt_runtime.families.base import Family
from kt_runtime.families.models.qwen3_moe import Qwen3Moe
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.delta.step import attending_pool
from kt_runtime.wire.replies import STEP_RUNNING

NAN_TOKEN, NO_TOKEN = 700, 1 << 20
DENSE_MODULES = ("q_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_proj", "mlp", "in_proj_qkvz", "in_proj_b")


def router(served: Engine) -> str:
    """SGLang's name of the last layer's router, in its decoder stack."""
    family, last = family_for(served.config), served.config["num_hidden_layers"] - 1
    return family.engine_name(f"{family.router_module(last)}.weight").removeprefix("model.")


@pytest.mark.slow
def test_prompts_of_all_lengths_alone(served: Engine, both: Both) -> None:
    for length in LENGTHS:  # each decodes once; the batches below decode more
        served.run(served.request(f"r{length}", prompt(length, length), max_new_tokens=2))
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
    served.run(served.request("cold", prompt(150), max_new_tokens=1))
    again = {"hit": prompt(150), "longer": prompt(100) + prompt(60, 5)}
    served.run(*(served.request(name, each, max_new_tokens=2) for name, each in again.items()))
    assert not both.different
    assert served.cached_tokens() > 200


@pytest.mark.one_set_a_family
def test_adapters_of_several_ranks_and_the_base_in_one_batch(served: Engine, both: Both) -> None:
    three = {"all": adapter(served, 8, 1), "dense": adapter(served, 3, 2, DENSE_MODULES)}
    three["experts"] = adapter(served, 5, 3, ["experts"])
    exceptions = native_step.exceptions()
    with installed(served, **three):
        requests = [
            served.request(f"{name} {length}", prompt(length, length), return_logprob=False, lora_id=name)
            for length in LENGTHS[2:4]
            for name in ("all", None, "dense", "experts")
        ]
        served.send(*requests[:5])
        for _ in range(3):
            served.step()
        served.run(*requests[5:], served.request("long", prompt(100), return_logprob=False, lora_id="all"))
    assert not both.different
    assert {"EXTEND", "MIXED", "DECODE"} <= {mode for mode, _ in both.modes}
    decodes = [found for found, (mode, _) in zip(both.adapters, both.modes, strict=True) if mode == "DECODE"]
    assert max(decodes) == 3 and max(both.adapters) == 3
    assert native_step.exceptions() == exceptions


@pytest.mark.one_set_a_family
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
            run_step(program, batch, BatchLora(rows, experts, token_slots))[0]
            for rows in (
                [AdapterRows(0, tokens, slot, rank, 10 / 3 / rank)],
                [AdapterRows(place, 1, slot, rank, 10 / 3 / rank) for place in range(tokens)],
                [AdapterRows(first, 30, slot, rank, 10 / 3 / rank) for first in range(0, tokens, 30)],
            )
        ]
        base = run_step(program, batch)[0]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0] != base).any(-1).all()


@pytest.mark.once_a_family
@pytest.mark.parametrize("fault", ["scaling", "position", "epsilon"])
def test_the_comparison_sees_a_step_with_a_fault(served: Engine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served.clear()
    runner = served.scheduler.tp_worker.model_runner
    attention = attention_of(runner.model.model)
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


@pytest.mark.once_a_family
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


@pytest.mark.once_a_family
def test_the_step_reports_the_tokens_that_the_experts_refuse(served: Engine) -> None:
    program = native_step._program
    assert program is not None
    weight = program.model.embed_tokens.weight
    before = weight[NAN_TOKEN].clone()
    with torch.no_grad():
        weight[NAN_TOKEN] = float("nan")
    try:
        hidden, refused = run_step(program, small_batch(ids=[3, NAN_TOKEN]))
    finally:
        with torch.no_grad():
            weight[NAN_TOKEN] = before
    assert refused == [1] and hidden[0].isfinite().all() and hidden[1].isnan().all()


@pytest.mark.once_a_family
def test_a_token_with_finite_activations_and_routing_weights_that_are_not_ends_its_request(served: Engine) -> None:
    served.clear()
    program = native_step._program
    assert program is not None
    weight = program.model.get_parameter(router(served))
    before = weight.clone()
    with torch.no_grad():
        if "topk_method" in served.config:
            weight.fill_(float("nan"))  # the sigmoid of Inf is finite
        else:
            weight[0], weight[1] = 3e38, -3e38
    try:
        hidden, refused = run_step(program, small_batch())
        served.run(served.request("bad", prompt(9, 11)))
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert refused == [0, 1] and hidden.isfinite().all()
    assert served.ended["bad"]["status_code"] == 422


@pytest.mark.once_a_family
def test_an_id_outside_the_vocabulary_ends_its_request_alone(served: Engine) -> None:
    served.clear()
    served.run(served.request("good", prompt(20)))
    alone = answers(served)["good"]
    served.clear()
    served.run(served.request("good", prompt(20)), served.request("bad", [3, 4, NO_TOKEN]))
    assert f"is {NO_TOKEN}; allowed: 0 to" in served.ended["bad"]["message"]
    assert answers(served)["good"] == alone


@pytest.mark.once_a_family
def test_greedy_answers_are_the_same_with_and_without_the_step(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_step = answers_to_all(served)
    monkeypatch.setattr(native_step, "_program", None)
    assert answers_to_all(served) == with_step


@pytest.mark.once_a_family
def test_the_step_and_sampling_are_timed_for_decoding_requests(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    served.clear()
    before = native_step.decoded()
    served.run(served.request("step", prompt(20)))
    after = native_step.decoded()
    assert len(served.tokens["step"]) == 4
    assert after.step_batches == before.step_batches + 3, "the prompt's batch gives the first token"
    assert after.step_seconds > before.step_seconds and after.sampling_seconds > before.sampling_seconds
    monkeypatch.setattr(native_step, "_program", None)
    served.run(served.request("modules", prompt(20)))
    with_modules = native_step.decoded()
    assert (with_modules.step_batches, with_modules.step_seconds) == (after.step_batches, after.step_seconds)
    assert with_modules.sampling_seconds > after.sampling_seconds
    served.run(served.request("prompt", prompt(20), max_new_tokens=1))
    assert native_step.decoded() == with_modules, "a prompt is not decoded"


@pytest.mark.once_a_family
def test_the_step_is_built_again_over_parameters_and_a_pool_that_moved(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = served.scheduler.tp_worker.model_runner
    before, program = answers_to_all(served), native_step._program
    weight = attention_of(runner.model.model).o_proj.weight
    weight.data, old = weight.data.clone(), weight.data
    old.fill_(float("nan"))
    assert answers_to_all(served) == before and native_step._program is not program
    monkeypatch.setattr(native_step, "_exceptions", ["it is padded"])
    program, pool = native_step._program, attending_pool(runner.token_to_kv_pool)
    assert served.scheduler.flush_cache()
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer
    buffers[-1], old = torch.zeros_like(buffers[-1]), buffers[-1]
    old.fill_(float("nan"))
    assert answers_to_all(served) == before and native_step._program is not program
    assert native_step.state() == STEP_RUNNING and native_step.exceptions() == ["it is padded"]


@pytest.mark.once_a_family
def test_the_model_of_speculative_decoding_leaves_the_step_alone(served: Engine) -> None:
    program = native_step._program
    native_step._build(None, SimpleNamespace(is_draft_worker=True))
    assert program is not None and native_step._program is program


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


@pytest.mark.once_a_family
@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written(served: Engine, name: str) -> None:
    served.clear()
    changes, message = WRONG[name]
    program = native_step._program
    assert program is not None
    keys = buffers_of(served.scheduler.tp_worker.model_runner.token_to_kv_pool)[0]
    before = keys.clone()
    with pytest.raises(InvalidValueError, match=message):
        run_step(program, small_batch(**changes))
    assert torch.equal(keys, before)
    hidden, refused = run_step(program, small_batch())
    assert hidden.isfinite().all() and refused == []


def test_a_row_that_pads_the_embedding_is_no_token(served: Engine) -> None:
    size, program = served.config["vocab_size"], native_step._program
    assert program is not None
    run_step(program, small_batch(ids=[3, size - 1]))
    with pytest.raises(InvalidValueError, match=rf"ids\[1\] is {size}; allowed: 0 to {size - 1}"):
        run_step(program, small_batch(ids=[3, size]))


@pytest.mark.once_a_family
def test_a_batch_without_tokens_gives_no_rows(served: Engine) -> None:
    program, none = native_step._program, torch.zeros(0, dtype=torch.int64)
    assert program is not None
    hidden, refused = run_step(program, (none, none, none, Sequences(torch.zeros(0, 4, dtype=torch.int64), None)))
    assert hidden.shape == (0, served.config["hidden_size"]) and refused == []


@pytest.mark.slow
@pytest.mark.once_a_family
def test_memory_of_a_large_batch_is_given_back_after_many_small_ones(served: Engine) -> None:
    served.clear()
    program = native_step._program_of(served.scheduler.tp_worker.model_runner)
    step = program._step
    slots = torch.arange(8, 1008)
    large = Sequences(torch.tensor([[0, 1000, 0, 0]]), slots.int()[None])
    small = small_batch()
    run_step(program, small)
    needed = step.scratch_bytes
    wanted = run_step(program, (torch.tensor(prompt(1000)), slots - 8, slots, large))[0]
    assert step.scratch_bytes > 50 * needed > 0
    for _ in range(3 * 1024):  # windows (csrc/base/scratch.h): the large batch's, the one that remembers it, one more
        run_step(program, small)
    assert step.scratch_bytes == needed
    assert torch.equal(run_step(program, (torch.tensor(prompt(1000)), slots - 8, slots, large))[0], wanted)


# What changes in SGLang's runner, by attribute, and why there is then no step.
NO_STEP: dict[str, tuple[str, Any, str]] = {
    "attention in prefill": ("prefill_attention_backend_str", "torch_native", "the attention backend is torch_native"),
    "attention in decode": ("decode_attention_backend_str", "torch_native", "the attention backend is torch_native"),
    "wrapped attention": ("attn_backend", SimpleNamespace(), "the attention backend is wrapped in SimpleNamespace"),
    "KV dtype": ("KV_POOL.store_dtype", torch.uint8, "the KV pool is a POOL of "),
    "KV layout": ("KV_POOL.kv_cache_layout", "hnd", "the KV pool is a POOL of "),
    "rotary": ("ATTENTION.rotary_emb.is_neox_style", False, "the rotary embedding is ROTARY"),
    "rotary module": (  # as SGLang's embeddings for "longrope" and FoPE, which are not RotaryEmbedding's subclasses
        "ATTENTION.rotary_emb",
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
        "the last layer's router",
        torch.zeros(3, 5),
        "layers[LAST].routed.gate has ",
    ),
}
NO_DEEPSEEK_STEP: dict[str, tuple[str, Any, str]] = {
    "KV layout": ("KV_POOL.use_dsa", True, "the KV pool is a POOL of "),
    "rotary": ("ATTENTION.rotary_emb.is_neox_style", True, "the rotary embedding is ROTARY"),
}


@pytest.mark.once_a_family
@pytest.mark.parametrize("name", NO_STEP)
def test_a_model_that_the_step_does_not_fit_is_left_to_sglang(
    served: Engine, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = served.scheduler.tp_worker.model_runner
    path, value, reason = (NO_STEP | NO_DEEPSEEK_STEP if "kv_lora_rank" in served.config else NO_STEP)[name]
    if name == "shape of a weight":
        path = f"model.model.{router(served)}.data"
    layers, pool = runner.model.model.layers, attending_pool(runner.token_to_kv_pool)
    words = {
        "POOL": type(pool).__name__,
        "ROTARY": type(attention_of(runner.model.model).rotary_emb).__name__,
        "LAST": str(len(layers) - 1),
    }
    last = f"model.model.layers[{len(layers) - 1}]"
    path = path.replace("ATTENTION", f"{last}.self_attn" if hasattr(layers[-1], "self_attn") else last)
    path = path.replace("KV_POOL", "token_to_kv_pool" + ("" if pool is runner.token_to_kv_pool else ".full_kv_pool"))
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


@pytest.mark.once_a_family
def test_a_rotary_embedding_with_a_forward_of_its_own_is_left_to_sglang(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.rotary_embedding.bailing_mrope import BailingMRotaryEmbedding

    runner = served.scheduler.tp_worker.model_runner
    try:
        with monkeypatch.context() as patch:
            patch.setattr(attention_of(runner.model.model).rotary_emb, "__class__", BailingMRotaryEmbedding)
            native_step._build(None, runner)
            assert native_step.state() == "the rotary embedding is BailingMRotaryEmbedding"
    finally:
        native_step._build(None, runner)
    assert native_step.state() == STEP_RUNNING


@pytest.mark.once_a_family
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


@pytest.mark.once_a_family
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


@pytest.mark.once_a_family
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
        patch.setitem(get_parallel()._overrides, "pp_size", 2)
        assert why_not(served.config) == "the model's layers are split over several ranks"
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


@pytest.mark.slow
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
