"""Only the pinned SGLang is accepted."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.sglang_patch import version


def test_the_installed_version_is_the_pinned_one() -> None:
    version.check_version()


@pytest.mark.parametrize("found", ["0.5.22", "0.5.23.post1", "0.6.0"])
def test_another_version_is_refused_with_both_named(found: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        version.check_version(found)
    assert found in str(caught.value)
    assert version.PINNED in str(caught.value)


def test_a_missing_sglang_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise version.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    with pytest.raises(NotFoundError, match="not installed"):
        version.check_version()


def test_the_package_depends_on_the_pinned_version() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f"sglang=={version.PINNED}" in tomllib.loads(text)["project"]["dependencies"]
