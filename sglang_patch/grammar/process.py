"""The program that compiles and matches clients' grammars outside the scheduler.

`client.py` starts it as `python -m kt_runtime.sglang_patch.grammar.process CONTROL VOCABULARY`, with the numbers of two
inherited files: a SEQPACKET socket, and the tokenizer's vocabulary as serialized by xgrammar (`serialize_json`). The
program loads xgrammar and the vocabulary once, then forks one process per grammar; all share the vocabulary's memory.

A grammar's process compiles the grammar and then holds the matchers of all requests with this grammar. Kernel limits
end the process, and thereby only this grammar: CPU time by an interval timer (SIGPROF), memory by RLIMIT_AS. The
process also ends when its socket is closed or its parent dies.

Messages, little endian, one packet each. A grammar's process first sends its process id (`PID`). Then requests:

    COMPILE + JSON {kind, spec, options, limits}  ->  JSON {bytes} or {error}
    HEAD(OPEN, matcher, max_rollback_tokens) + int32...           no answer; the tokens that end the text, if not the
                                                                  vocabulary's own
    HEAD(ACCEPT, matcher, token)                                  -> STATE(accepted, terminated)
    HEAD(MASK, matcher, 0)                                        -> the mask: one bit per token, 1 is allowed
    HEAD(ROLLBACK, matcher, num_tokens)                           -> STATE(1, terminated)
    HEAD(JUMP, matcher, 0)                                        -> `=` and the text that must follow, UTF-8
    HEAD(CLOSE, matcher, 0)                                       no answer
    TEXT                                                          -> `=` and the grammar as EBNF, UTF-8

The prefix `=` avoids empty packets, which would look like a closed socket.

Library: xgrammar 0.2.7, only its compiled part (`xgrammar.base._core`). The Python package would import torch and
transformers (560 MB, several seconds) for wrappers that this program does not need.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import sys
import time
import types
from typing import Any

PID = struct.Struct("<i")
HEAD = struct.Struct("<BIi")
STATE = struct.Struct("<BB")
COMPILE, OPEN, ACCEPT, MASK, ROLLBACK, JUMP, CLOSE, TEXT = range(8)
MAX_MESSAGE_BYTES = 160 * 1024  # below a SEQPACKET socket's default buffer
PROBE_TOKENS = 24
PR_SET_PDEATHSIG = 1
NOT_NEEDED = ("torch", "ml_dtypes")  # optional for xgrammar's binding layer, and large


def load_xgrammar() -> Any:
    """xgrammar's compiled part, without the imports of the package's `__init__`."""
    for name in NOT_NEEDED:
        sys.modules[name] = None  # type: ignore[assignment]  # `import` raises ImportError
    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.exception")  # registers the error kinds that the binding raises
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def main(arguments: list[str]) -> None:
    control_file, vocabulary_file = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):  # ends with its parent; children are auto-reaped
        signal.signal(number, signal.SIG_IGN)
    xgrammar = load_xgrammar()
    with os.fdopen(vocabulary_file, "rb") as file:
        tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(file.read().decode())
    gc.collect()
    gc.freeze()
    own_pid = os.getpid()
    with socket.socket(fileno=control_file) as control:
        control.send(PID.pack(own_pid))
        while True:
            message, files, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                _end_with_parent(own_pid)
                with contextlib.suppress(BaseException):
                    GrammarProcess(socket.socket(fileno=files[0]), xgrammar, tokenizer_info).run()
                os._exit(0)
            for file_number in files:
                os.close(file_number)


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills a grammar's process instead of the model's


class GrammarProcess:
    """One grammar: compiled once, then matched for any number of requests."""

    def __init__(self, connection: socket.socket, xgrammar: Any, tokenizer_info: Any) -> None:
        self.connection, self.xgrammar, self.tokenizer_info = connection, xgrammar, tokenizer_info
        self.compiled: Any = None
        self.match_cpu_s = 0.0
        self.matchers: dict[int, Matcher] = {}

    def run(self) -> None:
        """Answers until the peer closes the socket. An exception ends the process, which closes the socket."""
        self.connection.send(PID.pack(os.getpid()))
        while message := self.connection.recv(MAX_MESSAGE_BYTES):
            kind = message[0]
            if kind == COMPILE:
                self.connection.send(json.dumps(self.compile(json.loads(message[1:]))).encode())
            elif kind == TEXT:
                self.connection.send(_packet(str(self.compiled.grammar().to_string())))
            else:
                operation, number, argument = HEAD.unpack_from(message)
                self.match(operation, number, argument, message[HEAD.size :])

    def compile(self, order: dict[str, Any]) -> dict[str, Any]:
        limits = order["limits"]
        self.match_cpu_s = limits["match_cpu_s"]
        _limit_memory(limits["compile_bytes"])
        _limit_cpu(limits["compile_cpu_s"])
        try:
            self.compiled = self._compile(order["kind"], order["spec"], order["options"])
            slowest_s = self.probe()
        except Exception as error:  # noqa: BLE001  # any error that the library reports for a client's grammar
            return {"error": _cause(error)}
        finally:
            _limit_cpu(0)
        if slowest_s > self.match_cpu_s:
            return {"error": f"matching it takes {slowest_s:.2g} s for one token; allowed are {self.match_cpu_s:g} s"}
        _limit_memory(limits["match_bytes"])
        return {"bytes": _private_bytes()}

    def _compile(self, kind: str, spec: str, options: dict[str, Any]) -> Any:
        compiler = self.xgrammar.GrammarCompiler(self.tokenizer_info, 1, False, -1)
        if kind == "json":
            return compiler.compile_json_schema(
                spec, options["any_whitespace"], None, None, True, options["max_whitespace_cnt"], False
            )
        if kind == "any_json":
            return compiler.compile_builtin_json_grammar()
        if kind == "regex":
            return compiler.compile_regex(spec)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(spec)
        return compiler.compile_grammar_from_strings(spec, "root")

    def probe(self) -> float:
        """Follows one path of the grammar and returns the CPU seconds of its slowest mask. Some grammars of 20
        characters take seconds per token; they are refused before a request waits for a token."""
        generator, matcher, slowest_s = random.Random(0), self._matcher(0), 0.0
        for _ in range(PROBE_TOKENS):
            began = time.process_time()
            mask = matcher.mask()
            slowest_s = max(slowest_s, time.process_time() - began)
            allowed = matcher.allowed_tokens(mask)
            if slowest_s > self.match_cpu_s or not len(allowed):
                break
            matcher.accept(int(allowed[generator.randrange(len(allowed))]))
            if matcher.is_terminated():
                break
        return slowest_s

    def match(self, kind: int, number: int, argument: int, rest: bytes) -> None:
        if kind == OPEN:
            self.matchers[number] = self._matcher(argument, list(array.array("i", rest)) or None)
            return
        if kind == CLOSE:
            self.matchers.pop(number, None)
            return
        matcher = self.matchers[number]
        _limit_cpu(self.match_cpu_s)
        if kind == ACCEPT:
            accepted = matcher.accept(argument)
            self.connection.send(STATE.pack(accepted, matcher.is_terminated()))
        elif kind == MASK:
            self.connection.send(matcher.mask())
        elif kind == ROLLBACK:
            matcher.rollback(argument)
            self.connection.send(STATE.pack(1, matcher.is_terminated()))
        elif kind == JUMP:
            self.connection.send(_packet(matcher.forced_text()))
        _limit_cpu(0)

    def _matcher(self, max_rollback_tokens: int, stop_token_ids: list[int] | None = None) -> Matcher:
        handle = self.xgrammar.GrammarMatcher(self.compiled, stop_token_ids, False, max_rollback_tokens, None)
        return Matcher(handle, int(self.tokenizer_info.vocab_size()))


class Matcher:
    """xgrammar's matcher, and the cached mask of its current state."""

    def __init__(self, handle: Any, vocab_size: int) -> None:
        import numpy as np

        self.handle, self.vocab_size = handle, vocab_size
        self._row = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._mask: bytes | None = None

    def accept(self, token: int) -> bool:
        self._mask = None
        return bool(self.handle.accept_token(token, False))

    def is_terminated(self) -> bool:
        return bool(self.handle.is_terminated())

    def rollback(self, num_tokens: int) -> None:
        self._mask = None
        self.handle.rollback(num_tokens)

    def forced_text(self) -> str:
        return str(self.handle.find_jump_forward_string())

    def mask(self) -> bytes:
        if self._mask is None:
            import tvm_ffi

            self._row.fill(-1)
            self.handle.fill_next_token_bitmask(tvm_ffi.from_dlpack(self._row), 0, False)
            self._mask = self._row.tobytes()
        return self._mask

    def allowed_tokens(self, mask: bytes) -> Any:
        import numpy as np

        return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self.vocab_size].nonzero()[0]


def _packet(text: str) -> bytes:
    packet = b"=" + text.encode()
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(packet)} bytes do not fit into one message")
    return packet


def _cause(error: Exception) -> str:
    if "bad_alloc" in str(error) or isinstance(error, MemoryError):
        return "it needs more memory than allowed"
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()  # time and place in xgrammar's sources


def _limit_cpu(seconds: float) -> None:
    """Limits CPU time from now on: SIGPROF ends the process by default. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(more_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _private_bytes() -> int:
    """Bytes of memory that this process shares with no other."""
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(sys.argv[1:])
