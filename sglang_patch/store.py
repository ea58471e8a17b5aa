"""The expert store of this process: the routed experts of SGLang's model, read once from its checkpoint.

Symbol (SGLang 0.5.23): `runtime_context.process_model_config`, read.

With several ranks the store holds this rank's experts, and results are to be summed over ranks (`shared_experts`).
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

from kt_runtime.errors import ConflictError, NotFoundError, UnknownNameError
from kt_runtime.experts import ExpertShape, ExpertStore, dense
from kt_runtime.experts.gguf import gguf_files
from kt_runtime.families import family_for, gguf
from kt_runtime.families.quantization import BF16, quantization_of
from kt_runtime.families.stack import ExpertMlp
from kt_runtime.ranks import SharedExperts
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.progress import LayersRead
from kt_runtime.sglang_patch.ranks import group

logger = logging.getLogger(__name__)

SYMBOLS = ("sglang.srt.runtime_context.process_model_config",)

_store: ExpertStore | None = None
_shared: dict[int, SharedExperts] = {}  # of several ranks, by layer
_store_lock = threading.Lock()


def expert_store() -> ExpertStore:
    """The process's expert store. Raises ConflictError before the model has been loaded."""
    if _store is None:
        raise ConflictError("the expert store is not open: no model with routed experts has been loaded")
    return _store


def shared_experts(layer: int) -> SharedExperts | None:
    """The experts of all ranks; None in a server of one rank."""
    return _shared.get(layer)


def keeps_experts_in_store(config: Any) -> bool:
    """Whether the expert store holds the experts of a model with this Hugging Face config."""
    try:
        family_for(config.to_dict())
    except UnknownNameError:
        return False
    return True


def model_config() -> Any:
    """SGLang's ModelConfig of this process."""
    from sglang.srt.runtime_context import process_model_config

    return process_model_config()


def open_store(directory: str) -> ExpertStore:
    """Opens the store of the checkpoint in `directory`. Later calls in the process return the same store.

    The store's instruction set and number of threads also hold for linear layers, norms and attention on a CPU
    (`dense.configure`).
    """
    global _store
    with _store_lock:
        if _store is None:
            _store = _load_store(Path(directory))
            if (exchange := group.exchange()) is not None:
                total = exchange.share.num_ranks * _store.shape.num_experts
                _shared.update({i: SharedExperts(own, exchange, total) for i, own in _store.layers.items()})
            dense.configure(_store.isa, _store.num_threads)
        return _store


def _load_store(directory: Path) -> ExpertStore:
    if not directory.is_dir():
        raise NotFoundError(
            f"model directory {str(directory)!r} does not exist; experts are read from a local checkpoint"
        )
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    family = family_for(config)
    settings = ResidentSettings.from_environment()
    prefix = gguf.expert_prefix if gguf_files(config.get("quantization_config")) else family.expert_prefix
    keys = {layer: prefix(layer) for layer in family.moe_layers(config)}
    shape, mlp = ExpertShape(*family.expert_shape(config)), family.expert_mlp(config)
    exchange = group.exchange()
    share = None if exchange is None else exchange.share.of(shape.num_experts, "experts")
    held = f"experts {share.start} to {share.stop - 1}" if share else "the routed experts"
    logger.info("reading %s of %d layers from %s", held, len(keys), directory)
    return ExpertStore.load(
        directory,
        keys,
        shape,
        isa=settings.expert_isa if settings else None,
        num_threads=settings.expert_threads if settings else None,
        expert_format=settings.expert_format if settings else None,
        progress=LayersRead(_checkpoint_bytes(config, shape, mlp) // group.num_ranks()),
        rename=family.our_name,
        mlp=mlp,
        share=share,
    )


def _checkpoint_bytes(config: dict[str, Any], shape: ExpertShape, mlp: ExpertMlp) -> int:
    """Bytes of one layer's routed experts in the checkpoint, up to padding."""
    quantization = quantization_of(config)
    stored = BF16 if quantization is None else quantization.expert_format
    up, down = (
        stored.packed_bytes(shape.intermediate, shape.hidden),
        stored.packed_bytes(shape.hidden, shape.intermediate),
    )
    return shape.num_experts * ((2 if mlp.has_gate else 1) * up + down)
