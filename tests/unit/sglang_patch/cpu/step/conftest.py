"""SGLang's own scheduler with a tiny model, and its native step compared with SGLang's modules.

What the step computes is compared in every case. What does not depend on dtype, instruction set or format of the
experts is tested once a family. What depends on both, but on each alone, is tested in every family and on every
instruction set, not on all sets in each family. With `TEST_CASES=all` every test runs in every case, with `few` in two
of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from reference.cases import choose
from reference.instruction_sets import instruction_sets
from reference.resident.native_step import CASES, SINGLE_CASES, Both
from reference.resident.one_at_a_time import OneAtATime
from reference.resident.scheduler import Engine, engine

from kt_runtime.experts import dense
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.wire.replies import STEP_RUNNING

HERE = Path(__file__).parent
EVERY_CASE = CASES | SINGLE_CASES
Engines = OneAtATime[str, tuple[Engine, Path]]
"""With their models' directories."""
FEW = {"float32", "DeepSeek-V2, bfloat16"}
ONE_A_FAMILY = FEW | {"DeepSeek-V3, float32", "Qwen3.5, float32"}


def one_set_a_family() -> set[str]:
    """The cases without an instruction set, and one of those that differ in it alone: another set in each family."""
    with_set = {name: name.removesuffix(f", {store['isa']}") for name, (*_, store) in CASES.items() if "isa" in store}
    sets = instruction_sets()
    families = enumerate(dict.fromkeys(with_set.values()))
    return (CASES.keys() - with_set.keys()) | {f"{family}, {sets[place % len(sets)]}" for place, family in families}


ONE_SET_A_FAMILY = one_set_a_family()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "once_a_family: of the cases of `served`, one a family is enough")
    config.addinivalue_line("markers", "one_set_a_family: each instruction set is met, but not in each family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = {item for item in items if _is_left_out(item)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def _is_left_out(item: pytest.Item) -> bool:
    case = getattr(item, "callspec", None)
    if case is None or case.params.get("served") not in CASES or not item.path.is_relative_to(HERE):
        return False
    usual = set(CASES)
    if item.get_closest_marker("once_a_family") is not None:
        usual = ONE_A_FAMILY
    elif item.get_closest_marker("one_set_a_family") is not None:
        usual = ONE_SET_A_FAMILY
    return case.params["served"] not in choose(few=FEW, usual=usual, every=set(CASES))


def without_instruction_set(name: str) -> str:
    """What the cases that differ in the instruction set alone have in common."""
    *_, store = EVERY_CASE[name]
    return name.removesuffix(f", {store.get('isa')}")


@contextmanager
def started(name: str, directory: Path) -> Iterator[tuple[Engine, Path]]:
    """SGLang's own scheduler in this process, with a tiny model; prefills and decodes may share a batch."""
    preset, changes, dtype, store = EVERY_CASE[name]
    make_model(msgspec.structs.replace(preset, config=preset.config | changes), directory, seed=3)
    with engine(directory, "--dtype", dtype, "--enable-mixed-chunk", **store) as running:
        running.new_tokens = 4  # one from the prompt's batch, three from decodes
        yield running, directory


@pytest.fixture(scope="module")
def engines(patched_sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    first = {without_instruction_set(name): name for name in reversed(EVERY_CASE)}
    with closing(Engines(lambda case: started(first[case], tmp_path_factory.mktemp("model") / "tiny"))) as made:
        yield made


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    """Cases that differ in the instruction set alone follow one another and share a scheduler, which loads its experts
    again: that sets the instruction set of all that the CPU computes (`open_store`)."""
    running, model = engines.of(without_instruction_set(request.param))
    *_, store = EVERY_CASE[request.param]
    if store.get("isa") not in (None, expert_store().isa):
        running.load_experts(model, **store)
    assert dense._native is not None and dense._native.isa == expert_store().isa
    assert store.get("isa") in (None, expert_store().isa)
    return running


@pytest.fixture
def both(served: Engine, monkeypatch: pytest.MonkeyPatch) -> Both:
    served.clear()
    assert native_step.state() == STEP_RUNNING
    program = native_step._program
    assert program is not None
    checked = Both(served.scheduler.tp_worker.model_runner, program)
    monkeypatch.setattr(native_step, "_program", checked)
    return checked
