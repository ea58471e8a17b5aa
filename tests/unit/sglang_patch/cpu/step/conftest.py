"""SGLang's own scheduler with a tiny model, and its native step compared with SGLang's modules."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from reference.native_step import CASES, SINGLE_CASES, Both
from reference.scheduler import Engine, engine

from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.wire.messages import STEP_RUNNING


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
        started.new_tokens = 4  # one from the prompt's batch, three from decodes
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
