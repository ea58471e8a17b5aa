"""Tokenizes text in threads instead of the frontend's event loop, after a check of its length.

Symbols of SGLang 0.5.23, all in the frontend process, and reasons:

- `TokenizerManager._tokenize_texts` (overridden in `manager.py`): tokenizes in the event loop. A text of 8 MB blocks
  all other requests for ten seconds. SGLang tokenizes text of any length before comparing it with the context length.
- `AnthropicServing._handle_streaming`, `._handle_non_streaming`, `.handle_count_tokens`,
  `OpenAIServingResponses._make_request`, `OpenAIServingTokenize._handle_non_streaming_request`,
  `OpenAIServingDetokenize._handle_non_streaming_request`: render and tokenize in the event loop.
- `OpenAIServingChat._convert_to_internal_request`: returns the result of the conversion that already ran in a thread
  when one of these methods calls it.
- `parallel_prompt_encode.parallel_prompt_encode`: bypasses the tokenizer's checked `encode`, so a hook checks its text.

The other OpenAI routes convert in the event loop's default executor, in any number of threads; `TextExecutor` replaces
this executor. Rust tokenizers release the GIL. Python's templates and slow tokenizers do not, but the interpreter
switches threads every 5 ms.

Long texts (over 256 KiB of body) run one at a time in a separate thread, so that short texts never wait for them. The
thread checks that the client is still connected before it starts a long text, and every 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kt_runtime.errors import RuntimeFault
from kt_runtime.sglang_patch.frontend.overload import Overloaded
from kt_runtime.sglang_patch.frontend.text_limits import ClientGone, TextLimits
from kt_runtime.sglang_patch.hooks import Hooks

T = TypeVar("T")

OPENAI = "sglang.srt.entrypoints.openai"
ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
CONVERT = f"{OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request"
PARALLEL_ENCODE = f"{OPENAI}.parallel_prompt_encode.parallel_prompt_encode"
WITHOUT_AWAIT = (
    f"{OPENAI}.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request",
    f"{OPENAI}.serving_responses.OpenAIServingResponses._make_request",
    f"{ANTHROPIC}.handle_count_tokens",
)
DETOKENIZE = f"{OPENAI}.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request"
CONVERTING = (f"{ANTHROPIC}._handle_streaming", f"{ANTHROPIC}._handle_non_streaming")
SYMBOLS = (*WITHOUT_AWAIT, DETOKENIZE, *CONVERTING, CONVERT, PARALLEL_ENCODE)

LONG_BYTES = 256 * 1024
MAX_WAITING_BYTES = 64 * 1024 * 1024
ASK_SECONDS = 5.0

current_request: contextvars.ContextVar[Any] = contextvars.ContextVar("current_request", default=None)
_loop: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("loop", default=None)
_converted: contextvars.ContextVar[Any] = contextvars.ContextVar("converted", default=(None, None))


class TextExecutor(ThreadPoolExecutor):
    """The event loop's default executor, with a separate thread for long texts."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._lock = threading.Lock()
        self._waiting_bytes = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """SGLang's calls to the default executor. The last argument of a conversion is the HTTP request."""
        request = args[-1] if args and hasattr(args[-1], "is_disconnected") else None
        if request is None:
            return super().submit(function, *args, **kwargs)
        context = contextvars.copy_context()
        context.run(current_request.set, request)
        loop = asyncio.get_running_loop()
        return self.submit_text(_body_bytes(request), loop, context, functools.partial(function, *args, **kwargs))

    def submit_text(
        self, size: int, loop: asyncio.AbstractEventLoop, context: contextvars.Context, function: Callable[[], T]
    ) -> Future[T]:
        """`size`: approximate bytes of the text. Raises Overloaded if too much long text waits already."""
        if size <= LONG_BYTES:
            return super().submit(context.run, _with_loop, loop, function)
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
                raise Overloaded(f"{self._waiting_bytes:,} bytes of long texts wait to be tokenized; try again later")
            self._waiting_bytes += size
        future = self._long.submit(context.run, _with_loop, loop, _if_client_is_there, function)
        future.add_done_callback(lambda _: self._forget(size))
        return future

    def _forget(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Runs `function()` in a thread with the caller's context variables. Cancelling the caller dequeues it."""
        future = self.submit_text(size, asyncio.get_running_loop(), contextvars.copy_context(), function)
        return await asyncio.wrap_future(future)


class Tokenizing:
    """The tokenizer manager's text limits and executor. Created before the event loop runs."""

    def __init__(self, tokenizer: Any, context_tokens: int) -> None:
        self.limits = TextLimits(tokenizer, context_tokens)
        self.executor = TextExecutor()
        self._encode = tokenizer.encode
        tokenizer.encode = self.encode  # patches only this tokenizer instance, which all of SGLang's routes use

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(text, str):
            self.limits.check(text, client_is_gone)
        return self._encode(text, *args, **kwargs)

    async def tokenize(self, texts: Any, tokenize: Callable[[], Coroutine[Any, Any, T]], is_async: bool) -> T:
        """Unless `is_async`, `tokenize()` must not await anything. Raises ValueError for a text that is too long."""
        each = [texts] if isinstance(texts, str) else [text for text in texts or () if isinstance(text, str)]
        for text in each:
            self.limits.check_characters(text)

        def check_all() -> None:
            for text in each:
                self.limits.check(text, client_is_gone)

        def check_and_tokenize() -> T:
            check_all()
            return drive(tokenize())

        size = sum(map(len, each))
        if is_async:
            await self.executor.run(size, check_all)
            return await tokenize()
        return await self.executor.run(size, check_and_tokenize)


def install(hooks: Hooks) -> None:
    for target in WITHOUT_AWAIT:
        hooks.around(target, in_thread)
    hooks.around(DETOKENIZE, detokenize_in_thread)
    for target in CONVERTING:
        hooks.around(target, convert_in_thread)
    hooks.around(CONVERT, as_converted)
    hooks.around(PARALLEL_ENCODE, checked_parallel_encode)


async def in_thread(original: Callable[..., Coroutine[Any, Any, T]], serving: Any, *args: Any, **kwargs: Any) -> T:
    """Runs in a thread a coroutine that awaits nothing. Its first argument is the request's body; the HTTP request, if
    any, is among its arguments."""
    request = next((argument for argument in args if hasattr(argument, "is_disconnected")), None)
    current_request.set(request)
    size = _body_bytes(request) if request is not None else len(args[0].model_dump_json())
    return await _tokenizing(serving).executor.run(size, lambda: drive(original(serving, *args, **kwargs)))


async def detokenize_in_thread(original: Callable[..., Any], serving: Any, adapted: Any, *args: Any) -> Any:
    tokens = adapted.tokens
    num_tokens = sum(len(part) if isinstance(part, list) else 1 for part in tokens) if isinstance(tokens, list) else 0
    _tokenizing(serving).limits.check_num_tokens(num_tokens)
    return await in_thread(original, serving, adapted, *args)


async def convert_in_thread(
    original: Callable[..., Coroutine[Any, Any, T]], serving: Any, chat_request: Any, body: Any, raw_request: Any
) -> T:
    """Converts the request in a thread, then runs the handler, which validates, converts and awaits the answer.

    The handler's own call of the conversion returns the thread's result (`as_converted`).
    """
    chat = serving.openai_serving_chat
    current_request.set(raw_request)

    def convert() -> Callable[[], Any]:
        try:
            converted = chat._convert_to_internal_request(chat_request, raw_request)
        except Exception as error:  # noqa: BLE001  # the handler maps exceptions to answers
            return functools.partial(_raise, error)
        return lambda: converted

    if chat._validate_request(chat_request) is None:
        result = await _tokenizing(chat).executor.run(_body_bytes(raw_request), convert)
        _converted.set((chat_request, result))
    return await original(serving, chat_request, body, raw_request)


def as_converted(original: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    made_for, converted = _converted.get()
    return converted() if made_for is request else original(serving, request, *args, **kwargs)


def checked_parallel_encode(original: Callable[..., Any], tokenizer: Any, text: Any, *args: Any) -> Any:
    owner = getattr(tokenizer.encode, "__self__", None)
    if isinstance(owner, Tokenizing) and isinstance(text, str):
        owner.limits.check(text, client_is_gone)
    return original(tokenizer, text, *args)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that awaits nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeFault(f"{coroutine!r} waits for something; it was taken for one that does not")


def client_is_gone() -> bool:
    """Whether the client of this thread's request has closed its connection. False in the event loop, where the state
    is unknown, and after ASK_SECONDS without an answer."""
    request, loop = current_request.get(), _loop.get()
    if request is None or loop is None:
        return False
    asked = asyncio.run_coroutine_threadsafe(request.is_disconnected(), loop)
    try:
        return asked.result(ASK_SECONDS)
    except TimeoutError:
        asked.cancel()
        return False


def _with_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., T], *args: Any) -> T:
    _loop.set(loop)
    return function(*args)


def _if_client_is_there(function: Callable[[], T]) -> T:
    if client_is_gone():
        raise ClientGone("the client has gone")
    return function()


def _raise(error: Exception) -> None:
    raise error


def _tokenizing(serving: Any) -> Tokenizing:
    serving = getattr(serving, "openai_serving_chat", serving)
    tokenizing: Tokenizing = serving.tokenizer_manager.tokenizing
    return tokenizing


def _body_bytes(request: Any) -> int:
    """Size of the request's body. A body of unknown size counts as long."""
    try:
        return int(request.headers["content-length"])
    except (AttributeError, KeyError, ValueError):
        return LONG_BYTES + 1
