"""An exception in the frontend's receive loop ends only the affected requests; the server continues.

Symbols (SGLang 0.5.23): `sglang.srt.managers.tokenizer_manager.TokenizerManager.handle_loop`, `._handle_batch_output`,
`.collect_metrics` and `.convert_logprob_style`, overridden in a base class of `FrontendManager`. Reason: SGLang wraps
`handle_loop` in `print_exception_wrapper`, which kills the whole process tree after any exception in the loop, although
a message concerns only a few requests. For example, Prometheus refuses unknown labels.

If one request is known to be at fault, only this request ends (`convert_logprob_style`) or is not counted
(`collect_metrics`). Any other exception while handling a message ends the requests of this message.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from http import HTTPStatus
from typing import Any

import zmq
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import BatchEmbeddingOutput, BatchStrOutput, BatchTokenIDOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager, async_sock_recv

from kt_runtime.sglang_patch.frontend.logprob_limits import TooManyLogprobs, check_answer_logprobs, too_many_reason
from kt_runtime.sglang_patch.frontend.stalls import EngineStalled

logger = logging.getLogger(__name__)

BATCH_OUTPUTS = (BatchStrOutput, BatchEmbeddingOutput, BatchTokenIDOutput)


class FaultContainment(TokenizerManager):
    """A tokenizer manager whose receive loop survives exceptions. `heard_at`: monotonic time of the latest message."""

    heard_at = 0.0

    async def handle_loop(self) -> None:
        """Ends only when its task is cancelled or its socket is closed (ZMQError)."""
        while True:
            with self.soft_watchdog.disable():
                received = await self._receive()
            await self._handle(received)
            self.last_receive_tstamp, self.heard_at = time.time(), time.monotonic()
            self.soft_watchdog.feed()

    async def _receive(self) -> Any:
        while True:
            try:
                return await async_sock_recv(self.recv_from_detokenizer)
            except zmq.ZMQError:
                raise
            except Exception:
                logger.exception("a message of the engine could not be read; it is dropped")

    async def _handle(self, received: Any) -> None:
        """Never raises because of a message's content."""
        states = {rid: self.rid_to_state.get(rid) for rid in getattr(received, "rids", None) or [received.rid]}
        try:
            if isinstance(received, BATCH_OUTPUTS):
                await self._handle_batch_output(received)
            else:
                self._result_dispatcher(received)
        except Exception as error:
            logger.exception("handling %s failed; requests %s end", type(received).__name__, list(states))
            for rid, state in states.items():
                if state is not None:
                    self._end_request(rid, state, error)

    def _end_request(self, rid: str, state: Any, error: Exception) -> None:
        """Keeps an answer that SGLang completed before the exception; ends any other request with status 500."""
        if self.rid_to_state.get(rid) is state:
            self.abort_request(rid)
            del self.rid_to_state[rid]
            state.finished = True
            state.time_stats.set_finished_time()
            self._release_lora_once(state)
            meta_info = {"id": rid, "finish_reason": fault_reason(error), "completion_tokens": len(state.output_ids)}
            state.out_list.append({"text": state.get_text(), "output_ids": state.output_ids, "meta_info": meta_info})
        if state.out_list:
            state.event.set()

    def num_waiting(self) -> int:
        return len(self.rid_to_state)

    def end_waiting(self, error: Exception) -> None:
        for rid, state in list(self.rid_to_state.items()):
            self._end_request(rid, state, error)

    def ask_for_a_token(self) -> asyncio.Future[None]:
        """SGLang's own health check, whose scheduler leaves it out while it has other work. Cancelled, it is forgotten,
        as SGLang's routes do with theirs."""
        rid = f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}"

        async def ask() -> None:
            request = GenerateReqInput(
                rid=rid,
                input_ids=[0],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                log_metrics=False,
            )
            try:
                async for _ in TokenizerManager.generate_request(self, request, None):
                    return
            finally:
                self.rid_to_state.pop(rid, None)

        return asyncio.create_task(ask())

    def collect_metrics(self, state: Any, recv_obj: Any, i: int) -> None:
        try:
            super().collect_metrics(state, recv_obj, i)
        except Exception:
            logger.exception("request %s is not counted", recv_obj.rids[i])

    def convert_logprob_style(self, meta_info: dict[str, Any], state: Any, *args: Any, **kwargs: Any) -> None:
        """SGLang's last two positional arguments are the message and the request's index in the message."""
        message, place = args[-2:]
        rid = message.rids[place]
        try:
            super().convert_logprob_style(meta_info, state, *args, **kwargs)
            check_answer_logprobs(state)
            return
        except TooManyLogprobs as error:
            logger.info("request %s ends: %s", rid, error)
            reason = too_many_reason(error)
        except Exception as error:
            logger.exception("request %s ends: its log probabilities can't be given", rid)
            reason = fault_reason(error)
        meta_info["finish_reason"] = message.finished_reasons[place] = reason
        self.abort_request(rid)


def fault_reason(error: Exception) -> dict[str, Any]:
    """SGLang's `finish_reason` for a request that a server-side exception has ended."""
    if isinstance(error, EngineStalled):
        message, status, kind = (
            f"the server can't answer now: {error}",
            HTTPStatus.SERVICE_UNAVAILABLE,
            "ServiceUnavailable",
        )
    else:
        message = f"the server failed at this request ({type(error).__name__}); its log says why"
        status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
    return {"type": "abort", "message": message, "status_code": int(status), "err_type": kind}
