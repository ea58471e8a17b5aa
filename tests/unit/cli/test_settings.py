from __future__ import annotations

import json
from typing import Any

import pytest

from kt_runtime.cli import settings as command
from kt_runtime.cli.main import main
from kt_runtime.errors import InvalidValueError, UnknownNameError

SETTINGS: dict[str, Any] = {
    "tpot_target_ms": 40.0,
    "ttft_target_ms": None,
    "train_share": 0.5,
    "schedule": "slices",
    "weights": {"night": 2.0},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server is asked, which answers with `SETTINGS`."""
    sent: list[Any] = []

    def request(_api: Any, method: str, path: str, body: Any = None) -> Any:
        sent.append((method, path, body))
        return SETTINGS

    monkeypatch.setattr("kt_runtime.cli.connection.ServerAPI._request", request)
    return sent


def test_settings_are_shown(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    assert asked == [("GET", "/kt/settings", None)]
    for text in ("tpot_target_ms", "40", "ttft_target_ms", "none", "weight.night"):
        assert text in shown
    assert main(["settings", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SETTINGS


def test_what_is_named_is_changed(asked: list[Any]) -> None:
    arguments = ["tpot_target_ms=40", "ttft_target_ms=none", "schedule=slices", "weight.night=2", "weight.a.b=0.5"]
    assert main(["settings", *arguments]) == 0
    changes = {"tpot_target_ms": 40.0, "ttft_target_ms": None, "schedule": "slices"}
    assert asked == [("PATCH", "/kt/settings", changes | {"weights": {"night": 2.0, "a.b": 0.5}})]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("tpot_target_ms", "expected KEY=VALUE"),
        ("tpot_target_ms=fast", "tpot_target_ms 'fast': expected a number"),
        ("tpot_target_ms=nan", "tpot_target_ms nan"),
        ("train_share=2", "train_share 2: must be above 0"),
        ("schedule=often", "allowed are slices, whole_calls"),
        ("weight.a=0", "weight of session 'a' 0"),
        ("tpot_targt_ms=40", "tpot_target_ms"),
        ("weight.=2", "weight.SESSION"),
        ("weights=2", "weight.SESSION"),
    ],
)
def test_a_mistake_is_named_before_the_server_is_asked(
    argument: str, message: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", argument]) == 2
    assert message in capsys.readouterr().err and not asked


def test_a_setting_is_given_once() -> None:
    with pytest.raises(InvalidValueError, match="train_share: given twice"):
        command.parsed(["train_share=0.5", "train_share=0.4"])
    with pytest.raises(InvalidValueError, match=r"weight\.a: given twice"):
        command.parsed(["weight.a=2", "weight.a=3"])
    with pytest.raises(UnknownNameError):
        command.parsed(["weights=2"])
