"""A fake engine around tiny Hugging Face checkpoints, and the plain model to compare with.

The checkpoints' weights are bfloat16 numbers (the expert store keeps bfloat16) and everything is computed in float32.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.cases import choose
from reference.resident.configs import CONFIGS, FURTHER
from transformers import AutoConfig, AutoModelForCausalLM

from kt_runtime.adapters import AdapterTensors
from kt_runtime.errors import ConflictError
from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.families import LoraModule, family_for, resolve_targets
from kt_runtime.ranks import Exchange, HashingGroup
from kt_runtime.resident.fingerprint import WeightsFingerprint, hash_weights
from kt_runtime.resident.host import Decoded
from kt_runtime.resident.pacing.budget import IDLE, Load
from kt_runtime.resident.pacing.latencies import Latencies
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training.call import CallResult
from kt_runtime.resident.training.opening import Opening, read_start
from kt_runtime.resident.training.optimizer import StepSettings
from kt_runtime.resident.training.session import Session
from kt_runtime.resident.twin.batches import TrainingBatch
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin, dense_views
from kt_runtime.resident.wakeup import Wakeup
from kt_runtime.wire.messages import CrossEntropy, LoraSettings, Loss
from kt_runtime.wire.status import CacheTier, ExpertStreaming, GpuExperts, RankStatus


class FakeHost:
    """Implements kt_runtime.resident.host.Host: fused tensors as SGLang has them, and a served set of adapters."""

    engine_version = "fake"
    num_ranks = 1
    exchange: Exchange | None = None
    hashing_group: HashingGroup | None = None
    device = torch.device("cpu")
    max_lora_rank = 16
    context_tokens = 256
    chunked_prefill_tokens = 128
    step = not_exact = "the host is a fake"
    expert_streaming: ExpertStreaming | None = ExpertStreaming(
        threshold_tokens=96,
        measured=True,
        chunk_experts=4,
        ring_bytes=1 << 20,
        forward_tokens=12,
        backward_tokens=5,
    )
    gpu_experts: GpuExperts | None = GpuExperts(
        size_bytes=60,
        slot_bytes=10,
        slots=4,
        pinned=0,
        resident={1: [3]},
        decode_steps=2,
        hits=3,
        misses=1,
        hit_rate=0.75,
        moves=1,
        moved_bytes=10,
    )
    decoded = Decoded(step_batches=3, step_tokens=5, step_seconds=0.25, head_seconds=0.5, sampling_seconds=0.125)

    def __init__(
        self,
        directory: Path,
        max_adapters: int = 16,
        attends_in_float32: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.attends_in_float32, self.dtype = attends_in_float32, dtype
        self.step_exceptions = ["it has an adapter"]
        self.model = self.model_directory = str(directory)
        self.config = json.loads((directory / "config.json").read_text())
        family = family_for(self.config)
        self.hf = hugging_face(directory, dtype)
        self._tensors = fused_tensors(self.hf, self.config)
        self.experts = ExpertStore.load(
            directory,
            {layer: family.expert_prefix(layer) for layer in family.moe_layers(self.config)},
            ExpertShape(*family.expert_shape(self.config)),
            num_threads=1,
            rename=family.our_name,
            mlp=family.expert_mlp(self.config),
        )
        self.weights = WeightsFingerprint(
            lambda each: hash_weights(dense_views(self.config, self._tensors), self.experts, each)
        )
        self.routes: RouteStore | None = None
        self.serving, self.waiting = False, 0
        self.latencies = Latencies()
        self.max_adapters = max_adapters
        self.installed: dict[str, AdapterTensors] = {}
        self.preparing_threads: set[str] = set()
        self.slots_reserved = 0
        self.slot_bytes: list[int] = []  # of each reservation
        self.placed: list[object] = []
        self.reserved: set[object] = set()  # and neither released nor used: a used slot is released too, without effect
        self.frontend = Wakeup()
        self.versions: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.moves: list[tuple[str, str, str, Callable[[Exception | None], None]]] = []
        self.move_error: Exception | None = None
        self.answers_at_once = False
        self.closed = False
        self.cache = CacheTier(
            tier="device",
            page_tokens=8,
            page_bytes=64,
            pages=1,
            used_bytes=64,
            capacity_bytes=640,
            hits=2,
            misses=3,
            evictions=0,
        )

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def load(self) -> Load:
        """While it serves, one request decodes."""
        return Load(((0.0, 1),), self.waiting, True) if self.serving or self.waiting else IDLE

    def reserve_slot(self, num_bytes: int = 0) -> int:
        self.slot_bytes.append(num_bytes)
        self.slots_reserved += 1
        self.reserved.add(self.slots_reserved)
        return self.slots_reserved

    def release_slot(self, slot: object) -> None:
        self.reserved.discard(slot)

    def prepare_adapter(self, name: str, adapter: AdapterTensors, slot: object | None = None) -> AdapterTensors:
        self.preparing_threads.add(threading.current_thread().name)
        copied = {key: (pair.a.clone(), pair.b.clone()) for key, pair in adapter.modules.items()}
        return AdapterTensors.from_modules(adapter.rank, adapter.alpha, copied)

    def place_adapter(self, prepared: object, slot: object) -> object:
        self.placed.append(slot)
        return prepared

    def install_adapter(self, lora_id: str, name: str, version: str, prepared: object) -> None:
        assert isinstance(prepared, AdapterTensors)
        if len(self.installed) >= self.max_adapters:
            raise ConflictError(f"no room for another adapter: {len(self.installed)} are loaded")
        self.versions[lora_id] = version
        self.installed[lora_id] = prepared

    def drop_adapter(self, lora_id: str) -> None:
        self.installed.pop(lora_id, None)

    def move_name(self, name: str, version: str, lora_id: str, done: Callable[[Exception | None], None]) -> None:
        self.moves.append((name, version, lora_id, done))
        self.frontend.set()

    def settle_moves(self, seconds: float) -> None:
        if self.answers_at_once:
            self._answer_moves()

    def wakeups(self) -> list[Any]:
        return [self.frontend.fd]

    def poll(self) -> None:
        """The frontend answers between two turns, or `answers_at_once`."""
        self.frontend.clear()
        if not self.answers_at_once:
            self._answer_moves()

    def _answer_moves(self) -> None:
        moves, self.moves = self.moves, []
        for name, _, lora_id, done in moves:
            if self.move_error is None:
                self.names[name] = lora_id
            done(self.move_error)

    def ranks(self) -> list[RankStatus]:
        return []

    def cache_tiers(self) -> list[CacheTier]:
        return [self.cache]

    def close(self) -> None:
        self.weights.close()
        self.frontend.close()
        self.closed = True


@cache
def hugging_face(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Hugging Face's model of a checkpoint, which all hosts share: tests must not change it."""
    has_sinks = AutoConfig.from_pretrained(directory).model_type == "gpt_oss"
    implementation = "eager" if has_sinks else "sdpa"  # PyTorch's function has no sinks
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=implementation
    )
    return model.eval().requires_grad_(False)


def fused_tensors(model: torch.nn.Module, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The engine's tensors: rows of Hugging Face's, concatenated as the family's table says; vocabularies padded."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for source in family_for(config).twin_sources(config):
        pieces.setdefault(source.source, []).append((source.start, state[source.name].detach()))
    fused = {
        name: torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])]).clone()
        for name, parts in pieces.items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = fused[name]
        fused[name] = torch.cat([whole, whole.new_full((-len(whole) % 64, whole.shape[1]), float("nan"))])
    return fused | {family_for(config).rotary_table_of(config): rotary_table(model, config)}


def rotary_table(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.Tensor:
    """[positions, D]: D / 2 cosines, then D / 2 sines, of Hugging Face's module."""
    places = torch.arange(config["max_position_embeddings"])[None]
    tables = model.get_submodule("model.rotary_emb")(torch.zeros(1), places)
    half = model.get_submodule("model.rotary_emb").get_buffer("inv_freq").numel()
    both = (tables.real, tables.imag) if isinstance(tables, torch.Tensor) else tables
    cos, sin = (table[..., :half] for table in both)
    return torch.cat([cos[0], sin[0]], dim=-1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny checkpoint for each family."""
    return {name: save_checkpoint(tmp_path_factory.mktemp("model"), config) for name, config in CONFIGS.items()}


# Sinks and biases; recurrent layers; layers that choose keys.
FEW_FURTHER = ["deepseek_v32", "gpt_oss", "qwen3_next"]


@pytest.fixture(scope="session", params=choose(few=FEW_FURTHER, usual=sorted(FURTHER), every=sorted(FURTHER)))
def further_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), FURTHER[request.param])


@pytest.fixture
def further_lab(further_checkpoint: Path, attends_in_float32: bool) -> Lab:
    """A twin, once for each family of `FURTHER` and way to attend that it has."""
    config = json.loads((further_checkpoint / "config.json").read_text())
    if family_for(config).chooses_keys and not attends_in_float32:
        pytest.skip("refused on an accelerator")
    return Lab(FakeHost(further_checkpoint, attends_in_float32=attends_in_float32))


@pytest.fixture(scope="session")
def further_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a family of `FURTHER`."""
    return cache(lambda family: save_checkpoint(tmp_path_factory.mktemp("model"), FURTHER[family]))


@pytest.fixture
def make_further_host(further_directory: Callable[[str], Path]) -> Callable[..., FakeHost]:
    return lambda family, **settings: FakeHost(further_directory(family), **settings)


@pytest.fixture
def lab_of() -> Callable[[FakeHost], Lab]:
    return Lab


def save_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    torch.manual_seed(7)
    hf_config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.8, 1.2)
            else:
                parameter.normal_(0, 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.05, 0.05)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(params=[True, False], ids=["float32_attention", "sdpa"])
def attends_in_float32(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


WAYS = {f"{family}-{name}": (family, name) for family in sorted(CONFIGS) for name in ("float32_attention", "sdpa")}
"""Families, and how they attend. DeepSeek-V2 and V3 have the same attention."""
FEW_WAYS = ["deepseek_v3-float32_attention", "qwen3_moe-sdpa"]


@pytest.fixture(params=choose(few=FEW_WAYS, usual=list(WAYS), every=list(WAYS)))
def host(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> FakeHost:
    """A fake engine, once for each family and way to attend."""
    family, attention = WAYS[request.param]
    return FakeHost(checkpoints[family], attends_in_float32=attention == "float32_attention")


@pytest.fixture
def deepseek_host(checkpoints: dict[str, Path]) -> FakeHost:
    """For what does not depend on the family."""
    return FakeHost(checkpoints["deepseek_v3"])


@pytest.fixture
def make_host(checkpoints: dict[str, Path]) -> Callable[..., FakeHost]:
    return lambda family="deepseek_v3", **settings: FakeHost(checkpoints[family], **settings)


@pytest.fixture(scope="session")
def make_hosts(checkpoints: dict[str, Path]) -> Callable[..., FakeHost]:
    """As `make_host`, for fixtures that several tests share."""
    return lambda family="deepseek_v3", **settings: FakeHost(checkpoints[family], **settings)


class Lab:
    """A twin and its sessions, without service and scheduler."""

    def __init__(self, host: FakeHost) -> None:
        self.host = host
        self.twin = Twin(host)
        self.lora = LoraModules(self.twin)
        self._made = 0

    def session(self, targets: Sequence[str] = ("all",), *, fill: bool = True, **settings: Any) -> Session:
        """A session whose B is not zero (with `fill`), so that every gradient is there from the first call on."""
        self._made += 1
        values: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": list(targets), "seed": 3} | settings
        lora = LoraSettings(**values)
        modules = resolve_targets(self.host.config, lora.targets)
        name, key = f"session{self._made}", f"s{self._made}"
        start = read_start(Opening(name, key, lora, modules), None, None, self.twin.family, self.host)
        placing = self.lora.create(key, modules, start.masters, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout)
        session = Session(name, key, self.twin, self.lora, modules, lora, run_at_once(placing))
        if fill:
            generator = torch.Generator().manual_seed(11)
            with torch.no_grad():
                for name, parameter in sorted(session.parameters.items()):
                    if name.endswith("lora_B"):
                        parameter.normal_(0, 0.05, generator=generator)
        return session

    def forward_backward(
        self, session: Session, batch: TrainingBatch, max_tokens: int = 64, loss: Loss | None = None, **options: Any
    ) -> CallResult:
        return run_at_once(session.forward_backward(batch, loss or CrossEntropy(), max_tokens, **options))

    def forward(
        self, session: Session, batch: TrainingBatch, max_tokens: int = 64, loss: Loss | None = None, **options: Any
    ) -> CallResult:
        return run_at_once(session.forward(batch, loss or CrossEntropy(), max_tokens, **options))

    def step(self, session: Session, learning_rate: float = 1e-2, **settings: Any) -> float:
        return run_at_once(session.optim_step(StepSettings(learning_rate, **settings)))

    def fingerprint(self) -> str:
        """The hash of the twin's weights as they are now."""
        return hash_weights(self.twin.views(), self.host.experts)

    def plain_loss(
        self,
        session: Session,
        values: Mapping[str, torch.Tensor],
        batch: TrainingBatch,
        model: torch.nn.Module | None = None,
    ) -> torch.Tensor:
        """The loss by the plain Hugging Face model with the LoRA products added to its weights, for autograd."""
        total, start = torch.zeros(()), 0
        for logits in self.plain_logits(session, values, batch, model):
            part = slice(start, start + len(logits))
            logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(batch.targets[part].astype("int64"))[:, None])
            total = total - (logprobs[:, 0] * torch.from_numpy(batch.weights[part])).sum()
            start += len(logits)
        return total

    def plain_logits(
        self,
        session: Session,
        values: Mapping[str, torch.Tensor],
        batch: TrainingBatch,
        model: torch.nn.Module | None = None,
    ) -> list[torch.Tensor]:
        """[tokens, V] of each sequence, computed alone by that model, or by its copy `model`."""
        model = self.host.hf if model is None else model
        weights = merged_weights(model, session.modules, values, session.settings.alpha / session.settings.rank)
        sequences = np.split(batch.tokens.astype("int64"), np.cumsum(batch.lengths)[:-1])
        return [
            torch.func.functional_call(model, weights, (torch.from_numpy(tokens)[None],)).logits[0]
            for tokens in sequences
        ]


def merged_weights(
    model: torch.nn.Module, modules: Sequence[LoraModule], values: Mapping[str, torch.Tensor], scaling: float
) -> dict[str, torch.Tensor]:
    """The model's weights that LoRA changes, as W + scaling * B A."""
    parameters, weights = dict(model.named_parameters()), {}
    config: Any = model.config
    mlp = family_for(config.to_dict()).expert_mlp(config.to_dict())
    for module in modules:
        delta = scaling * values[f"{module.name}.lora_B"] @ values[f"{module.name}.lora_A"]
        if not module.num_experts:
            weights[f"{module.name}.weight"] = parameters[f"{module.name}.weight"] + delta
            continue
        parent, _, projection = module.name.rpartition(".")
        name = f"{parent}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
        whole = weights.get(name, parameters[name])
        if projection != "down_proj":
            other = torch.zeros_like(delta)
            pair = [delta, other] if projection == "gate_proj" else [other, delta]
            delta = torch.stack(pair, dim=2).flatten(1, 2) if mlp.is_interleaved else torch.cat(pair, dim=1)
        weights[name] = whole + (delta.mT if mlp.is_transposed else delta)
    return weights


@pytest.fixture
def lab(host: FakeHost) -> Lab:
    """A twin, once for each family."""
    return Lab(host)


@pytest.fixture
def deepseek_lab(deepseek_host: FakeHost) -> Lab:
    return Lab(deepseek_host)


@pytest.fixture
def make_lab(make_host: Callable[..., FakeHost]) -> Callable[..., Lab]:
    return lambda family="deepseek_v3", **settings: Lab(make_host(family, **settings))


@pytest.fixture
def make_batch() -> Callable[..., TrainingBatch]:
    """Sequences of the given lengths; a third of the tokens has weight 0."""

    def make(*lengths: int, seed: int = 0) -> TrainingBatch:
        random, total = np.random.default_rng(seed), sum(lengths)
        weights = random.uniform(0.1, 1.0, total) * (random.uniform(size=total) > 0.33)
        return TrainingBatch(
            list(lengths),
            random.integers(0, 300, total).astype(np.int32),
            random.integers(0, 300, total).astype(np.int32),
            weights.astype(np.float32),
        )

    return make


@pytest.fixture
def batch(make_batch: Callable[..., TrainingBatch]) -> TrainingBatch:
    return make_batch(17, 30, 9, 1)


@pytest.fixture
def make_pairs() -> Callable[..., TrainingBatch]:
    """Pairs from (prompt, chosen, rejected) lengths: the prompt's tokens are shared, the answers' targets count."""

    def make(*lengths: tuple[int, int, int], seed: int = 0) -> TrainingBatch:
        random = np.random.default_rng(seed)
        tokens, targets, weights, ends = [], [], [], []
        for prompt_length, *answers in lengths:
            prompt = random.integers(0, 300, prompt_length)
            for answer_length in answers:
                whole = np.concatenate([prompt, random.integers(0, 300, answer_length)])
                tokens.append(whole[:-1])
                targets.append(whole[1:])
                weights.append(np.arange(1, len(whole)) >= prompt_length)
                ends.append(len(whole) - 1)
        return TrainingBatch(
            ends,
            np.concatenate(tokens).astype(np.int32),
            np.concatenate(targets).astype(np.int32),
            np.concatenate(weights).astype(np.float32),
        )

    return make


@pytest.fixture
def pairs(make_pairs: Callable[..., TrainingBatch]) -> TrainingBatch:
    return make_pairs((9, 6, 11), (3, 8, 2), (14, 1, 7))
