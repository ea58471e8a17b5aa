"""Grammars in processes of their own: xgrammar's masks and tokens exactly, and an end to what takes too much.

The processes are real. The vocabulary is a large one of many short words: with few tokens no grammar is slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import xgrammar

from kt_runtime.sglang_patch.grammar import client as grammar_client
from kt_runtime.sglang_patch.grammar.client import (
    Cancellation,
    GrammarCompiler,
    GrammarError,
    GrammarLimits,
    GrammarMatcher,
    Room,
    current_cancellation,
)

LETTERS = 'abcdefghijklmnopqrstuvwxyz 0123456789{}[]":,'
SCHEMA = '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},"required":["name","age"]}'
TAG = (
    '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<f"],"tags":[{"type":"tag","begin":"<f>",'
    '"content":{"type":"json_schema","json_schema":{"type":"object","properties":{"a":{"type":"integer"}}}},"end":"</f>"}]}}'
)
# Each compiles in no time.
SLOW = {
    "nested stars": ("regex", "(([a-z]*)*)*!"),
    "many ways to read dots": ("regex", "(.|..|...|....){0,2000}"),
    "a rule that means itself twice": ("ebnf", "root ::= s\ns ::= [a-z]* s [a-z]* | [a-z]*"),
}
# More than any limit below, if nothing ended it.
ENDLESS = "[a-z]*" * 20_000


@pytest.fixture(scope="module")
def tokenizer_info() -> Any:
    generator = random.Random(1)
    words = {"".join(generator.choices(LETTERS, k=generator.randrange(2, 8))).encode() for _ in range(20_000)}
    vocabulary = [bytes([byte]) for byte in range(256)] + sorted(words) + [b"</s>"]
    return xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])


@pytest.fixture(scope="module")
def shared_compiler(tokenizer_info: Any) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_info)
    yield compiler
    compiler.forker.stop()


@pytest.fixture
def compiler(shared_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    """With limits and grammars of the test's own. The process that holds the vocabulary is shared."""
    room = Room(GrammarLimits())
    monkeypatch.setattr(GrammarCompiler, "room", room)
    yield shared_compiler
    for process in room.live:
        room.remove(process)


def change_limits(compiler: GrammarCompiler, **changes: Any) -> None:
    compiler.room.limits = dataclasses.replace(compiler.room.limits, **changes)


def compile_with(compiler: Any, kind: str, spec: str) -> Any:
    names = {"json": "compile_json_schema", "regex": "compile_regex", "ebnf": "compile_grammar"}
    return getattr(compiler, names.get(kind, "compile_structural_tag"))(spec)


def bitmask(tokenizer_info: Any) -> torch.Tensor:
    return xgrammar.allocate_token_bitmask(2, tokenizer_info.vocab_size)


def ended(pid: int) -> bool:
    """Waits for the process with this number to end."""
    try:
        psutil.Process(pid).wait(timeout=60)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json", SCHEMA),
        ("regex", r"[a-f]{3}\d+"),
        ("ebnf", 'root ::= "yes" | "no" " " [a-z]+'),
        ("tag", TAG),
    ],
)
def test_masks_states_and_rollback_are_xgrammars_own(
    compiler: GrammarCompiler, tokenizer_info: Any, kind: str, spec: str
) -> None:
    ours = GrammarMatcher(compile_with(compiler, kind, spec), max_rollback_tokens=200)
    theirs = xgrammar.GrammarMatcher(
        compile_with(xgrammar.GrammarCompiler(tokenizer_info), kind, spec), max_rollback_tokens=200
    )
    generator, mask, expected = random.Random(3), bitmask(tokenizer_info), bitmask(tokenizer_info)
    for step in range(40):
        assert ours.is_terminated() == theirs.is_terminated()
        if theirs.is_terminated():
            break
        assert ours.find_jump_forward_string() == theirs.find_jump_forward_string()
        ours.fill_next_token_bitmask(mask, 1)
        theirs.fill_next_token_bitmask(expected, 1)
        assert torch.equal(mask, expected)
        bits = mask[1].view(-1, 1) >> torch.arange(32, dtype=torch.int32) & 1
        token = generator.choice(bits.view(-1)[: tokenizer_info.vocab_size].nonzero().view(-1).tolist())
        assert ours.accept_token(token) is theirs.accept_token(token) is True
        if step % 7 == 6:
            ours.rollback(2)
            theirs.rollback(2)
    assert ours.accept_token(0) == theirs.accept_token(0)


def test_matchers_of_one_grammar_are_apart_and_stop_tokens_can_be_replaced(
    compiler: GrammarCompiler, tokenizer_info: Any
) -> None:
    grammar = compiler.compile_regex("ab")
    first = GrammarMatcher(grammar, max_rollback_tokens=10)
    second = GrammarMatcher(grammar, max_rollback_tokens=10, override_stop_tokens=[7])
    assert first.accept_token(ord("a"))
    assert not second.accept_token(ord("b"))
    assert second.accept_token(ord("a"))
    for matcher in (first, second):
        assert matcher.accept_token(ord("b"))
    assert not first.accept_token(7)
    assert second.accept_token(7)
    assert (first.is_terminated(), second.is_terminated()) == (False, True)


@pytest.mark.parametrize("spec", ["(", "[z-a]"])
def test_what_is_wrong_is_said_without_the_librarys_paths(compiler: GrammarCompiler, spec: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile_regex(spec)
    assert str(caught.value)
    assert ".cc" not in str(caught.value)


@pytest.mark.slow
def test_compiling_ends_at_its_processor_time(compiler: GrammarCompiler) -> None:
    change_limits(compiler, compile_cpu_s=0.5)
    with pytest.raises(GrammarError, match=r"took more time or memory than allowed: 0\.5 s of processor time"):
        compiler.compile_regex(ENDLESS)
    assert not compiler.room.live


def test_compiling_ends_at_its_memory(compiler: GrammarCompiler) -> None:
    change_limits(compiler, compile_bytes=2 << 20)
    with pytest.raises(GrammarError, match="memory"):
        compiler.compile_regex("a" * 100_000)
    assert compiler.compile_regex("a{3}").memory_size_bytes > 0  # others are as before


@pytest.mark.parametrize(("kind", "spec"), SLOW.values(), ids=SLOW)
def test_a_grammar_whose_first_tokens_are_slow_is_refused(compiler: GrammarCompiler, kind: str, spec: str) -> None:
    change_limits(compiler, match_cpu_s=0.05, compile_cpu_s=60.0, compile_wait_s=300.0)
    with pytest.raises(GrammarError, match=r"for one token; allowed are 0\.05 s"):
        compile_with(compiler, kind, spec)


@pytest.mark.slow
def test_a_grammar_that_becomes_slow_ends_its_requests_and_no_others(
    compiler: GrammarCompiler, tokenizer_info: Any
) -> None:
    """The probe does not see behind the 'z' that it has no reason to choose."""
    hidden = 'root ::= [a-y]{200} | "z!" slow\nslow ::= ("a"? "b"? "c"? [a-z]?){0,500} "!"'
    slow = GrammarMatcher(compiler.compile_grammar(hidden), max_rollback_tokens=200)
    other = GrammarMatcher(compiler.compile_regex("a{30}"), max_rollback_tokens=200)
    mask = bitmask(tokenizer_info)
    assert slow.accept_token(ord("z"))
    assert slow.accept_token(ord("!"))  # its answer comes before the mask is computed
    assert not slow.fill_next_token_bitmask(mask, 0)
    assert torch.equal(mask, bitmask(tokenizer_info)), "a missing mask changes nothing"
    with pytest.raises(ValueError, match="took more time or memory than allowed"):
        slow.accept_token(ord("a"))
    assert slow.compiled.process.failure
    assert other.accept_token(ord("a"))
    assert other.fill_next_token_bitmask(mask, 0)


@pytest.mark.slow
def test_a_cancelled_compilation_ends_at_once(compiler: GrammarCompiler) -> None:
    change_limits(compiler, compile_cpu_s=600.0, compile_wait_s=600.0)
    cancellation, caught = Cancellation(), []

    def compile_in_thread() -> None:
        current_cancellation.set(cancellation)
        try:
            compiler.compile_regex(ENDLESS)
        except GrammarError as error:
            caught.append(error)

    thread = threading.Thread(target=compile_in_thread)
    thread.start()
    while not (children := computing(compiler)):
        assert thread.is_alive()
    cancellation.cancel()
    thread.join(60)
    assert len(caught) == 1
    assert all(ended(child) for child in children)


def computing(compiler: GrammarCompiler) -> list[int]:
    """Processes of grammars that have used more time than starting takes."""
    if compiler.forker.pid is None:
        return []
    children = psutil.Process(compiler.forker.pid).children()
    return [child.pid for child in children if child.cpu_times().user > 0.3]


def test_a_grammar_ends_with_its_last_user_and_the_limit_of_grammars_is_one_of_all(compiler: GrammarCompiler) -> None:
    change_limits(compiler, max_processes=2, room_s=0.3)
    kept = [compiler.compile_regex("a"), compiler.compile_regex("b")]
    with pytest.raises(GrammarError, match=r"2 grammars .* are in use; allowed at once are 2"):
        compiler.compile_regex("c")
    matcher = GrammarMatcher(kept.pop(), max_rollback_tokens=1)
    pid = matcher.compiled.process.pid
    assert len(compiler.room.live) == 2
    del matcher
    gc.collect()
    assert ended(pid)
    kept.append(compiler.compile_regex("c"))


def test_room_is_made_from_what_is_only_kept(compiler: GrammarCompiler) -> None:
    change_limits(compiler, max_bytes=1, room_s=30.0)
    kept = [compiler.compile_regex("a")]

    def evict() -> bool:
        return bool(kept and kept.pop())

    compiler.room.evict = evict
    compiler.compile_regex("b")
    assert not kept


@pytest.mark.slow
def test_the_vocabularys_process_is_started_again(compiler: GrammarCompiler) -> None:
    first = compiler.compile_regex("a{3}")
    assert compiler.forker.pid is not None
    os.kill(compiler.forker.pid, signal.SIGKILL)
    assert ended(first.process.pid), "a grammar's process ends with its parent"
    assert GrammarMatcher(compiler.compile_regex("b"), max_rollback_tokens=1).accept_token(ord("b"))


@pytest.mark.slow
def test_all_processes_end_when_the_scheduler_is_killed(tokenizer_info: Any) -> None:
    """A fork of this process, which has imported xgrammar, takes the scheduler's part."""
    reading, writing = os.pipe()
    scheduler = os.fork()
    if not scheduler:
        with contextlib.suppress(BaseException):
            compiler = GrammarCompiler(tokenizer_info)
            grammar = compiler.compile_regex("a{3}")
            os.write(writing, f"{compiler.forker.pid} {grammar.process.pid}".encode())
            signal.pause()
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading, buffering=0, mode="rb") as pipe:
        pids = [int(word) for word in pipe.read(100).split()]
    was_running = [psutil.pid_exists(pid) for pid in pids]
    os.kill(scheduler, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(scheduler, 0)[1])
    assert was_running == [True, True]
    assert all(ended(pid) for pid in pids)


def test_the_process_is_small_since_it_imports_neither_torch_nor_transformers(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile_regex("a{3}")
    assert compiler.forker.pid is not None
    maps = open(f"/proc/{compiler.forker.pid}/maps").read()  # noqa: SIM115
    assert "xgrammar" in maps
    assert "libtorch" not in maps
    assert grammar.memory_size_bytes < 32 << 20


@pytest.mark.slow
def test_limits_are_stated_in_the_documents_numbers() -> None:
    limits = grammar_client.GrammarLimits()
    assert (limits.compile_cpu_s, limits.compile_bytes, limits.match_cpu_s) == (5.0, 256 << 20, 0.25)
    assert (limits.step_s, limits.least_cpu_s, limits.max_processes) == (0.5, 0.01, 64)
