"""SGLang's own scheduler in this process, with a tiny model and our patches, driven step by step without sockets."""

from __future__ import annotations

import contextlib
import functools
import json
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kt_runtime.families import family_for
from kt_runtime.sglang_patch.arguments import config_options

ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "kt_cpu", "--disable-overlap-schedule"),
    *("--disable-shared-experts-fusion", "--disable-cuda-graph", "--enable-lora", "--lora-backend", "torch_native"),
    *("--max-lora-rank", "8", "--max-loras-per-batch", "4", "--max-total-tokens", "2048", "--page-size", "8"),
    *("--chunked-prefill-size", "64", "--max-running-requests", "8"),
)
# Without a number of states SGLang reserves a share of the machine's memory, and fills gigabytes with zeros.
STATES = ("--page-size", "1", "--max-mamba-cache-size", "64")


@functools.cache
def patch_sglang() -> None:
    """SGLang with our hooks, which stay for the rest of this process."""
    from sglang.srt.runtime_context import get_parallel  # noqa: F401  (SGLang resolves its platform first)

    from kt_runtime.sglang_patch.plugin import install_patches

    install_patches()


class Engine:
    """`ended`: finish reasons by request; `tokens` and `logprobs`: what was answered, by request; `prompt_logprobs`:
    of the prompt's tokens from the request's `logprob_start_len` on, but for a prompt's first token. `new_tokens`:
    how many a request asks for unless it says otherwise."""

    def __init__(self, scheduler: Any, config: Mapping[str, Any]) -> None:
        self.scheduler, self.config = scheduler, config
        self.new_tokens = 8
        self.ended: dict[str, dict[str, Any]] = {}
        self.controls: list[Any] = []
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        recorder = SimpleNamespace(send_output=self._record)
        scheduler.ipc_channels = SimpleNamespace(
            send_to_tokenizer=recorder, send_to_detokenizer=recorder, recv_from_rpc=None
        )
        scheduler.output_streamer.send_to_detokenizer = recorder

    def _record(self, output: Any, _route: Any = None) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        if isinstance(output, AbortReq):
            self.ended[output.rid] = output.finished_reason
        elif isinstance(output, BatchTokenIDOutput):
            for place, rid in enumerate(output.rids):
                self.tokens.setdefault(rid, []).extend(output.output_ids[place])
                if output.output_token_logprobs_val:
                    self.logprobs.setdefault(rid, []).extend(output.output_token_logprobs_val[place])
                if output.input_token_logprobs_val and output.input_token_logprobs_val[place]:
                    found = output.input_token_logprobs_val[place]
                    self.prompt_logprobs[rid] = [value for value in found if value is not None]
                if output.finished_reasons[place] is not None:
                    self.ended[rid] = output.finished_reasons[place]
        else:
            self.controls.append(output)

    def request(self, rid: str, prompt: list[int], **changes: Any) -> Any:
        """A greedy request of `new_tokens` as the frontend sends it. `changes` to it or to its sampling parameters."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True}
        known = set(SamplingParams.__struct_fields__)
        sampling |= {name: value for name, value in changes.items() if name in known}
        parameters = SamplingParams(**sampling)
        parameters.normalize(self.scheduler.tokenizer)
        values: dict[str, Any] = {
            "input_text": None, "input_ids": array("q", prompt), "input_embeds": None, "mm_inputs": None,
            "token_type_ids": None, "sampling_params": parameters, "return_logprob": True, "logprob_start_len": -1,
            "top_logprobs_num": 0, "token_ids_logprob": None, "stream": False, "time_stats": APIServerReqTimeStats(),
        }  # fmt: skip
        values |= {name: value for name, value in changes.items() if name not in known}
        return TokenizedGenerateReqInput(rid=rid, **values)

    def send(self, *messages: Any) -> None:
        self.scheduler.process_input_requests(list(messages))

    @torch.no_grad()
    def step(self) -> bool:
        """One turn of SGLang's event loop; False if there was nothing to do."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()  # raises where memory is missing
        scheduler.last_batch = batch
        return batch is not None or not scheduler.is_fully_idle()

    def run(self, *messages: Any) -> None:
        """Until every request has ended, and once more, so that SGLang looks for memory that is missing."""
        self.send(*messages)
        for _ in range(300):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to rest")

    def memory(self) -> tuple[int, int]:
        """Free KV slots, counting what the prefix cache may give up, and free rows for requests."""
        scheduler = self.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return free, scheduler.req_to_token_pool.available_size()

    def cached_tokens(self) -> int:
        return int(self.scheduler.tree_cache.total_size()[0])

    def clear(self) -> None:
        with mock.patch("gc.collect"):  # SGLang collects garbage after a flush: 8 ms, a thousand times in a file
            assert self.scheduler.flush_cache()
        self.ended, self.tokens, self.logprobs, self.prompt_logprobs, self.controls = {}, {}, {}, {}, []

    def load_experts(self, checkpoint: Path, **store: Any) -> None:
        """Replaces the experts by those of `checkpoint`, whose other weights are not read, and builds the step again.

        `store`: as `engine`. Call it at rest: what is cached has been computed with other experts.
        """
        from kt_runtime.sglang_patch import store as process_store
        from kt_runtime.sglang_patch.cpu import step

        self.clear()
        process_store.expert_store().close()
        process_store._store = None
        with _loading(store):
            process_store.open_store(str(checkpoint))
        step._build(None, self.scheduler.tp_worker.model_runner)


def _loading(store: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """One thread, unless `store` says otherwise: for tiny products threads would only wait for each other."""
    from kt_runtime.sglang_patch import store as process_store

    load, changes = process_store.ExpertStore.load, {"num_threads": 1, **store}
    return mock.patch.object(process_store.ExpertStore, "load", lambda *args, **kw: load(*args, **kw | changes))


@contextlib.contextmanager
def engine(model: Path, *options: str, **store: Any) -> Iterator[Engine]:
    """Around the checkpoint in `model`. SGLang must have been patched; one at a time in a process.

    `options`: SGLang's, which override `ARGUMENTS`. `store`: arguments of `ExpertStore.load`.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import PortArgs, prepare_server_args

    from kt_runtime.sglang_patch import store as process_store
    from kt_runtime.sglang_patch.cpu import step

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    targets = family_for(config).sglang_lora_targets(config)
    seen = [*ARGUMENTS, *(STATES if family_for(config).keeps_states else ()), *config_options(config), *options]
    arguments = prepare_server_args(["--model-path", str(model), *seen, "--lora-target-modules", *sorted(targets)])
    arguments.resolve_once()
    reset_context()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    threads = torch.get_num_threads()
    # SGLang collects garbage to measure free memory, of which the tests' pools need little: 50 ms for each scheduler.
    with _loading(store), mock.patch("gc.collect"):
        scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
    torch.set_num_threads(1)
    try:
        yield Engine(scheduler, config)
    finally:
        torch.set_num_threads(threads)
        step.forget()
        process_store.expert_store().close()
        process_store._store = None
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()
