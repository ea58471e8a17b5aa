"""SGLang's own LoRA manager and layers in this process, with our patches, around a tiny model in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from reference import lora
from reference.resident.scheduler import Engine, engine, patch_sglang

MAX_RANK, SLOTS = 8, 4


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    return lora


@pytest.fixture(scope="session")
def patched_sglang() -> None:
    """SGLang with our hooks, which stay for the rest of this process."""
    patch_sglang()


@dataclass(frozen=True)
class Pools:
    """SGLang's device pool and its host pool of twice the size, both in memory. `layers`: the device's tensors."""

    device: Any
    host: Any
    layers: list[torch.Tensor]
    num_layers: int
    is_mla: bool

    def copy_to_host(self, device_slots: torch.Tensor) -> torch.Tensor:
        """Returns the host's slots."""
        from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine

        slots = self.host.alloc(len(device_slots))
        L2TransferEngine("direct").submit_device_to_host([L2Transfer(self.host, self.device, slots, device_slots)])
        return slots

    def copy_to_device(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine

        transfer = L2Transfer(self.host, self.device, host_slots, device_slots)
        L2TransferEngine("direct").submit_host_to_device(
            [transfer], transfer_layer_id_max=self.num_layers, on_layer_done=lambda layer: None
        )


@pytest.fixture(params=["MHA-layer_first", "MHA-page_first_direct", "MLA-layer_first", "MLA-page_first_direct"])
def pools(request: pytest.FixtureRequest, patched_sglang: None) -> Pools:
    """Three layers in bf16, 1024 tokens in pages of 64, filled at random."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    kind, layout = request.param.split("-")
    common = {"size": 1024, "page_size": 64, "dtype": torch.bfloat16, "layer_num": 3, "device": "cpu"}
    sizes = {"device_capacity_tokens": 1024, "start_layer": 0, "end_layer": 3}
    if kind == "MHA":
        device = memory_pool.MHATokenToKVPool(**common, head_num=2, head_dim=16, enable_memory_saver=False)
        host = MHATokenToKVPoolHost(device._mha_buffer_info(), 2.0, 0, 64, layout, **sizes)
        layers = [*device.k_buffer, *device.v_buffer]
    else:
        device = memory_pool.MLATokenToKVPool(**common, kv_lora_rank=32, qk_rope_head_dim=16, enable_memory_saver=False)
        host = MLATokenToKVPoolHost(device._mla_buffer_info(), 2.0, 0, 64, layout, **sizes, target_layer_num=3)
        layers = list(device.kv_buffer)
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return Pools(device, host, layers, 3, kind == "MLA")


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def served(
    request: pytest.FixtureRequest, patched_sglang: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """`model`, its `manager` with four slots of rank 8, and `config`."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, process_model_config, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    from kt_runtime.families import family_for
    from kt_runtime.serve.models.make_model import make_model
    from kt_runtime.sglang_patch import store

    directory = tmp_path_factory.mktemp("model") / request.param
    make_model(request.param, directory, seed=0)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    arguments = ServerArgs(
        model_path=str(directory),
        device="cpu",
        dtype="float32",
        attention_backend="kt_cpu",
        disable_overlap_schedule=True,
        disable_shared_experts_fusion=True,
        disable_cuda_graph=True,
        enable_lora=True,
        lora_backend="torch_native",
        max_lora_rank=MAX_RANK,
        lora_target_modules=family_for(config).sglang_lora_targets(config),
    )
    reset_context()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{rendezvous}"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    model_config = process_model_config()
    model = get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    manager = LoRAManager(
        base_model=model,
        base_hf_config=model_config.hf_config,
        max_loras_per_batch=SLOTS,
        load_config=LoadConfig(),
        dtype=torch.float32,
        server_args=arguments,
        lora_backend="torch_native",
        max_lora_rank=MAX_RANK,
        target_modules=set(family_for(config).sglang_lora_targets(config)),
    )
    assert get_parallel().tp_size == 1
    yield SimpleNamespace(model=model, manager=manager, config=config)
    store.expert_store().close()
    store._store = None
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    reset_context()


@pytest.fixture
def manager(served: SimpleNamespace) -> Iterator[Any]:
    """The manager without adapters; those of the test are dropped afterwards."""
    from kt_runtime.sglang_patch.lora.install import drop_adapter

    yield served.manager
    for lora_id in list(served.manager.loras):
        drop_adapter(served.manager, lora_id)
    served.manager.reset_lora_batch()


@pytest.fixture(scope="module")
def shared(patched_sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SGLang's own scheduler in this process, with a tiny DeepSeek-V3."""
    from kt_runtime.serve.models.make_model import make_model

    model = tmp_path_factory.mktemp("model") / "tiny"
    make_model("tiny-deepseek-v3", model, seed=2)
    with engine(model) as started:
        yield started


@pytest.fixture
def scheduled(shared: Engine) -> Engine:
    """The same, at rest and with an empty cache."""
    shared.clear()
    return shared
