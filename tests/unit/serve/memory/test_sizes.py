from __future__ import annotations

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.memory.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("100B", 100),
        ("512MiB", 512 << 20),
        ("20G", 20 << 30),
        ("1.5 TiB", 3 << 39),
        ("12gib", 12 << 30),
        (" 7k ", 7 << 10),
    ],
)
def test_sizes_are_bytes_or_binary_units(text: str, size: int) -> None:
    assert parse_size(text, "--cache-host") == size


def test_large_sizes_are_exact() -> None:
    assert parse_size("9007199254740993", "--cache-disk") == 2**53 + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20GB", r"--cache-host '20GB': unknown unit 'GB'; did you mean 'GiB'\? known: B, G, GiB"),
        ("much", "--cache-host 'much': is no size; allowed are numbers with a unit, as 512MiB, 20G or 0"),
        ("-3", "'-3': is no size"),
        ("", "'': is no size"),
        ("1e9", "unknown unit 'e'|is no size"),
        ("nan", "is no size"),
    ],
)
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        parse_size(text, "--cache-host")
