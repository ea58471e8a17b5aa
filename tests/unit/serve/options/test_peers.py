from __future__ import annotations

import pytest

from kt_runtime.cli.serve import command
from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.options.peers import ALIASES, nearest_options, sorted_arguments

OWN = {"--model": True, "--port": True, "--cache-read-only": False, "--lora-slots": True, "--context-tokens": True}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "m", "--port", "3"], ["--model", "m", "--port", "3"]),
        (["--log-level", "error", "--port", "3"], ["--port", "3", "--", "--log-level", "error"]),
        (["--port=3", "--sleep-on-idle", "--model", "m"], ["--port=3", "--model", "m", "--", "--sleep-on-idle"]),
        (["--lora-paths", "a=b", "c=d", "--port", "3"], ["--port", "3", "--", "--lora-paths", "a=b", "c=d"]),
        (["--watchdog-timeout", "-1", "--port", "3"], ["--port", "3", "--", "--watchdog-timeout", "-1"]),
        (["--cache-read-only", "m"], ["--cache-read-only", "--model", "m"]),
        (["m", "--port", "-1"], ["--model", "m", "--port", "-1"]),
        (["--max-loras-per-batch", "4", "--context_length=9"], ["--lora-slots", "4", "--context-tokens=9"]),
        (["--port", "3", "--", "--port", "4"], ["--port", "3", "--", "--port", "4"]),
        (["--port"], ["--port"]),
    ],
)
def test_own_options_come_first_and_the_rest_keeps_its_order(arguments: list[str], expected: list[str]) -> None:
    assert sorted_arguments(arguments, OWN) == expected


def test_a_word_that_belongs_to_nothing_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="'stray': belongs to no option"):
        sorted_arguments(["--model", "m", "stray"], OWN)


def test_every_alias_means_an_option_that_serve_has() -> None:
    own = {name for parameter in command.params for name in parameter.opts}
    assert set(ALIASES.values()) <= own and not set(ALIASES) & own


def test_nearest_options_are_those_spelt_alike() -> None:
    assert nearest_options("--prot", ["--port", "--host", "--model"])[0] == "--port"
    assert nearest_options("--zzzzzz", ["--port"]) == []


def test_every_own_option_is_one_of_the_commands() -> None:
    from kt_runtime.serve.options.named import own_option_names

    assert set(own_option_names()) <= {name for parameter in command.params for name in parameter.opts}
