"""The whole run: the machine's limits and the server, and after its end the peers, one after the other, on the same
tokens."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.experts.limits import Limits, last_level_cache_bytes, measure_limits, memory_reader
from kt_runtime.bench.options import DTYPE_BYTES
from kt_runtime.bench.peer_place import ON_CPU, PeerPlace, place_here
from kt_runtime.bench.serve.fit import check_disk, check_memory
from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.bench.serve.gguf.served_file import ServedFile, served_file
from kt_runtime.bench.serve.no_step import NoStep
from kt_runtime.bench.serve.peers import HUGGING_FACE, LLAMA_CPP, Peer, ScriptPeer
from kt_runtime.bench.serve.plan import DECODE, PREFILL, Case, Plan
from kt_runtime.bench.serve.rows import Row
from kt_runtime.bench.serve.scores import Difference, Scores, difference
from kt_runtime.bench.serve.server_side import Measurements, ServerResult, ServerSide
from kt_runtime.bench.serve.work import ModelWork, model_work
from kt_runtime.bench.train.model import checkpoint, faster_dtype
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.cli.interrupts import Say, uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.errors import CheckpointError, NotFoundError
from kt_runtime.experts.machine import default_threads
from kt_runtime.experts.native import resolve_isa
from kt_runtime.serve.memory.machine import has_gpu
from kt_runtime.serve.models.checkpoint import count_parameters
from kt_runtime.serve.models.checkpoint_files import read_config
from kt_runtime.serve.models.presets import is_preset, load_preset


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Returns the JSON that docs/bench.md describes. Raises errors in the options, and InvalidValueError if memory or
    disk do not suffice, before anything is made."""
    config = _config(plan.model)
    cases, dtype = plan.cases(config), plan.dtype or faster_dtype()
    check_memory(plan, cases, config, dtype)
    check_disk(plan, cases, config)
    no_step, scripts = NoStep(say), _script_peers(plan, say)
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(TrainPlan(model=plan.model), directory)
        with served_file(model, plan.gguf, directory, say) as file:
            read = model if file is None else file.path
            limits = _limits(say)
            side = ServerSide(plan, cases, config, dtype, say)
            server = side.measure(read, directory)
            if plan.with_sglang:
                no_step.measure(side, read, directory / "no-step")
            limits = _limits(say, limits)
            for peer in scripts:
                place, scored = place_of(peer, config, dtype), server.scores.prompts
                measure_script(peer, model, server.measured, dtype, directory, place, file, scored)
        plain = _plain_scores(plan, model, server.scores, directory, say)
    peers: list[Peer] = [*[no_step] * plan.with_sglang, *scripts]
    work = model_work(config if file is None else file.config, dtype)
    rows = [_row(plan, case, work, server, peers) for case in cases]
    return {
        "machine": _machine(limits),
        "serving": _serving(plan, dtype, server) | {"gguf": None if file is None else file.as_json()},
        "peers": {peer.engine: peer.as_json() for peer in peers},
        "logprobs": _logprobs(server.scores, scripts, plain),
        "rows": [row.as_json(limits) for row in rows],
    }


def _plain_scores(plan: Plan, model: Path, scores: Scores, directory: Path, say: Say) -> list[list[float]]:
    """llama.cpp's log-probabilities with the weights that were quantized; empty without a quantized file or a peer."""
    if plan.gguf is None or plan.peer is None:
        return []
    peer = ScriptPeer(LLAMA_CPP, plan.peer, lambda line: say(f"unquantized: {line}"))
    measure_script(peer, model, {}, "bfloat16", directory, ON_CPU, scored=scores.prompts)
    return peer.scores


def _logprobs(scores: Scores, peers: list[ScriptPeer], plain: list[list[float]]) -> dict[str, Any]:
    """How far each peer's log-probabilities are from the server's; `format`: the quantized file's from those of the
    weights that were quantized."""

    def as_json(found: Difference | None) -> dict[str, Any] | None:
        return None if found is None else dataclasses.asdict(found)

    quantized = next((peer.scores for peer in peers if peer.engine == LLAMA_CPP), [])
    return {
        "peers": {peer.engine: as_json(difference(scores.logprobs, peer.scores)) for peer in peers},
        "format": as_json(difference(quantized, plain)),
    }


def _config(model: str) -> Mapping[str, Any]:
    if is_preset(model):
        return load_preset(model).config
    if not (Path(model) / "config.json").is_file():
        raise NotFoundError(f"--model {model!r}: neither a preset nor a checkpoint's directory")
    return read_config(Path(model))


def _script_peers(plan: Plan, say: Say) -> list[ScriptPeer]:
    peers = [ScriptPeer(HUGGING_FACE, Path(sys.executable), say)] if plan.has_hugging_face else []
    return peers + ([ScriptPeer(LLAMA_CPP, plan.peer, say)] if plan.peer is not None else [])


def place_of(peer: ScriptPeer, config: Mapping[str, Any], dtype: str) -> PeerPlace:
    """Where `peer` computes. llama.cpp's weights are in bf16 whatever the server's dtype."""
    weights = count_parameters(config).total
    return place_here(config, weights * DTYPE_BYTES["bfloat16" if peer.engine == LLAMA_CPP else dtype])


def measure_script(
    peer: ScriptPeer,
    model: Path,
    server: Measurements,
    dtype: str,
    directory: Path,
    place: PeerPlace,
    file: ServedFile | None = None,
    scored: Sequence[list[int]] = (),
) -> None:
    """Runs `peer` on the server's cases. llama.cpp reads `file`; None: one that is written to `directory` first."""
    read = model if file is None else file.path
    if peer.engine == LLAMA_CPP and file is None:
        read = directory / "model.gguf"
        try:
            write_gguf_model(model, read)
        except (CheckpointError, OSError) as error:
            peer.fail(f"no GGUF file: {error}")
            return
    peer.measure(read, server, dtype, default_threads(), directory, place, scored)


def _limits(say: Say, earlier: Limits | None = None) -> Limits | None:
    """The rates now or `earlier`, whichever are higher. None on a machine with a GPU, where attention and dense layers
    are not limited by the CPU."""
    if has_gpu():
        return None
    say("limits of the machine")
    found = measure_limits(resolve_isa(None), default_threads(), memory_reader())
    return found if earlier is None else found.or_better(earlier)


def _machine(limits: Limits | None) -> dict[str, Any]:
    cpu = cpu_facts()
    facts = {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__}
    facts["last_level_cache_bytes"] = last_level_cache_bytes()
    return facts | {"limits": None if limits is None else dataclasses.asdict(limits)}


def _serving(plan: Plan, dtype: str, server: ServerResult) -> dict[str, Any]:
    names = ("model", "prompt_tokens", "new_tokens", "runs", "rank")
    return {name: getattr(plan, name) for name in names} | {"dtype": dtype, "step": server.step}


def _row(plan: Plan, case: Case, work: ModelWork, server: ServerResult, peers: list[Peer]) -> Row:
    """A case with adapters has the distinct experts that were counted for the base with as many streams."""
    ours = server.measured[case][0] if case in server.measured else None
    theirs = {peer.engine: peer.measured[case] for peer in peers if case in peer.measured}
    problem = server.problems.get(case)
    if case.kind == PREFILL:
        return Row(case, ours, work.prefill(case.size), peers=theirs, problem=problem)
    base = Case(DECODE, case.size)
    counts = [peer.measured[base].experts for peer in peers if base in peer.measured]
    counted = next((count for count in counts if count is not None), None)
    experts = work.expected_experts(case.size) if counted is None else counted
    context = plan.prompt_tokens + plan.new_tokens / 2
    whole = work.decode(case.size, context, experts, plan.rank if case.adapters else 0)
    step = None if case.adapters else work.native_step(case.size, context, experts)
    return Row(case, ours, whole, experts, counted is not None, theirs, step, problem)
