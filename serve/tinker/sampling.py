"""Samples: a client's request as requests to SGLang's engine, and the engine's answers as the client's result.

Every sequence of a request comes from one version of its adapter. For several sequences the prompt is computed once,
by a request without new tokens; the sequences then find it in the prefix cache.

The protocol's log-probabilities are the model's own, at temperature 1. SGLang reports those of the distribution that
it sampled from, so at another temperature a second pass over prompt and answer computes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol

from kt_runtime.errors import InvalidValueError, RuntimeFault
from kt_runtime.serve.requests.bodies.bounds import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from kt_runtime.serve.tinker.protocol.bodies import Sample, SamplingParams
from kt_runtime.serve.tinker.protocol.results import SampledSequence, SampleResult, TopOfToken

REFUSED = {
    "target_prompt_logprobs": "log-probabilities of other tokens are not offered; use topk_prompt_logprobs",
    "prompt_alt_tokens_k": "draws at prompt positions are not offered; use topk_prompt_logprobs",
}


class Engine(Protocol):
    """SGLang's engine: `sglang_patch.frontend.http_server.Engine`."""

    async def generate(self, fields: dict[str, Any]) -> dict[str, Any]:
        """One request with the fields of /generate, and its answer. A cancelled call aborts the request. Raises
        InvalidValueError for a request that SGLang refuses, RuntimeFault where it fails."""
        ...

    def pin(self, alias: str, name: str) -> str:
        """Until `unpin(alias)`, `alias` is an adapter name for the version that `name` (or another alias) means now.
        Returns the version's `lora_id`. Raises InvalidValueError for an unknown name."""
        ...

    def unpin(self, alias: str) -> None: ...


def check(request: Sample) -> None:
    """Raises InvalidValueError for what this server does not offer."""
    for name, reason in REFUSED.items():
        if getattr(request, name):
            raise InvalidValueError(f"{name}: {reason}")
    if not request.prompt.tokens:
        raise InvalidValueError("prompt: it has no token")
    texts = [stop for stop in request.sampling_params.stop or [] if isinstance(stop, str)]
    if len(texts) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise InvalidValueError(
            f"stop: {len(texts)} strings; allowed are {MAX_STOP_STRINGS} of up to {MAX_STOP_CHARACTERS} characters"
        )
    last = request.prompt_logprobs_last_n
    if last is not None and not request.prompt_logprobs:
        raise InvalidValueError(f"prompt_logprobs_last_n is {last}, but prompt_logprobs are not asked for")


def parameters(given: SamplingParams, prompt_tokens: int, context_tokens: int) -> dict[str, Any]:
    """SGLang's `sampling_params`. `stop` None: the model's end token; []: nothing ends the answer but its length."""
    new_tokens = given.max_tokens
    if new_tokens is None:
        new_tokens = max(context_tokens - prompt_tokens, 1)
    found: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k if given.top_k != 0 else -1,
        "skip_special_tokens": False,
    }
    if given.stop == []:
        found["ignore_eos"] = True
    stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
    if texts := [stop for stop in stops if isinstance(stop, str)]:
        found["stop"] = texts
    if ids := [stop for stop in stops if not isinstance(stop, str)]:
        found["stop_token_ids"] = ids
    return found


async def sample(
    engine: Engine,
    request: Sample,
    adapter: str | None,
    key: str,
    context_tokens: int,
    versions: Mapping[str, str],
) -> SampleResult:
    """`key`: a unique part of the ids of the engine's requests. `versions`: lora_id -> version, where it is known."""
    if adapter is None:
        return await _Sampling(engine, request, None, key, context_tokens).run()
    alias = f"tinker:{key}"
    lora_id = engine.pin(alias, adapter)
    try:
        result = await _Sampling(engine, request, alias, key, context_tokens).run()
    finally:
        engine.unpin(alias)
    return replace(result, adapter_version=versions.get(lora_id, lora_id))


class _Sampling:
    def __init__(self, engine: Engine, request: Sample, adapter: str | None, key: str, context_tokens: int) -> None:
        self._engine, self._request, self._adapter, self._key = engine, request, adapter, key
        self._prompt = request.prompt.tokens
        self._params = parameters(request.sampling_params, len(self._prompt), context_tokens)
        self._wants_prompt = bool(request.prompt_logprobs or request.topk_prompt_logprobs)

    async def run(self) -> SampleResult:
        number = self._request.num_samples
        if number == 1:
            first = await self._one(0, with_prompt=self._wants_prompt)
            sequences = [await self._sequence(0, first)]
        else:
            first = await self._generate("prompt", self._prompt, {**self._params, "max_new_tokens": 0}, self._start)
            answers = await _all([self._one(index, with_prompt=False) for index in range(number)])
            sequences = await _all([self._sequence(index, answer) for index, answer in enumerate(answers)])
        meta = first["meta_info"]
        return SampleResult(
            sequences,
            _prompt_logprobs(meta, len(self._prompt)) if self._request.prompt_logprobs else None,
            self._prompt_top(meta) if self._request.topk_prompt_logprobs else None,
            int(meta.get("cached_tokens", 0)),
        )

    @property
    def _start(self) -> int:
        """The first token of the prompt whose log-probability SGLang reports; -1: none."""
        if not self._wants_prompt:
            return -1
        last = self._request.prompt_logprobs_last_n
        return 0 if last is None else max(len(self._prompt) - last - 1, 0)

    async def _one(self, index: int, *, with_prompt: bool) -> dict[str, Any]:
        params = dict(self._params)
        if self._request.sampling_params.seed is not None:
            params["sampling_seed"] = self._request.sampling_params.seed + index
        return await self._generate(str(index), self._prompt, params, self._start if with_prompt else -1)

    async def _generate(self, part: str, ids: list[int], params: dict[str, Any], start: int) -> dict[str, Any]:
        fields = {
            "rid": f"tinker-{self._key}-{part}",
            "input_ids": ids,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": max(self._request.topk_prompt_logprobs, self._request.topk_sample_logprobs),
            "lora_path": self._adapter,
        }
        return await self._engine.generate(fields)

    async def _sequence(self, index: int, answer: dict[str, Any]) -> SampledSequence:
        meta = answer["meta_info"]
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length"):
            raise RuntimeFault(f"the request was ended by the server ({reason})")
        tokens = list(answer["output_ids"])
        logprobs, top = _of_tokens(meta, "output", self._request.topk_sample_logprobs)
        if tokens and self._request.sampling_params.temperature not in (0, 1):
            again = await self._generate(
                f"{index}-again", self._prompt + tokens, {"max_new_tokens": 0}, len(self._prompt) - 1
            )
            logprobs, top = _of_tokens(again["meta_info"], "input", self._request.topk_sample_logprobs)
        found = [float(value) for value in logprobs[-len(tokens) :] if value is not None] if tokens else []
        if len(found) != len(tokens):
            raise RuntimeFault(f"SGLang returned {len(found)} log-probabilities for {len(tokens)} tokens")
        asked_top = [entries or [] for entries in top[-len(tokens) :]] if tokens else []
        return SampledSequence(
            tokens, found, reason == "stop", asked_top if self._request.topk_sample_logprobs else None
        )

    def _prompt_top(self, meta: dict[str, Any]) -> list[TopOfToken | None]:
        return _padded(_of_tokens(meta, "input", self._request.topk_prompt_logprobs)[1], len(self._prompt))


def _prompt_logprobs(meta: dict[str, Any], length: int) -> list[float | None]:
    return _padded(_of_tokens(meta, "input", 0)[0], length)


def _of_tokens(meta: dict[str, Any], side: str, k: int) -> tuple[list[float | None], list[TopOfToken | None]]:
    """The log-probabilities and the top `k` of the "input" or "output" tokens that SGLang reports on."""
    logprobs = [entry[0] for entry in meta.get(f"{side}_token_logprobs") or []]
    top: list[TopOfToken | None] = [
        None if not entries else [(int(token), float(logprob)) for logprob, token, _ in entries[:k]]
        for entries in (meta.get(f"{side}_top_logprobs") or [])
    ]
    return logprobs, top


def _padded(found: list[Any], length: int) -> list[Any]:
    """The last `length` entries, or those after entries of None."""
    found = found[-length:]
    return [None] * (length - len(found)) + found


async def _all(work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """As `asyncio.gather`, but an error cancels the others and waits for them."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
