"""A server on a GPU says what is where, and refuses what does not fit before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference.place import Place
from reference.server.command_line import run_command

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.device import memory
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.models.make_model import make_model

PRESETS = ("tiny-deepseek-v3", "tiny-qwen3-moe")


@pytest.fixture(scope="module", params=PRESETS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[ServerAPI]:
    directory = tmp_path_factory.mktemp("server")
    make_model(request.param, directory / "model", seed=4)
    arguments = place.arguments(["--adapter-dir", str(directory / "adapters")])
    with server(str(directory / "model"), arguments, directory / "server.log") as started:
        yield started


def test_dense_weights_are_on_the_device_and_experts_in_the_store(api: ServerAPI, place: Place) -> None:
    status = api.get("/kt/status")
    assert status["device"].startswith(place.device)
    assert status["weights_copied_bytes"] == 0 and status["expert_bytes"] > 0


def test_the_status_promises_no_equal_bits_and_no_step_of_the_cpu(api: ServerAPI) -> None:
    status = api.get("/kt/status")
    assert status["step"] != "running" and not status["exact"] and status["not_exact"]


def test_one_server_takes_a_part_of_the_device_s_memory(api: ServerAPI, device: torch.device) -> None:
    assert api.is_ready()
    free = memory(device)
    assert 0 < free.free_bytes < free.total_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--exact",), "--exact"),
        (("--max-total-tokens", str(10**10)), "KV cache"),
        (("--gpu-experts", "100TiB"), "--gpu-experts"),
    ],
    ids=["exact", "kv-cache", "hot-experts"],
)
def test_what_the_device_can_t_do_is_refused_with_status_2_before_loading(
    tmp_path: Path, place: Place, options: tuple[str, ...], said: str
) -> None:
    model = make_model(PRESETS[1], tmp_path / "model", seed=4)
    with (
        pytest.raises(RuntimeFault, match="ended with status 2") as refused,
        server(str(model), place.arguments(options), tmp_path / "log"),
    ):
        pass
    assert said in str(refused.value)
    assert "Load weight" not in (tmp_path / "log").read_text()


def test_doctor_names_the_device(device: torch.device, tmp_path: Path) -> None:
    done = run_command("doctor", "--json", directory=tmp_path)
    found = json.loads(done.stdout)
    assert found["gpus"][device.index]["total_bytes"] == memory(device).total_bytes
