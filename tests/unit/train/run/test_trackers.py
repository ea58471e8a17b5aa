"""Trackers get Hugging Face's names, and nothing leaves the machine unasked."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.run import trackers

VALUES = {"loss": 2.0, "eval_loss": 3.0}
NAMED = {"train/loss": 2.0, "eval/loss": 3.0}


def test_tensorboard_files_hold_the_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [tracker] = trackers.open_trackers(("tensorboard",), tmp_path, "run", {"lora_rank": 8})
    tracker.log(3, VALUES)
    tracker.close()
    [resumed] = trackers.open_trackers(("tensorboard",), tmp_path, "run", {}, first_step=2)  # as if it had died at 3
    resumed.log(3, VALUES)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "runs" / "run"))
    events.Reload()
    assert {name: [(e.step, e.value) for e in events.Scalars(name)] for name in NAMED} == {
        name: [(3, value)] for name, value in NAMED.items()
    }


class Recorder(ModuleType):
    """A package that notes what is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, arguments, keywords))
            return self

        return call


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_other_trackers_are_offline_and_get_the_same_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Recorder(name)
    monkeypatch.setitem(sys.modules, name, package)
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "SWANLAB_MODE", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    [tracker] = trackers.open_trackers((name,), tmp_path, "run", {"lora_rank": 8})
    tracker.log(3, VALUES)
    tracker.close()
    asked = {call: (arguments, keywords) for call, arguments, keywords in package.calls}
    logged = asked.get("log") or asked["log_metrics"]
    assert logged == ((NAMED,), {"step": 3})
    if name in ("wandb", "swanlab"):
        assert asked["init"][1]["mode"] == "offline"
    if name == "mlflow":
        assert asked["set_tracking_uri"][0][0].startswith("file://")


def test_mlflow_gets_no_more_parameters_at_once_than_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", package)
    settings = {f"key{number}": number for number in range(230)}
    trackers.open_trackers(("mlflow",), tmp_path, "run", settings)
    sent = [arguments[0] for call, arguments, _ in package.calls if call == "log_params"]
    assert [len(part) for part in sent] == [100, 100, 30]
    assert {key: value for part in sent for key, value in part.items()} == {key: str(n) for key, n in settings.items()}


def test_wandb_does_what_its_user_has_set_up(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    assert trackers.wandb_is_configured({"NETRC": str(netrc)})
    assert trackers.wandb_is_configured({"WANDB_MODE": "online", "NETRC": ""})
    netrc.write_text("machine example.org login user password secret\n")
    assert not trackers.wandb_is_configured({"NETRC": str(netrc)})


def test_a_missing_package_is_named_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidValueError, match="pip install wandb"):
        trackers.check_trackers(("wandb",))
    with pytest.raises(UnknownNameError, match="did you mean 'wandb'"):
        trackers.check_trackers(("wandbb",))
