"""Two hosts, each a network namespace of this machine, joined by a link of 10 Gbit/s: the answers of one process, and
what happens when a rank or the link fails."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from reference import lora
from reference.cache import faulty_disk
from reference.ranks import network
from reference.ranks.traffic import sent_bytes
from reference.server.greedy import Answer, ask
from system.ranks.two_hosts import OPTIONS, SECONDS, Pair, end_by, pair, ready, until

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.main import main
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.wire.replies import STEP_RUNNING

PROMPTS = ([5, 6, 7], list(range(3, 150)), [9])
CONFIG = load_preset("tiny-qwen3-moe").config
ROWS = "".join(
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": f"Continue: {letter} {letter}"},
                {"role": "assistant", "content": 4 * letter},
            ]
        }
    )
    + "\n"
    for letter in "aeho"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hosts")
    make_model("tiny-qwen3-moe", directory / "model", seed=6)
    lora.write_adapter(directory / "adapter", lora.random_adapter(CONFIG, rank=4, alpha=12.0, seed=1))
    return directory


def test_two_hosts_answer_as_one_process_and_share_its_registry(
    directory: Path, ends: tuple[network.End, network.End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a server of one process, which takes what they publish, and they what it publishes; until host 1 is killed
    while host 0 writes what it has fetched."""
    registry, faults = directory / "registry", directory / "faults.json"
    monkeypatch.setenv(faulty_disk.CONTROL, str(faults))
    shared = ("--registry", str(registry))
    alone = [*OPTIONS, "--adapter-dir", str(directory / "one"), *shared]
    with (
        server(str(directory / "model"), alone, directory / "one.log") as one,
        pair(directory, ends, "two", *shared) as hosts,
    ):
        ready(hosts)
        assert hosts.api.get("/kt/status?verify=true")["fingerprint"] == one.get("/kt/status")["fingerprint"] != ""
        versions = [load(hosts.api, directory / "adapter")]
        until(lambda: version_of(one) == versions[0], "the other server to have it")
        assert (registry / "names" / "a" / "00000001.json").is_file()
        assert answers(hosts.api) == answers(one)
        assert_status_names_hosts(hosts, ends)
        assert_nothing_listens_elsewhere(hosts, ends)
        assert_bytes(hosts, ends)
        assert_a_job_trains_the_model_of_one_process(hosts, one, directory)
        for seed in (2, 3):
            lora.write_adapter(directory / f"adapter-{seed}", lora.random_adapter(CONFIG, rank=8, alpha=9.0, seed=seed))
        versions.append(load(one, directory / "adapter-2"))
        until(lambda: version_of(hosts.api) == versions[1], "the hosts to have it")
        before = answers(hosts.api)
        assert before == answers(one)
        until(lambda: revisions(hosts.api) == (2, 2), "the hosts to have said so")
        faults.write_text(json.dumps({"directory": str(directory / "two" / ".registry"), "hang": ["make"]}))
        versions.append(load(one, directory / "adapter-3"))
        until(lambda: revisions(hosts.api) == (3, 2), "the hosts to fetch it")
        assert answers(hosts.api) == before != answers(one)
        end_by("host 1 killed", hosts, ends)
        assert version_of(one) == versions[2]
    assert {path.name for path in (directory / "two" / "a").iterdir() if path.is_dir()} == set(versions[:2])
    assert "Uvicorn" not in hosts.hosts[1].said()


def load(api: ServerAPI, adapter: Path) -> str:
    api.post("/kt/adapters", {"name": "a", "path": str(adapter)})
    return str(version_of(api))


def version_of(api: ServerAPI, name: str = "a") -> str | None:
    return {each["name"]: each["current"] for each in api.get("/kt/adapters")["adapters"]}.get(name)


def revisions(api: ServerAPI) -> tuple[int, int]:
    """The registry's newest one of the adapter, and the one that is in effect."""
    (found,) = (each for each in api.get("/kt/registry")["names"] if each["name"] == "a")
    return found["revision"], found["revision_here"]


def answers(api: ServerAPI) -> list[Answer]:
    return [ask(api, prompt, name) for prompt in PROMPTS for name in (None, "a")]


def assert_a_job_trains_the_model_of_one_process(hosts: Pair, one: ServerAPI, directory: Path) -> None:
    """A fine-tuning job on the hosts, whose files and checkpoints are in the directory that both see; and
    its recipe on one process."""
    upload: dict[str, Any] = {"files": {"file": ("rows.jsonl", ROWS)}, "data": {"purpose": "fine-tune"}}
    file = httpx.post(f"{hosts.api.url}/v1/files", **upload, timeout=SECONDS, trust_env=False).json()["id"]
    job, model = trained_by_a_job(hosts.api, "model", file)
    kept = directory / "two" / ".finetuning"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_RUNTIME_URL", one.url)
        recipe = kept / "jobs" / job / "recipe.json"
        assert main(["train", "--recipe", str(recipe), f"output_dir={directory / 'run'}", "publish=alike"]) == 0
    assert version_of(one, "alike") == version_of(hosts.api, model) is not None
    losses = [losses_of(run) for run in (kept / "runs" / job, directory / "run")]
    assert losses[0] == losses[1] and len(set(losses[0])) == 6


def trained_by_a_job(api: ServerAPI, model: str, file: str) -> tuple[str, str]:
    """Ids of the job and of its model."""
    hyperparameters = {"n_epochs": 3, "batch_size": 2, "learning_rate_multiplier": 25.0}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    job = api.post("/v1/fine_tuning/jobs", {"model": model, "training_file": file, "seed": 3, "method": method})["id"]
    until(lambda: api.get(f"/v1/fine_tuning/jobs/{job}")["status"] in ("succeeded", "failed", "cancelled"), "the job")
    ended = api.get(f"/v1/fine_tuning/jobs/{job}")
    assert ended["status"] == "succeeded", ended["error"]
    return job, ended["fine_tuned_model"]


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def assert_status_names_hosts(hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    ranks: list[dict[str, Any]] = []

    def one_is_slowest() -> bool:  # of the latest seconds, in which they must have computed
        ask(hosts.api, PROMPTS[0])
        ranks[:] = hosts.api.get("/kt/status")["ranks"]
        return [each["is_slowest"] for each in ranks].count(True) == 1

    until(one_is_slowest, "a rank that waits less than the other")
    assert [(each["host"], each["address"]) for each in ranks] == [(n, end.address) for n, end in enumerate(ends)]
    assert all(each["peak_bytes"] >= each["rss_bytes"] > 0 and 0 <= each["waiting_share"] <= 1 for each in ranks)


def assert_nothing_listens_elsewhere(hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    for host, end in zip(hosts.hosts, ends, strict=True):
        listens = {
            connection.laddr.ip
            for process in host.look()
            for connection in connections_within(process, end.namespace)
            if connection.status == psutil.CONN_LISTEN
        }
        assert end.address in listens and listens <= {end.address, "127.0.0.1"}, listens


def connections_within(process: psutil.Process, namespace: str) -> list[Any]:
    with contextlib.suppress(psutil.NoSuchProcess), network.within(namespace):
        return list(process.net_connections())
    return []


def assert_bytes(hosts: Pair, ends: tuple[network.End, network.End]) -> None:
    """Of a decoded token: what was counted on paper goes through the exchange, and the number of the token. The link
    carries headers too, which are most of it where a message has a hundred bytes."""
    exchanged = sent_bytes(CONFIG, num_ranks=2, activation_bytes=2).needed
    tokens, counted = 256, exchanged_bytes(hosts)
    before = [end.sent_bytes() for end in ends]
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}}
    assert len(hosts.api.post("/generate", body)["output_ids"]) == tokens
    measured = [(end.sent_bytes() - start) / tokens for end, start in zip(ends, before, strict=True)]
    of_ranks = (exchanged_bytes(hosts) - counted) / 2
    print(f"bytes of a token: on the link {measured}, exchanged {of_ranks / tokens:.0f}, on paper {exchanged:.0f}")
    assert min(measured) > exchanged
    assert tokens * exchanged <= of_ranks <= 1.02 * (tokens + 2) * (exchanged + 8)  # and some bytes about each batch


def exchanged_bytes(hosts: Pair) -> float:
    """Of both ranks. They tell it when a request comes, if they have not told it within a second; that request, of one
    token, may count or not."""
    time.sleep(1.2)
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    hosts.api.post("/generate", {"input_ids": [9], "sampling_params": sampling})
    return float(sum(each["sent_bytes"] for each in hosts.api.get("/kt/status")["ranks"]))


def test_the_link_carries_little_more_than_what_the_sharding_needs(
    tmp_path: Path, ends: tuple[network.End, network.End]
) -> None:
    """Of the shapes of bench-qwen3-moe. What ranks send depends neither on the number of experts nor on their width."""
    preset = load_preset("bench-qwen3-moe")
    config = {**preset.config, "num_experts": 8, "moe_intermediate_size": 64}
    preset = msgspec.structs.replace(preset, config=config)
    make_model(preset, tmp_path / "model")
    needed = sent_bytes(preset.config, num_ranks=2, activation_bytes=2).needed
    tokens = 256
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}}
    with pair(tmp_path, ends, "thin") as hosts:
        ready(hosts)
        assert hosts.api.get("/kt/status?verify=true")["step"] == STEP_RUNNING  # the weights are hashed by then
        hosts.api.post("/generate", body)
        before = [end.sent_bytes() for end in ends]
        hosts.api.post("/generate", body)
        of_ends = [(end.sent_bytes() - start) / tokens for end, start in zip(ends, before, strict=True)]
        end_by("link down", hosts, ends)
    ratio = sum(of_ends) / (2 * needed)
    print(f"bytes of a token: on the link {of_ends}, needed {needed:.0f}, ratio {ratio:.3f}")
    assert 1 < ratio <= 1.2  # 1.07 measured


def test_a_rank_that_is_stopped_while_it_loads_ends_all_hosts(
    directory: Path, ends: tuple[network.End, network.End]
) -> None:
    with pair(directory, ends, "loading") as hosts:
        stopped: list[psutil.Process] = []

        def found() -> bool:
            hosts.hosts[0].look()
            stopped[:] = [each for each in hosts.hosts[1].look() if "scheduler" in title(each)]
            return bool(stopped)

        until(found, "rank 1 to be started")
        stopped[0].suspend()
        began = time.monotonic()
        assert hosts.wait_for_the_end() == [1, 1]
        print(f"stopped while loading: all processes have ended after {time.monotonic() - began:.1f} s")
    why = f"rank 1 (process {stopped[0].pid} on host 1, 10.77.0.2) is stopped by a signal; the server ends"
    assert all(why in host.said() for host in hosts.hosts)


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.parametrize("of_host_1", [("--dtype", "float32"), ("--max-running-requests", "7")])
def test_hosts_with_other_options_are_refused_on_both(
    directory: Path, ends: tuple[network.End, network.End], of_host_1: tuple[str, ...]
) -> None:
    here = {"--dtype": "bfloat16", "--max-running-requests": "32"}[of_host_1[0]]
    with pair(directory, ends, "refused", of_host_1=of_host_1) as hosts:
        assert hosts.wait_for_the_end() == [2, 2]
    line = f"{of_host_1[0]}: host 0 has {here}, host 1 (10.77.0.2) has {of_host_1[1]}"
    assert all(f"the hosts differ, so nothing is loaded: {line}" in host.said() for host in hosts.hosts)


def test_a_rank_killed_while_it_publishes_leaves_nothing_half_published_and_a_restart_goes_on(
    directory: Path, ends: tuple[network.End, network.End]
) -> None:
    with pair(directory, ends, "publishing") as hosts:
        ready(hosts)
        hosts.api.post("/kt/adapters", {"name": "a", "path": str(directory / "adapter")})
        expected = ask(hosts.api, PROMPTS[1], "a")
        until(lambda: not hosts.api.get("/kt/status")["not_stored"], "the version to be on disk")
        lora.write_adapter(directory / "next", lora.random_adapter(CONFIG, rank=8, alpha=12.0, seed=2))
        errors: list[Exception] = []

        def publish() -> None:
            try:
                hosts.api.post("/kt/adapters", {"name": "a", "path": str(directory / "next")})
            except Exception as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        thread = threading.Thread(target=publish)
        end_by("rank 1 killed", hosts, ends, just_before=thread.start)
        thread.join(SECONDS)
    with server(
        str(directory / "model"), [*OPTIONS, "--adapter-dir", str(directory / "publishing")], directory / "again.log"
    ) as again:
        versions = again.get("/kt/adapters/a")["versions"]
        assert 1 <= len(versions) <= 2 and all(each["version"] for each in versions)
        if errors and len(versions) == 1:
            assert ask(again, PROMPTS[1], "a") == expected
    assert not list((directory / "publishing").glob(".tmp-*"))
