"""Masks non-finite rows (NaN or Inf) and ends the requests that computed them; other requests continue.

An adapter with large finite weights may produce non-finite activations. These stay in the rows of their own request,
because attention, matrix products and experts compute each token separately. But the expert store refuses a call with a
non-finite row, sampling refuses the whole batch, and pages of such keys would enter the prefix cache. So rows are
checked where a check costs one read of data just written; non-finite rows are replaced by zeros and noted:

- the experts' input, after the store has refused it (`moe.experts_forward`; in the native step csrc/step/program.h); a
  call without such rows costs nothing;
- new keys and values on a CPU, in batches with an adapter (`attention`);
- the last hidden states, before the head, and the logits of each request, after bias and grammar.

SGLang 0.5.23 symbols and reasons:

- `ModelRunner.forward`: starts the notes of a forward pass.
- `LogitsProcessor.forward`, `Sampler._preprocess_logits`: here the complete hidden states and logits are available.
- `Req.update_finish_state`: drops a token that was sampled from masked logits from the answer.

After the pass, `batches.py` has the noted requests marked. A prefill discards a request's output with SGLang's
`discard_output_reason`, a decode step ends the request with `to_finish`. Neither caches the request's pages
(`skip_radix_cache_insert`). Training does its own checks and raises NumericsError.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.ranks import Exchange
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

logger = logging.getLogger(__name__)

SYMBOLS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
    "sglang.srt.layers.sampler.Sampler._preprocess_logits",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    "sglang.srt.lora.utils.generate_sequence_lengths",
)

_notes: Notes | None = None  # of the current or the last forward pass in this process


class Notes:
    """The non-finite rows of one forward pass. `lengths` [B]: number of tokens of each request, in batch order."""

    def __init__(self, lengths: list[int], has_adapters: bool) -> None:
        self.has_adapters = has_adapters
        self._lengths = lengths
        self._requests: set[int] = set()

    def note_rows(self, bad: torch.Tensor) -> None:
        """`bad`: bool [T], one for each token of the pass."""
        by_request = bad.cpu().split(self._lengths)
        self._requests.update(place for place, rows in enumerate(by_request) if bool(rows.any()))

    def note_requests(self, bad: torch.Tensor) -> None:
        """`bad`: bool [B]."""
        self._requests.update(place for place, is_bad in enumerate(bad.tolist()) if is_bad)

    def requests(self) -> list[int]:
        """Batch positions of the requests with a non-finite row, ascending."""
        return sorted(self._requests)


def install(hooks: Hooks) -> None:
    forward, logits, preprocess, update_finish_state = SYMBOLS[:4]
    hooks.around(forward, _note_forward)
    hooks.around(logits, _mask_hidden_states)
    hooks.after(preprocess, _mask_logits)
    hooks.after(update_finish_state, _drop_masked_token)


def present() -> Notes | None:
    """The notes of the current serving pass in this process; None outside a serving pass, for example in training."""
    return _notes


def bad_rows(matrix: torch.Tensor) -> torch.Tensor | None:
    """Bool [T]: the non-finite rows of [T, ...]; None if all rows are finite. Reads finite input once."""
    if math.isfinite(float(matrix.sum())):
        return None
    bad = ~torch.isfinite(matrix.reshape(matrix.shape[0], -1)).all(-1)
    return bad if bool(bad.any()) else None  # a sum of large finite numbers may overflow


def masked(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` [T, ...] of the current pass with zeros in its non-finite rows. Notes these rows."""
    bad = bad_rows(matrix)
    if bad is None or _notes is None:
        return matrix
    _notes.note_rows(bad)
    return matrix.masked_fill(bad.view(-1, *[1] * (matrix.dim() - 1)), 0)


def _note_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _notes
    lora_ids = getattr(forward_batch, "lora_ids", None) or ()
    _notes = Notes(_lengths(forward_batch), any(lora_id is not None for lora_id in lora_ids))
    return original(runner, forward_batch, *args, **kwargs)


def _lengths(forward_batch: Any) -> list[int]:
    """Tokens of each request. `generate_sequence_lengths` takes 0.1 ms of a decode step."""
    from sglang.srt.lora.utils import generate_sequence_lengths

    if forward_batch.forward_mode.is_decode():
        return [1] * int(forward_batch.batch_size)
    return [int(length) for length in generate_sequence_lengths(forward_batch, device="cpu").tolist()]


def _mask_hidden_states(
    original: Callable[..., Any], processor: Any, input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    # A graph of a decode step captures the head too. In its replays the check of the logits finds such a row.
    if _notes is not None and isinstance(hidden_states, torch.Tensor) and not device.is_capturing(hidden_states.device):
        hidden_states = masked(hidden_states)
    return original(processor, input_ids, hidden_states, *args, **kwargs)


def _mask_logits(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Zeroes non-finite rows of [B, V] in place. A grammar's -inf is allowed while at least one token remains."""
    largest = logits.amax(-1)
    if _notes is None or math.isfinite(float(largest.sum())):
        return logits
    bad = ~torch.isfinite(largest)
    if bool(bad.any()):  # a sum of large finite numbers may overflow
        _notes.note_requests(bad)
        logits[bad] = 0
    return logits


def mark_requests(scheduler: Any, batch: Any) -> None:
    """Ends the requests that the last pass has noted, and clears the notes."""
    notes = _notes
    forget()
    if notes is None:
        return
    found = notes.requests()
    if (exchange := group.exchange()) is not None:
        found = noted_by_any(exchange, found, len(batch.reqs))
    for place in found:
        _end(scheduler, batch, batch.reqs[place])


def noted_by_any(exchange: Exchange, found: list[int], num_requests: int) -> list[int]:
    """The requests that any rank has noted. A rank sees its own heads only, but all must end the same requests."""
    noted = torch.zeros((num_requests, 1), dtype=torch.int32)
    noted[found] = 1
    return exchange.all_columns(noted).any(1).nonzero().squeeze(1).tolist()


def forget() -> None:
    """Clears the notes after a forward pass."""
    global _notes
    _notes = None


def _end(scheduler: Any, batch: Any, req: Any) -> None:
    """Marks the request: SGLang ends it while processing the batch's result, or skips its next prefill chunk."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = f"{_source(scheduler, req)} computed numbers that are not finite (NaN or Inf) for this request"
    logger.error("request %s ends: %s", req.rid, message)
    reason = FINISH_ABORT(message, HTTPStatus.UNPROCESSABLE_ENTITY, "UnprocessableEntity")
    reason.is_not_finite = True
    req.skip_radix_cache_insert = True
    if batch.forward_mode.is_extend():
        req.discard_output_reason = reason
        if scheduler.chunked_req is req:
            scheduler._pending_chunked_abort_req = req
    else:
        req.to_finish = reason


def _source(scheduler: Any, req: Any) -> str:
    if req.lora_id is None:
        return "the model"
    reference = scheduler.tp_worker.model_runner.lora_manager.lora_refs.get(req.lora_id)
    name = req.lora_id if reference is None else reference.lora_name.rpartition("#")[0] or reference.lora_name
    return f"adapter {name!r}"


def _drop_masked_token(result: None, req: Any, new_accepted_len: int = 1) -> None:
    if getattr(req.finished_reason, "is_not_finite", False) and req.finished_len is None:
        req.finished_len = len(req.output_ids) - new_accepted_len
