"""Servers of GGUF files: what they answer, that they train in place, and that both agree.

In float32 quantized matrices multiply exactly, so that answers equal those of Hugging Face with the weights that the
file stands for. In bf16 activations are quantized to int8, in training as in serving. Most linear layers, and the head,
stay quantized as the experts do; of some the file has BF16 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from reference.checkpoints.gguf_models import dequantized, requantize
from reference.parity import agreement, sampled
from reference.place import Place
from reference.server import greedy

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import Preset, load_preset
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

NEW_TOKENS = 12
FLOAT32_TOLERANCE = 4e-5  # of a log-probability, as test_quantized_checkpoints.py
STEPS = 12


def wide_qwen() -> Preset:
    """Sizes that are whole blocks of the K types."""
    preset = load_preset("tiny-qwen3-moe")
    return msgspec.structs.replace(
        preset, name="wide-qwen", config={**preset.config, "hidden_size": 256, "moe_intermediate_size": 256}
    )


@dataclass(frozen=True)
class Served:
    """`plain`: a checkpoint of the same weights in float32."""

    api: ServerAPI
    plain: Path
    place: Place


def wide_deepseek() -> Preset:
    preset = load_preset("tiny-deepseek-v3")
    return msgspec.structs.replace(preset, name="wide-deepseek", config={**preset.config, "moe_intermediate_size": 256})


def started(
    preset: str | Preset, types: dict[str, str], split: int, dtype: str, place: Path, at: Place
) -> Iterator[Served]:
    model = make_model(preset, place / "model", seed=6)
    write_gguf_model(model, place / "bf16.gguf")
    whole = place / "whole.gguf"
    requantize(place / "bf16.gguf", whole, types)
    plain = dequantized(model, whole, place / "plain")
    served = whole
    if split:
        requantize(whole, place / "split.gguf", {}, split=split)
        served = min(place.glob("split-*.gguf"))
    options = at.arguments(["--adapter-dir", str(place / "adapters"), "--dtype", dtype])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))  # for the directory that stands for the file
        with server(str(served), options, place / "server.log") as api:
            yield Served(api, plain, at)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    types = {"blk.1.ffn_down_exps": "IQ4_XS", "ffn_down_exps": "Q8_0", "_exps": "MXFP4"}
    types |= {
        "ffn_gate.": "Q8_0",
        "ffn_up.": "Q4_0",
        "ffn_down.": "Q6_K",
        "_shexp": "Q4_0",
        "attn_q_a.": "Q5_0",
        "attn_kv_a_mqa.": "Q8_0",
    }
    types |= {"blk.1.attn_q_b.": "Q4_0", "attn_output.": "Q8_0", "output.": "MXFP4"}
    yield from started(wide_deepseek(), types, 11, "float32", tmp_path_factory.mktemp("exact"), place)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    types = {"ffn_down_exps": "Q6_K", "_exps": "Q4_K", "attn_output.": "Q8_0", "output.": "Q6_K"}
    types |= {"attn_v.": "Q6_K", "attn_q.": "Q4_K", "attn_k.": "Q4_K"}
    yield from started(wide_qwen(), types, 0, "bfloat16", tmp_path_factory.mktemp("rounded"), place)


def test_in_float32_answers_are_those_of_the_file_s_weights(exact: Served) -> None:
    tolerance = FLOAT32_TOLERANCE * exact.place.float32_factor
    largest = greedy.largest_difference(exact.api, exact.plain, NEW_TOKENS, tolerance)
    print(f"largest difference of a logprob {largest:.1e}")
    status = exact.api.get("/kt/status")
    assert status["expert_format"] == "int8_g32+iq4k_g32+mxfp4_g32"
    assert status["weights_copied_bytes"] == 0


def test_a_chat_uses_the_tokenizer_and_template_of_the_file(exact: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Where is Saltmere?"}], "max_tokens": 4}
    name = exact.api.get("/v1/models")["data"][0]["id"]
    answer = exact.api.post("/v1/chat/completions", {"model": name, **body})
    assert answer["usage"]["completion_tokens"] > 0


def test_training_on_it_lowers_a_loss_publishes_and_agrees_with_serving(rounded: Served) -> None:
    model = greedy.load_hugging_face(rounded.plain)
    with resident_client(rounded.api) as client:
        status = client.status(verify_weights=True)
        assert status.expert_format == "int4k_g32+int6k_g16"
        client.create_session("parity", LoraSettings(rank=8, alpha=16, seed=5))
        rows = np.random.default_rng(8).integers(3, 700, (4, 33)).tolist()
        batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
        losses = []
        for _ in range(STEPS):
            losses.append(client.forward_backward("parity", batch).loss)
            client.optim_step("parity", 0.005)
        assert losses[-1] < 0.8 * losses[0]
        client.publish("parity", "tuned")
        for adapter in (None, "tuned"):
            tokens, served = sampled(rounded.api, adapter)
            found = agreement(client, "parity", (tokens, served), "policy" if adapter else "base")
            print(f"{rounded.place} {adapter or 'base'}: {found}")
            rounded.place.check(found)
            if adapter is None:
                correct = np.array([greedy.logprobs_of(model, row)[-served.shape[1] :] for row in tokens])
                mean = float(np.abs(correct - served).mean())
                print(f"mean |difference| from the file's weights in float32 {mean:.4f}")
                assert mean <= 0.08
        assert client.status(verify_weights=True).fingerprint == status.fingerprint
        client.close_session("parity")


def test_a_truncated_file_is_refused_with_status_2(tmp_path: Path) -> None:
    model = make_model("tiny-qwen3-moe", tmp_path / "model", seed=6)
    write_gguf_model(model, tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-4096])
    with (
        pytest.raises(RuntimeFault, match="ended with status 2") as refused,
        server(str(tmp_path / "m.gguf"), [], tmp_path / "log"),
    ):
        pass
    assert "m.gguf: truncated (is the download complete?), or lying sizes: tensor" in str(refused.value)
