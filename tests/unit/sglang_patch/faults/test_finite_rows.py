"""A request whose numbers are not finite ends and says why; what its neighbours get does not change by a bit.

SGLang's own scheduler, in this process, with adapters whose weights are finite and huge. Neighbours are compared with
those of a harmless request of the same length: the size of a batch alone may change the last bit of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import lora
from reference.resident.scheduler import Engine

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.errors import NumericsError
from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.faults.finite_rows import Notes, bad_rows
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_adapter

HUGE = 3e38
NEIGHBOURS = {"a": [11, 12, 13, 14, 15], "b": [21] * 20, "c": [31 + step for step in range(100)]}
PROMPT = [41 + step for step in range(20)]
PARTS = {
    "everything": (),
    "attention": ("attention",),
    "keys and values": ("kv_b_proj", "kv_a_proj_with_mqa"),
    "dense and shared experts": ("mlp", "shared"),
    "routed experts": ("experts",),
    "the last projection of experts": ("down_proj",),
}


def poison(adapter: AdapterTensors) -> AdapterTensors:
    modules = {
        name: LoraPair(torch.full_like(pair.a, HUGE), torch.full_like(pair.b, HUGE))
        for name, pair in adapter.modules.items()
    }
    return AdapterTensors.from_modules(adapter.rank, adapter.alpha, modules)


@pytest.fixture(scope="module", params=list(PARTS.values()), ids=list(PARTS))
def adapters(request: pytest.FixtureRequest, shared: Engine) -> Iterator[None]:
    """The adapter "bad", which makes some part of the model overflow, and the harmless "good"."""
    manager = shared.scheduler.tp_worker.model_runner.lora_manager
    good = lora.random_adapter(shared.config, rank=4, alpha=4.0, seed=1, only=request.param)
    install_adapter(manager, shared.config, "good", "good", "content of good", good)
    install_adapter(manager, shared.config, "bad", "bad", "content of bad", poison(good))
    yield
    shared.clear()
    for lora_id in ("good", "bad"):
        drop_adapter(manager, lora_id)


@pytest.fixture
def poisoned(scheduled: Engine, adapters: None) -> Engine:
    return scheduled


def neighbours(engine: Engine, *more: Any) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    engine.run(*(engine.request(rid, prompt) for rid, prompt in NEIGHBOURS.items()), *more)
    return {rid: engine.tokens[rid] for rid in NEIGHBOURS}, {rid: engine.logprobs[rid] for rid in NEIGHBOURS}


def ended_as_not_finite(engine: Engine, rid: str) -> bool:
    reason = engine.ended[rid]
    return reason["status_code"] == 422 and "adapter 'bad' computed numbers that are not finite" in reason["message"]


@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
def test_the_request_ends_and_its_neighbours_bits_stay(poisoned: Engine, temperature: int) -> None:
    harmless = poisoned.request("good", PROMPT, lora_id="good", temperature=temperature, max_new_tokens=1)
    expected = neighbours(poisoned, harmless)
    poisoned.clear()
    before = poisoned.memory()
    bad = poisoned.request("bad", PROMPT, lora_id="bad", temperature=temperature)
    assert neighbours(poisoned, bad) == expected
    assert ended_as_not_finite(poisoned, "bad")
    assert poisoned.memory() == before


def test_none_of_its_pages_enters_the_cache(poisoned: Engine) -> None:
    for length in (20, 150):  # one prefill, and three chunks
        poisoned.clear()
        poisoned.run(poisoned.request("bad", [41 + step for step in range(length)], lora_id="bad"))
        assert ended_as_not_finite(poisoned, "bad")
        assert poisoned.cached_tokens() == 0


def test_a_harmless_adapter_beside_it_is_answered(poisoned: Engine) -> None:
    good = poisoned.request("good", PROMPT, lora_id="good")
    poisoned.run(good, poisoned.request("bad", PROMPT, lora_id="bad"))
    assert ended_as_not_finite(poisoned, "bad")
    with_bad = poisoned.tokens["good"], poisoned.logprobs["good"]
    poisoned.clear()
    beside = poisoned.request("beside", PROMPT, lora_id=None, max_new_tokens=1)
    poisoned.run(poisoned.request("good", PROMPT, lora_id="good"), beside)
    assert (poisoned.tokens["good"], poisoned.logprobs["good"]) == with_bad


@pytest.mark.slow
def test_two_hundred_of_them_leave_nothing_behind(poisoned: Engine) -> None:
    before = poisoned.memory()
    for number in range(200 // len(PARTS)):
        poisoned.run(poisoned.request(f"bad-{number}", PROMPT, lora_id="bad"))
    assert len(poisoned.ended) == 200 // len(PARTS)
    assert poisoned.memory() == before


def test_a_request_that_fails_while_it_decodes_keeps_the_tokens_before(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.sampler import Sampler

    original = Sampler.forward
    steps = []

    def overflow(sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(len(output.next_token_logits))
        if len(steps) == 8:  # the neighbours' prefills take fewer
            output.next_token_logits[-1] = torch.inf
        return original(sampler, output, info, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "forward", overflow)
        beside = neighbours(scheduled, scheduled.request("bad", PROMPT, max_new_tokens=12))
    assert steps[7] == 4
    assert "the model computed numbers that are not finite" in scheduled.ended["bad"]["message"]
    kept = scheduled.tokens["bad"]
    assert 0 < len(kept) < 12
    num_tokens = len(scheduled.tokens["bad"])
    scheduled.clear()
    harmless = scheduled.request("bad", PROMPT, max_new_tokens=num_tokens + 1)  # ends at the same step
    assert neighbours(scheduled, harmless) == beside
    assert scheduled.tokens["bad"][:num_tokens] == kept


def test_rows_belong_to_requests_in_the_batchs_order() -> None:
    notes = Notes([3, 1, 2], has_adapters=False)
    notes.note_rows(torch.tensor([False, False, True, False, False, False]))
    notes.note_requests(torch.tensor([False, False, True]))
    assert notes.requests() == [0, 2]


def test_large_finite_rows_are_none_of_those() -> None:
    assert bad_rows(torch.full((4, 64), HUGE)) is None
    assert bad_rows(torch.zeros(0, 8)) is None
    matrix = torch.zeros(3, 2, 4)
    matrix[1, 1, 3] = torch.nan
    bad = bad_rows(matrix)
    assert bad is not None and bad.tolist() == [False, True, False]


def test_outside_of_serving_the_experts_still_raise(scheduled: Engine) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    modules = scheduled.scheduler.tp_worker.model_runner.model.modules()
    layer = next(module for module in modules if hasattr(module, "experts_forward"))
    assert finite_rows.present() is None
    x = torch.zeros(2, scheduled.config["hidden_size"])
    x[1, 0] = torch.nan
    topk = StandardTopKOutput(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 8))
    with pytest.raises(NumericsError):
        layer.experts_forward(x, topk)
