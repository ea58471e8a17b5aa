from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kt_runtime.adapters import check_adapter_name, confined
from kt_runtime.errors import InvalidValueError


@pytest.mark.parametrize("name", ["a", "sailor-2.1_final", "A" * 128, "0"])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert check_adapter_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-x", "a/b", "a:b", "a b", "a\n", "a\0", "A" * 129, "аdapter", "../x", "%2e%2e/x", "a\\b"]
)
def test_names_that_files_urls_or_requests_could_misread_are_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match=r"adapter name .*expected 1 to 128"):
        check_adapter_name(name)


@pytest.mark.parametrize("path", ["a", "a/b", "./a", "a/../b", "%2e%2e/a"])
def test_paths_below_the_root_are_accepted(tmp_path: Path, path: str) -> None:
    assert tmp_path in confined(path, tmp_path).parents
    assert confined(tmp_path / "x", tmp_path) == tmp_path / "x"


@pytest.mark.parametrize("path", ["", ".", "..", "../x", "a/../../x", "/etc", "/", "a\0b", "a/" * 3000])
def test_paths_outside_of_the_root_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidValueError, match="path "):
        confined(path, tmp_path)


def test_a_link_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-of-somebody-else"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(InvalidValueError, match="is not below"):
        confined("link/adapter", root)
    with pytest.raises(InvalidValueError, match="is not below"):
        confined(outside, root)


def test_names_and_paths_are_checked_without_torch() -> None:
    code = (
        "import sys; from kt_runtime.adapters import check_adapter_name, confined;"
        "check_adapter_name('a'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
