"""A run whose reference comes from the serving path: when it is asked, what is said, kept, resumed and refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.resident.counting_resident import CountingResident, Lines
from reference.server.fake_server import Answer, FakeServer, fake_server

from kt_runtime.errors import ConflictError, InvalidValueError, ServerUnreachableError
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.inputs import Inputs
from kt_runtime.train.run.loop import RunResult, run
from kt_runtime.train.serving_path import ServingPath

OFFSET = 0.25  # what this serving path is off the twin, for each token


def answer(_: str, body: Any, number: int) -> Answer:
    ids, start = body["input_ids"], body["logprob_start_len"]
    logprobs = [[None, ids[start], None], *([-0.1 * (each % 7 + 1) + OFFSET, each, None] for each in ids[start + 1 :])]
    meta = {"finish_reason": {"type": "length"}, "cached_tokens": start, "input_token_logprobs": logprobs}
    return 200, {"text": "", "meta_info": meta}


@pytest.fixture
def pairs() -> list[Pair]:
    """Six, over as many prompts of three tokens; no two answers are alike."""
    generator = np.random.default_rng(7)

    def example() -> Example:
        return Example.of(generator.integers(3, 90, 8), [False] * 3 + [True] * 5)

    return [Pair(example(), example()) for _ in range(6)]


@pytest.fixture
def start(
    resident: CountingResident, make_recipe: Callable[..., Recipe], pairs: list[Pair], display: Any
) -> Callable[..., tuple[RunResult, FakeServer]]:
    """`start(**keys of the recipe)` runs with the pairs, the last two of which are held out."""
    served: list[Path | None] = []

    def started(answers: Any = answer, **keys: Any) -> tuple[RunResult, FakeServer]:
        recipe = make_recipe(**{"stage": "dpo", "ref_logprobs": "serving", "do_eval": True, "save_steps": 4, **keys})
        with fake_server(answers) as fake:

            @contextlib.contextmanager
            def serving(adapter: Path | None) -> Iterator[ServingPath]:
                served.append(adapter)
                yield ServingPath(fake.url, None, "elder" if adapter else None, 3, (0.01,))
                served.append(None)

            inputs = Inputs(list(pairs[:4]), {"": list(pairs[4:])})
            return run(resident, recipe, inputs, display, serving=serving), fake

    started.served = served  # type: ignore[attr-defined]
    return started


def sent(resident: CountingResident, what: str) -> list[Any]:
    return [entry for entry in resident.log if entry[0] == what]


def test_every_pair_is_asked_for_before_the_first_step_and_none_on_the_twin_again(
    start: Any, resident: CountingResident, display: Lines, pairs: list[Pair]
) -> None:
    _, fake = start()
    assert len(fake.requests) == 12
    before = resident.log.index(sent(resident, "forward_backward")[0])
    assert [entry[3] for entry in resident.log[:before] if entry[0] == "forward"].count("reference") == 6
    assert all(entry[3] != "reference" for entry in resident.log[before:] if entry[0] == "forward")
    expected = {}
    for pair in pairs:
        for each in pair.examples:
            logprobs = -(each.targets[each.trained] % 7 + 1) * 0.1 + OFFSET
            expected[each.targets.tobytes()] = float(logprobs.sum())
    for _, batch, _, reference, _ in sent(resident, "forward_backward"):
        wanted = [expected[targets.tobytes()] for targets in batch.split(batch.targets)]
        assert reference == pytest.approx(wanted, abs=4e-7)  # 4.8e-8 measured
    assert "12 answers asked for" in display and "reference from the serving path in" in display
    assert (
        "on the first 6 pairs, serving path against twin: a token's log-probability differs by at most 2.5" in display
    )
    assert "in the mean by 2.50e-01; an answer's sum by at most" in display and "reference: scored 12/12" in display
    assert "reference: the base model, with adapters off; log-probabilities from the serving path" in display


def test_the_reference_that_is_served_is_the_recipes(start: Any, tmp_path: Path) -> None:
    for keys in ({"adapter_name_or_path": tmp_path / "a"}, {"ref_model_adapters": tmp_path / "b"}):
        _, fake = start(overwrite_output_dir=True, **keys)
        assert {body["lora_path"] for _, body in fake.requests} == {"elder"}
    assert start.served == [tmp_path / "a", None, tmp_path / "b", None]


def test_steps_that_are_not_taken_ask_for_nothing(start: Any) -> None:
    _, fake = start(max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    assert len(fake.requests) == 2 * (1 + 2)  # one pair to train on, two to evaluate


def by_pair(reference: Any) -> list[tuple[float, float]]:
    return [(float(chosen), float(rejected)) for chosen, rejected in reference.reshape(-1, 2)]


def test_a_resumed_run_asks_for_nothing_and_continues_with_the_same_values(
    start: Any, resident: CountingResident
) -> None:
    start(num_train_epochs=2.0)
    before = [pair for _, _, _, reference, _ in sent(resident, "forward_backward") for pair in by_pair(reference)]
    resident.log.clear()

    def unreachable(*_: Any) -> Answer:
        raise AssertionError("asked")

    _, fake = start(unreachable, num_train_epochs=4.0)
    assert fake.requests == [] and start.served == [None, None]
    resumed = [pair for _, _, _, reference, _ in sent(resident, "forward_backward") for pair in by_pair(reference)]
    assert set(resumed) <= set(before)
    with pytest.raises(ConflictError, match="ref_logprobs: was 'serving', is 'twin'"):
        start(num_train_epochs=6.0, ref_logprobs="twin")


def test_ctrl_c_ends_the_pass_and_leaves_nothing_behind(
    start: Any, resident: CountingResident, interrupt: Callable[[], None]
) -> None:
    is_over = threading.Event()

    def stopping(path: str, body: Any, number: int) -> Answer:
        if number == 4:
            interrupt()
        if number >= 4:
            is_over.wait(60)
        return answer(path, body, number)

    result, fake = start(stopping)
    is_over.set()
    assert result.interrupted and result.checkpoint is None and result.steps == 0
    assert len(fake.requests) < 12 and sent(resident, "forward_backward") == [] and resident.sessions == {}


def test_a_server_that_fails_ends_the_run_before_its_first_step(start: Any, resident: CountingResident) -> None:
    with pytest.raises(ServerUnreachableError, match="in 2 tries: HTTP 503"):
        start(lambda *_: (503, {}))
    assert sent(resident, "forward_backward") == [] and resident.sessions == {}


def test_a_run_without_a_server_to_ask_is_refused(
    resident: CountingResident, make_recipe: Callable[..., Recipe], pairs: list[Pair], display: Any
) -> None:
    recipe = make_recipe(stage="dpo", ref_logprobs="serving")
    with pytest.raises(InvalidValueError, match="ref_logprobs: serving: this run has no HTTP server to ask; set twin"):
        run(resident, recipe, Inputs(list(pairs), {}), display)
    assert resident.sessions == {}
