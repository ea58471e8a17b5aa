from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_runtime.errors import AdapterError, ConflictError, InvalidValueError, NotFoundError
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training import checkpoint


def train(lab: Any, session: Any, make_batch: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(lab.forward_backward(session, make_batch(20, 9, seed=step)).loss)
        lab.step(session, weight_decay=0.1)
    return losses


def save(lab: Any, session: Any, path: Path, **options: Any) -> str:
    snapshot = run_at_once(checkpoint.snapshot(session, optimizer=options.pop("optimizer", True)))
    return checkpoint.write(path, snapshot, lab.twin.family, lab.host, replace=options.pop("replace", False))


def load(lab: Any, session: Any, path: Path) -> None:
    run_at_once(checkpoint.restore(session, checkpoint.read(path, session, lab.twin.family, lab.host)))


RSLORA_ALPHA = 16.0 * 6**0.5  # scaling 16 / sqrt(6) at rank 6, as a client folds it


@pytest.mark.parametrize(
    ("targets", "settings"),
    [
        pytest.param(["all"], {}, marks=pytest.mark.slow),
        pytest.param(["attention"], {"dropout": 0.2}, marks=pytest.mark.slow),
        (["attention", "mlp", "shared"], {"dropout": 0.3, "rank": 6, "alpha": RSLORA_ALPHA}),
        (["down_proj"], {"alpha": 0.1}),
    ],
    ids=["all", "dropout", "dropout and rsLoRA", "part of a fused group"],
)
def test_training_continues_bit_for_bit_after_save_and_load(
    deepseek_lab: Any, make_lab: Any, make_batch: Any, tmp_path: Path, targets: list[str], settings: dict[str, Any]
) -> None:
    """Masters, moments, counters and the next losses, in another process's session with other first values."""
    session = deepseek_lab.session(targets, **settings)
    train(deepseek_lab, session, make_batch, range(3))
    save(deepseek_lab, session, tmp_path / "saved")
    other = make_lab()
    restored = other.session(targets, fill=False, **settings)
    load(other, restored, tmp_path / "saved")
    assert (restored.step, restored.num_calls) == (3, 3)
    assert_same(session.parameters, restored.parameters)
    assert_same(session.optimizer.tensors(), restored.optimizer.tensors())

    expected = train(deepseek_lab, session, make_batch, range(3, 6))
    assert train(other, restored, make_batch, range(3, 6)) == expected
    assert_same(session.parameters, restored.parameters)
    assert_same(session.optimizer.tensors(), restored.optimizer.tensors())


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_snapshot_does_not_change_with_the_session(deepseek_lab: Any, make_batch: Any, tmp_path: Path) -> None:
    session = deepseek_lab.session(["attention"])
    train(deepseek_lab, session, make_batch, range(1))
    snapshot = run_at_once(checkpoint.snapshot(session, optimizer=True))
    before = checkpoint.write(tmp_path / "a", snapshot, deepseek_lab.twin.family, deepseek_lab.host, replace=False)
    train(deepseek_lab, session, make_batch, range(1, 2))
    after = checkpoint.write(tmp_path / "b", snapshot, deepseek_lab.twin.family, deepseek_lab.host, replace=False)
    assert before == after
    assert (tmp_path / "a" / checkpoint.OPTIMIZER_FILE).read_bytes() == (
        tmp_path / "b" / checkpoint.OPTIMIZER_FILE
    ).read_bytes()


def test_without_the_optimizer_training_starts_its_moments_anew(
    deepseek_lab: Any, make_batch: Any, tmp_path: Path
) -> None:
    session = deepseek_lab.session(["attention"])
    train(deepseek_lab, session, make_batch, range(2))
    save(deepseek_lab, session, tmp_path / "saved", optimizer=False)
    assert not (tmp_path / "saved" / checkpoint.OPTIMIZER_FILE).exists()
    load(deepseek_lab, session, tmp_path / "saved")
    assert session.step == 2
    assert not session.optimizer.tensors()


def test_an_existing_directory_is_kept_unless_it_is_to_be_replaced(deepseek_lab: Any, tmp_path: Path) -> None:
    session = deepseek_lab.session(["attention"])
    first = save(deepseek_lab, session, tmp_path / "saved")
    with torch.no_grad():
        next(iter(session.parameters.values())).add_(1)
    with pytest.raises(ConflictError, match="exists"):
        save(deepseek_lab, session, tmp_path / "saved")
    second = save(deepseek_lab, session, tmp_path / "saved", replace=True)
    assert first != second
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.fixture
def saved(deepseek_lab: Any, make_batch: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A trained session and where it was saved."""
    session = deepseek_lab.session(["attention"])
    train(deepseek_lab, session, make_batch, range(1))
    save(deepseek_lab, session, tmp_path / "saved")
    return session, tmp_path / "saved"


def damage_optimizer(path: Path, change: Any) -> None:
    tensors = load_file(path / checkpoint.OPTIMIZER_FILE)
    change(tensors)
    save_file(tensors, path / checkpoint.OPTIMIZER_FILE)


NAME = "model.layers.1.self_attn.o_proj.lora_A"
DAMAGES = {
    "a truncated optimizer": lambda path: (path / checkpoint.OPTIMIZER_FILE).write_bytes(
        (path / checkpoint.OPTIMIZER_FILE).read_bytes()[:-7]
    ),
    "no optimizer although announced": lambda path: (path / checkpoint.OPTIMIZER_FILE).unlink(),
    "an unknown key": lambda path: damage_optimizer(path, lambda all_: all_.update({"x.first": torch.zeros(3)})),
    "a missing key": lambda path: damage_optimizer(path, lambda all_: all_.pop(f"{NAME}.second")),
    "another shape": lambda path: damage_optimizer(path, lambda all_: all_.update({f"{NAME}.first": torch.zeros(3)})),
    "a NaN": lambda path: damage_optimizer(path, lambda all_: all_[f"{NAME}.first"].fill_(float("nan"))),
    "a session.json that is none": lambda path: (path / checkpoint.SESSION_FILE).write_text("[]"),
    "another format": lambda path: (path / checkpoint.SESSION_FILE).write_text(
        json.dumps(json.loads((path / checkpoint.SESSION_FILE).read_text()) | {"format": 2})
    ),
    "truncated masters": lambda path: (path / "adapter_model.safetensors").write_bytes(b"\0" * 100),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_directory_is_refused_and_changes_nothing(deepseek_lab: Any, saved: Any, damage: Any) -> None:
    session, path = saved
    with torch.no_grad():
        for value in session.parameters.values():
            value.add_(0.5)
    before = {name: value.detach().clone() for name, value in session.parameters.items()}
    moments = {name: value.clone() for name, value in session.optimizer.tensors().items()}
    damage(path)
    with pytest.raises(AdapterError, match=str(path)):
        load(deepseek_lab, session, path)
    assert all(torch.equal(before[name], value) for name, value in session.parameters.items())
    assert all(torch.equal(moments[name], value) for name, value in session.optimizer.tensors().items())


def test_a_directory_of_another_rank_or_other_modules_is_refused(deepseek_lab: Any, saved: Any) -> None:
    _, path = saved
    with pytest.raises(ConflictError, match=r"rank 4.*rank 8"):
        load(deepseek_lab, deepseek_lab.session(["attention"], rank=8), path)
    with pytest.raises(ConflictError, match="does not train"):
        load(deepseek_lab, deepseek_lab.session(["o_proj"]), path)
    with pytest.raises(ConflictError, match="no tensors for"):
        load(deepseek_lab, deepseek_lab.session(["all"]), path)


def test_a_plain_peft_directory_sets_the_masters_and_starts_at_step_0(deepseek_lab: Any, saved: Any) -> None:
    session, path = saved
    for name in (checkpoint.SESSION_FILE, checkpoint.OPTIMIZER_FILE):
        (path / name).unlink()
    expected = {name: value.detach().clone() for name, value in session.parameters.items()}
    other = deepseek_lab.session(["attention"], seed=77)
    load(deepseek_lab, other, path)
    assert all(torch.equal(expected[name], value) for name, value in other.parameters.items())
    assert other.step == 0


def test_another_scaling_is_folded_into_b(deepseek_lab: Any, saved: Any, batch: Any) -> None:
    session, path = saved
    (path / checkpoint.SESSION_FILE).unlink()
    other = deepseek_lab.session(["attention"], alpha=4.0)
    load(deepseek_lab, other, path)
    expected = deepseek_lab.forward(session, batch).loss
    assert deepseek_lab.forward(other, batch).loss == expected


def test_what_is_not_there_is_said_so(deepseek_lab: Any, saved: Any) -> None:
    session, path = saved
    shutil.rmtree(path)
    with pytest.raises(NotFoundError, match="saved"):
        load(deepseek_lab, session, path)


@pytest.mark.parametrize("path", ["relative/path", "", "/tmp/../etc", "/tmp/a\0b"])
def test_only_plain_absolute_paths_are_taken(path: str) -> None:
    with pytest.raises(InvalidValueError, match="absolute"):
        checkpoint.checked_path(path)


def test_what_save_wrote_may_be_replaced(deepseek_lab: Any, make_batch: Any, tmp_path: Path) -> None:
    session, path = deepseek_lab.session(["attention"]), tmp_path / "saved"
    path.mkdir()
    save(deepseek_lab, session, path, replace=True)  # an empty directory: nothing is lost
    train(deepseek_lab, session, make_batch, range(1))
    save(deepseek_lab, session, path, replace=True)
    assert json.loads((path / "session.json").read_text())["step"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def _with_diary(path: Path) -> None:
    (path / "diary.txt").write_text("precious")


def _with_directory(path: Path) -> None:
    (path / "checkpoints" / "1").mkdir(parents=True)


def _with_link(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()
    (path / "optimizer.safetensors").symlink_to(path / "session.json")


def _made_by_peft(path: Path) -> None:
    (path / "session.json").unlink()


def _of_another_program(path: Path) -> None:
    (path / "session.json").write_text('{"cookies": []}')


@pytest.mark.parametrize(
    "change",
    [_with_diary, _with_directory, _with_link, _made_by_peft, _of_another_program],
    ids=lambda made: made.__name__,
)
def test_anything_else_is_left_as_it_is(deepseek_lab: Any, tmp_path: Path, change: Any) -> None:
    session, path = deepseek_lab.session(["attention"]), tmp_path / "saved"
    save(deepseek_lab, session, path)
    change(path)
    before = {entry: entry.lstat().st_mtime_ns for entry in path.rglob("*")}
    with pytest.raises(ConflictError, match="not replaced"):
        checkpoint.check_target(path, replace=True)
    with pytest.raises(ConflictError, match="not replaced"):
        save(deepseek_lab, session, path, replace=True)
    assert {entry: entry.lstat().st_mtime_ns for entry in path.rglob("*")} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_directory_behind_a_link_is_not_replaced(deepseek_lab: Any, tmp_path: Path) -> None:
    session = deepseek_lab.session(["attention"])
    save(deepseek_lab, session, tmp_path / "saved")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    with pytest.raises(ConflictError, match="not a directory"):
        save(deepseek_lab, session, tmp_path / "link", replace=True)


@pytest.mark.parametrize("below", ["/proc/kt/saved", "/sys/kt", "FILE/saved", "PLACE/" + "n" * 256])
def test_a_place_where_nothing_can_be_written_is_the_user_s_error(
    deepseek_lab: Any, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").touch()
    path = below.replace("FILE", str(tmp_path / "file")).replace("PLACE", str(tmp_path))
    with pytest.raises(InvalidValueError, match="can't be written"):
        save(deepseek_lab, deepseek_lab.session(["attention"]), Path(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("kind", "value"), [("second", -1.0), ("steps", 0.0), ("steps", -3.0), ("steps", 1e30)])
def test_moments_that_no_step_leaves_are_refused(
    deepseek_lab: Any, make_batch: Any, tmp_path: Path, kind: str, value: float
) -> None:
    session, path = deepseek_lab.session(["attention"]), tmp_path / "saved"
    train(deepseek_lab, session, make_batch, range(1))
    save(deepseek_lab, session, path)
    tensors = load_file(path / checkpoint.OPTIMIZER_FILE)
    name = next(name for name in tensors if name.endswith(kind))
    tensors[name].reshape(-1)[0] = value
    save_file(tensors, path / checkpoint.OPTIMIZER_FILE)
    with pytest.raises(AdapterError, match=kind):
        load(deepseek_lab, session, path)
