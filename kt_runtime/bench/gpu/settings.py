"""The servers of `bench gpu`: which options they get, and where their experts are.

kt-runtime's and SGLang's servers are compared at equal device memory for experts: as many experts of each layer, in
bf16, are resident in both. The rest of a server's memory follows from equal options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kt_runtime.bench.gpu.needs import BF16_BYTES, ExpertPlace
from kt_runtime.bench.serve.work import ModelWork

KT_RUNTIME, SGLANG = "kt-runtime", "sglang_paged"
PREFILL, DECODE, TRAINING = "prefill", "decode", "training"
NOT_STREAMED, STREAMED, MEASURED = (("--stream-experts", value) for value in ("off", "1", "auto"))
"""No call streams, every call but decoding does, and those above a threshold that the server measures."""
CARRIERS = 2
"""Pinned buffers of one expert each, within the size of `--gpu-experts` (`kt_runtime/experts/gpu/hot`)."""
HOT, NO_GRAPHS = "--gpu-experts", "--no-graphs"
ON_CPU = "experts on the CPU"
WITHOUT_GRAPHS = "experts on the CPU, no graphs"
STREAMS_EXPERTS = "experts streamed"
STREAMS_MANY = "experts streamed above a measured threshold"


@dataclass(frozen=True)
class Setting:
    """One server. `options`: beyond those of all servers. `kinds`: what is measured on it. `resident`: experts of each
    layer on the device."""

    engine: str
    name: str
    options: tuple[str, ...]
    kinds: tuple[str, ...]
    place: ExpertPlace

    @property
    def resident(self) -> int:
        return self.place.resident


def resident_counts(work: ModelWork, shares: Sequence[float]) -> list[int]:
    """Experts of a layer for `shares` of all, at least as many as a token takes: SGLang needs these. Ascending."""
    return sorted({max(work.top_k, round(share * work.num_experts)) for share in shares})


def resident_bytes(work: ModelWork, resident: int) -> int:
    """Device memory of `resident` experts of every layer in bf16."""
    return resident * work.moe_layers * work.expert_parameters * BF16_BYTES


def hot_bytes(work: ModelWork, resident: int) -> int:
    """What `--gpu-experts` needs for as many slots. The host's buffers that carry experts to the device count, too."""
    return resident_bytes(work, resident) + CARRIERS * work.expert_parameters * BF16_BYTES


def kt_settings(work: ModelWork, counts: Sequence[int]) -> list[Setting]:
    """Experts on the CPU (the first, whose answers the peers get), without graphs, streamed always and as the server
    chooses, and hot at each count."""
    cpu = (HOT, "0", *NOT_STREAMED)
    settings = [
        Setting(KT_RUNTIME, ON_CPU, cpu, (PREFILL, DECODE, TRAINING), ExpertPlace("cpu")),
        Setting(KT_RUNTIME, WITHOUT_GRAPHS, (*cpu, NO_GRAPHS), (DECODE,), ExpertPlace("cpu")),
        Setting(KT_RUNTIME, STREAMS_EXPERTS, (HOT, "0", *STREAMED), (PREFILL, TRAINING), ExpertPlace("streamed")),
        Setting(KT_RUNTIME, STREAMS_MANY, (HOT, "0", *MEASURED), (PREFILL,), ExpertPlace("streamed")),
    ]
    for count in counts:
        options = (HOT, str(hot_bytes(work, count)), *NOT_STREAMED)
        settings.append(Setting(KT_RUNTIME, hot_name(count), options, (DECODE,), ExpertPlace("cpu", count)))
    return settings


def sglang_settings(counts: Sequence[int]) -> list[Setting]:
    return [
        Setting(
            SGLANG,
            f"{count} paged experts a layer",
            ("--enable-paged-experts", "--paged-experts-num-resident", str(count), "--moe-runner-backend", "triton"),
            (PREFILL, DECODE),
            ExpertPlace("paged", count),
        )
        for count in counts
    ]


def hot_name(count: int) -> str:
    return f"{count} hot experts a layer"
