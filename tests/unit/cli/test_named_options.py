"""Every option that a message, a help text or a docs page names exists, in kt-runtime or in SGLang."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from kt_runtime.cli.main import COMMANDS, LazyCommands, cli
from kt_runtime.serve.options.peers import ALIASES

ROOT = Path(__file__).resolve().parents[3]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
COMMAND = re.compile(r"`kt-runtime ([a-z]+)(?: ([a-z]+))?")
SOURCES = sorted(
    path for top in ("kt_runtime", "serve", "train", "sglang_patch") for path in (ROOT / top).rglob("*.py")
)
# Options of other programs that messages tell users to run, or say something about.
OTHERS = {
    "--outtype",  # llama.cpp's converters
    "--fuse-gate-up-exps",
    "--quick",  # the kernels' test program
    "--disable-shared-experts-fusion",
    "--help",
    "--version",
}


def commands(group: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            yield from commands(found, *path, name)


@pytest.fixture(scope="module")
def known() -> set[str]:
    from kt_runtime.sglang_patch.arguments import option_names

    ours = {
        option for _, command in commands(cli) for one in command.params for option in (*one.opts, *one.secondary_opts)
    }
    return ours | set(option_names()) | set(ALIASES) | OTHERS


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """String constants, docstrings and f-strings' parts; names that end in a hyphen are beginnings (`--kt-*`)."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def unknown_options(text: str, known: set[str]) -> list[str]:
    found = []
    for match in OPTION.finditer(text):
        following = text[match.end() : match.end() + 2]
        is_beginning = following[:1] in ("*", "{") or following == "-*" or following[:1] == "-"
        if match[0] not in known and not (is_beginning and any(name.startswith(match[0]) for name in known)):
            found.append(match[0])
    return found


@cache
def all_texts() -> list[tuple[str, str]]:
    """(file:line, text) of every source."""
    assert SOURCES
    return [(f"{path.relative_to(ROOT)}:{line}", text) for path in SOURCES for line, text in texts(path)]


@pytest.mark.slow
def test_options_that_the_code_names_exist(known: set[str]) -> None:
    wrong = [f"{where}: {name}" for where, text in all_texts() for name in unknown_options(text, known)]
    assert not wrong, "\n".join(wrong)


def test_options_of_ours_that_the_docs_name_exist(known: set[str]) -> None:
    """Lines that run `kt-runtime`, and options in backticks."""
    wrong = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip().startswith("kt-runtime ")]
        named = [*lines, *re.findall(r"`(--[^`]*)`", text)]
        wrong += [f"{path.name}: {name}" for one in named for name in unknown_options(one, known)]
    assert not wrong, "\n".join(wrong)


def is_command(name: str, sub: str | None) -> bool:
    if name not in COMMANDS:
        return False
    command = LazyCommands.get_command(cli, click.Context(cli), name)  # type: ignore[arg-type]
    if sub and isinstance(command, click.Group):
        return command.get_command(click.Context(command), sub) is not None
    return True


@pytest.mark.slow
def test_commands_that_the_code_names_exist() -> None:
    named = [(where, match[1], match[2]) for where, text in all_texts() for match in COMMAND.finditer(text)]
    assert named
    wrong = [f"{where}: kt-runtime {name} {sub or ''}" for where, name, sub in named if not is_command(name, sub)]
    assert not wrong, "\n".join(wrong)


def test_the_defects_that_these_tests_are_for_are_found(known: set[str]) -> None:
    assert not is_command("serv", None) and not is_command("models", "mak") and is_command("models", "make")
    assert unknown_options("lower --max-loras-per-bach or --lora-slots", known) == ["--max-loras-per-bach"]
    assert unknown_options("--kt-* and --hicache-size", known) == []


@pytest.mark.slow
def test_no_error_tells_a_user_to_use_an_option_under_a_peers_name() -> None:
    """Peers' names are taken, but what we say is our own name."""
    peers = set(ALIASES)
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Raise):
                parts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                named = {name for part in parts if isinstance(part, str) for name in OPTION.findall(part)}
                assert not named & peers, f"{path}:{node.lineno}"
