"""SGLang 0.5.23's tokenizer manager, in the frontend process, with kt-runtime's adapters.

Symbols: `sglang.srt.managers.tokenizer_manager.TokenizerManager` and `.SignalHandler`, subclassed. Reasons:

- `init_lora`: installs the registry whose names can move (`registry.py`).
- `load_lora_adapter`, `unload_lora_adapter`: SGLang's routes use kt-runtime's validator and version store. Loading to a
  served name moves the name; SGLang would refuse it. `load_lora_adapter_from_tensors` takes pickles, so it is refused.
- `generate_request`: SGLang lets a client set `lora_id`. Without a `lora_path`, such an id would select any installed
  copy, and an unknown id would end the scheduler. With a `lora_path` that fails, SGLang would release a count that was
  never taken.
- `_validate_and_resolve_lora`: a `lora_path` list longer than the batch would count requests that never end.
- `_validate_one_request`: refuses values that would end the scheduler and the training in it (`checks.py`,
  `sampling.py`), and excessive grammars and log-probabilities (`grammar/limits.py`, `logprob_limits.py`).
- `_validate_one_request`, `_handle_batch_output`: the tokens of a client's key are counted (`overload.py`).
- `generate_request` also refuses requests while the engine is stalled (`stalls.py`).
- `handle_loop`: an exception in the loop would end the whole server (`faults.py`).
- `_tokenize_texts`, `auto_create_handle_loop`: tokenization runs in threads (`tokenizing.py`).
- the signal handlers: SGLang waits for the last request without a timeout. After the death of a child process, SGLang
  kills this process before it can remove its sockets.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.managers.tokenizer_manager import SignalHandler

from kt_runtime.errors import KtError
from kt_runtime.sglang_patch.frontend.checks import (
    check_lora_path,
    check_token_ids,
    check_top_logprobs,
)
from kt_runtime.sglang_patch.frontend.faults import FaultContainment
from kt_runtime.sglang_patch.frontend.logprob_limits import check_prompt_logprobs, most_entries
from kt_runtime.sglang_patch.frontend.overload import Overloaded, note_answers, take_tokens
from kt_runtime.sglang_patch.frontend.registry import VersionedRegistry
from kt_runtime.sglang_patch.frontend.sampling import check_choices, check_sampling
from kt_runtime.sglang_patch.frontend.stalls import EngineStalled, Stalls
from kt_runtime.sglang_patch.frontend.tokenizing import Tokenizing, current_request
from kt_runtime.sglang_patch.grammar.limits import check_grammars
from kt_runtime.sglang_patch.ranks.processes import Look, rank_names

TELLING_SECONDS = 0.2


class AdapterService(Protocol):
    async def load(self, name: str, path: str) -> dict[str, Any]: ...

    async def unload(self, name: str) -> dict[str, Any]: ...


class FrontendSignals(SignalHandler):
    """Calls `on_stop` for SIGTERM and SIGINT, `on_failure` when one of SGLang's processes has died (SIGQUIT)."""

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        self.tokenizer_manager.on_stop()

    def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
        self.tokenizer_manager.on_failure("")


class FrontendManager(FaultContainment):
    """`adapters`, `on_stop` and `on_failure` are set before the first request, `ranks_elsewhere` (`stalls.py`) with
    them."""

    adapters: AdapterService | None = None
    stalls: Stalls | None = None
    ranks_elsewhere: Callable[[], Mapping[str, Look]] = dict
    on_stop: Callable[[], None]
    on_failure: Callable[[str], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signal_handler_class = FrontendSignals
        self.tokenizing = Tokenizing(self.tokenizer, self.context_len)

    def init_lora(self) -> None:
        super().init_lora()
        self.lora_registry = VersionedRegistry()

    def watch_for_stalls(self) -> None:
        """Called in the event loop, once the engine answers."""
        watchdog = self._subprocess_watchdog
        processes = [(name, process.pid) for name, process in zip(watchdog._names, watchdog._processes, strict=True)]
        self.stalls = Stalls(self, rank_names(processes), elsewhere=self.ranks_elsewhere)
        self.asyncio_tasks.add(asyncio.create_task(self.stalls.watch()))

    def end_server(self, why: str) -> None:
        """Clients that wait are told why before their connections end."""
        self.end_waiting(EngineStalled(why))
        asyncio.get_running_loop().call_later(TELLING_SECONDS, self.on_failure, why)

    def stalled(self) -> str:
        """Why the engine can't answer; empty while it works."""
        return "" if self.stalls is None else self.stalls.reason

    def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        if why := self.stalled():
            raise Overloaded(f"the server can't answer now: {why}")
        obj.lora_id = None
        check_choices(obj.sampling_params)
        current_request.set(request)
        return super().generate_request(obj, request)

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is not None:
            return
        super().auto_create_handle_loop()
        asyncio.get_running_loop().set_default_executor(self.tokenizing.executor)

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        tokenize = functools.partial(super()._tokenize_texts, texts, is_cross_encoder)
        return await self.tokenizing.tokenize(texts, tokenize, is_async=self.async_dynamic_batch_tokenizer is not None)

    async def _validate_and_resolve_lora(self, obj: Any) -> None:
        check_lora_path(obj.lora_path, 1 if obj.is_single else len(obj.rid), obj.is_single)
        await super()._validate_and_resolve_lora(obj)

    def _validate_one_request(self, obj: Any, input_ids: list[int] | None) -> None:
        check_sampling(obj.sampling_params, self.model_config.vocab_size)
        if input_ids is not None and obj.input_embeds is None:
            check_token_ids(input_ids, self.model_config.vocab_size)
        check_top_logprobs(getattr(obj, "top_logprobs_num", None), self.model_config.vocab_size)
        check_grammars(obj.sampling_params or {})
        check_prompt_logprobs(obj, len(input_ids or ()))
        if getattr(obj, "return_logprob", False):
            obj.most_logprobs = most_entries(obj, _path(current_request.get()))  # for `check_answer_logprobs`
        super()._validate_one_request(obj, input_ids)
        take_tokens(obj, len(input_ids or ()), self.context_len)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        note_answers(self.rid_to_state, recv_obj.rids, getattr(recv_obj, "completion_tokens", None) or ())
        await super()._handle_batch_output(recv_obj)

    async def load_lora_adapter(self, obj: Any, _: Any = None) -> LoRAUpdateOutput:
        async def load(adapters: AdapterService) -> None:
            await adapters.load(obj.lora_name, obj.lora_path)

        return await self._change_adapters(load)

    async def unload_lora_adapter(self, obj: Any, _: Any = None) -> LoRAUpdateOutput:
        """Answers once the name is removed; SGLang's own method waits for the last request that uses the adapter."""

        async def unload(adapters: AdapterService) -> None:
            await adapters.unload(obj.lora_name)

        return await self._change_adapters(unload)

    async def load_lora_adapter_from_tensors(self, obj: Any, _: Any = None) -> LoRAUpdateOutput:
        return LoRAUpdateOutput(
            success=False, error_message="pickled tensors are refused; load a PEFT directory by its path"
        )

    async def _change_adapters(self, change: Callable[[AdapterService], Any]) -> LoRAUpdateOutput:
        if self.adapters is None:
            return LoRAUpdateOutput(success=False, error_message="the server is still starting")
        try:
            await change(self.adapters)
        except KtError as error:
            return LoRAUpdateOutput(success=False, error_message=str(error))
        return LoRAUpdateOutput(success=True, loaded_adapters=self.lora_registry.names())


def _path(request: Any) -> str | None:
    return None if request is None else request.url.path
