"""OpenAI's own client, unmodified, fine-tunes on a real server: files, jobs of each method, faults, a restart."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from reference.place import Place
from system import forked_server
from system.conftest import Served

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model

openai = pytest.importorskip("openai", reason="SGLang needs it")

pytestmark = pytest.mark.preset("tiny-qwen3-moe")

BASE = "model"
"""The server names the model after its directory."""
WAIT_SECONDS = 600.0
ENDED = ("succeeded", "failed", "cancelled")
LETTERS = "aeho"


def asked(letter: str) -> dict[str, str]:
    return {"role": "user", "content": f"Continue: {' '.join(8 * letter)}"}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TALKS = [{"messages": [asked(letter), said(4 * letter)]} for letter in LETTERS]
PAIRS = [
    {"input": {"messages": [asked(x)]}, "preferred_output": [said(4 * x)], "non_preferred_output": [said("no")]}
    for x in LETTERS
]
TASKS = [{"messages": [asked(letter)], "letter": letter} for letter in LETTERS]
GRADER = {
    "type": "string_check",
    "name": "letter",
    "input": "{{sample.output_text}}",
    "reference": "{{item.letter}}",
    "operation": "ilike",
}
FAST = {"learning_rate_multiplier": 25.0}


def connected(api: ServerAPI, key: str = "any") -> Any:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0, timeout=120)


@pytest.fixture
def client(float32_server: Served) -> Iterator[Any]:
    """Unloads what the test has trained."""
    with connected(float32_server.api) as opened:
        yield opened
    for name in float32_server.api.get("/kt/status")["adapters"]:
        if name.startswith("ft."):
            float32_server.api.delete(f"/kt/adapters/{name}")


def upload(client: Any, rows: Sequence[Any], name: str = "rows.jsonl") -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file_id: str = client.files.create(file=(name, content), purpose="fine-tune").id
    return file_id


def wait_for(client: Any, job_id: str, until: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not until(job := client.fine_tuning.jobs.retrieve(job_id)):
        assert job.status not in ENDED, (job.status, job.error)
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def ended(client: Any, job_id: str) -> Any:
    return wait_for(client, job_id, lambda job: job.status in ENDED)


def steps_of(client: Any, job_id: str) -> list[dict[str, Any]]:
    """The data of the events of steps, the first step first."""
    events = list(client.fine_tuning.jobs.list_events(job_id, limit=7))
    return [event.data for event in reversed(events) if event.type == "metrics" and event.data["kind"] == "step"]


def answer(client: Any, model: str, letter: str = "e") -> Any:
    return client.chat.completions.create(model=model, messages=[asked(letter)], max_tokens=4, temperature=0, seed=1)


def test_jobs_of_every_method_train_one_after_the_other_and_their_models_answer(client: Any) -> None:
    jobs = client.fine_tuning.jobs
    file = client.files.retrieve(upload(client, TALKS, "talks.jsonl"))
    assert (file.filename, file.purpose, file.status) == ("talks.jsonl", "fine-tune", "processed")
    supervised = jobs.create(
        model=BASE,
        training_file=file.id,
        validation_file=upload(client, TALKS[:2]),
        suffix="my helper",
        seed=3,
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {**FAST, "n_epochs": 20, "batch_size": 4}}},
    )
    assert supervised.status == "validating_files" and supervised.fine_tuned_model is None
    dpo = jobs.create(
        model=BASE,
        training_file=upload(client, PAIRS),
        method={"type": "dpo", "dpo": {"hyperparameters": {**FAST, "n_epochs": 3, "beta": 0.2, "batch_size": "auto"}}},
    )
    hyperparameters = {**FAST, "n_epochs": 2, "batch_size": 2, "max_completion_tokens": 4}
    reinforcement = jobs.create(
        model=BASE,
        training_file=upload(client, TASKS),
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},
    )
    wait_for(client, supervised.id, lambda job: job.status == "running")
    assert {jobs.retrieve(job.id).status for job in (dpo, reinforcement)} <= {"validating_files", "queued"}
    done = [ended(client, job.id) for job in (supervised, dpo, reinforcement)]
    assert [job.status for job in done] == ["succeeded"] * 3, [job.error for job in done]
    assert [job.id for job in jobs.list(limit=2)][:3] == [reinforcement.id, dpo.id, supervised.id]
    assert [job.id for job in jobs.list(extra_query={"metadata[team]": "a"})] == [supervised.id]
    assert jobs.list(after=dpo.id, limit=1).data[0].id == supervised.id

    trained = done[0]
    assert re.fullmatch(r"ft\.model\.my-helper\.[A-Za-z0-9]{8}", trained.fine_tuned_model)
    assert trained.hyperparameters.n_epochs == 20 and trained.hyperparameters.batch_size == 4
    assert trained.seed == 3 and trained.trained_tokens > 0 and trained.finished_at >= trained.created_at
    steps = steps_of(client, trained.id)
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert steps[-1]["train_loss"] < steps[0]["train_loss"] / 2
    assert answer(client, trained.fine_tuned_model).choices[0].message.content == "eeee"
    assert trained.fine_tuned_model in [model.id for model in client.models.list()]
    checkpoints = list(jobs.checkpoints.list(trained.id))
    assert [one.step_number for one in checkpoints] == [20, 18, 16]
    assert checkpoints[0].metrics.full_valid_loss < 1 and checkpoints[0].metrics.train_loss > 0
    last = checkpoints[0].fine_tuned_model_checkpoint
    assert last == f"{trained.fine_tuned_model}.ckpt-step-20"
    assert answer(client, last).choices[0].message.content == "eeee"

    preferred = steps_of(client, dpo.id)
    assert done[1].method.dpo.hyperparameters.beta == 0.2 and len(preferred) == 3
    # The reference's sums are rounded to float32: by luck 1e-14 with AMX; 1.2e-8 and, elsewhere, 7.2e-8 with AVX2.
    assert preferred[0]["train_loss"] == pytest.approx(math.log(2), abs=6e-7)
    assert preferred[-1]["train_loss"] < 0.6
    rewarded = steps_of(client, reinforcement.id)
    assert [step["kl/k3"] for step in rewarded] == [0.0] * 4 and all("train_mean_reward" in step for step in rewarded)
    assert done[2].method.reinforcement.grader.operation == "ilike"
    for job in done[1:]:
        assert answer(client, job.fine_tuned_model).model == job.fine_tuned_model

    going_on = jobs.create(
        model=trained.fine_tuned_model, training_file=file.id, hyperparameters={"n_epochs": 1, "batch_size": 4}
    )
    assert ended(client, going_on.id).status == "succeeded"
    assert steps_of(client, going_on.id)[0]["train_loss"] < steps[0]["train_loss"] / 2


def test_files_come_back_as_they_were_and_are_deleted(client: Any) -> None:
    content = b"\xef\xbb\xbf" + "".join(f"{json.dumps(row)}\r\n\n" for row in TALKS).encode()
    file = client.files.create(file=("ümlaut.jsonl", content), purpose="fine-tune")
    assert (file.bytes, file.filename) == (len(content), "ümlaut.jsonl")
    assert client.files.content(file.id).read() == content
    assert file.id in [one.id for one in client.files.list(purpose="fine-tune")]
    assert client.files.list(purpose="batch").data == []
    assert client.files.delete(file.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no such file"):
            gone(file.id)


def test_a_wrong_request_is_refused_with_what_is_wrong(client: Any, float32_server: Served) -> None:
    talks, pairs = upload(client, TALKS), upload(client, PAIRS)
    create = client.fine_tuning.jobs.create

    def dpo(**hyperparameters: Any) -> dict[str, Any]:
        return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}

    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": "gpt-4o"}, openai.NotFoundError, "unknown model 'gpt-4o'"),
        ({"training_file": "file-" + 24 * "x"}, openai.NotFoundError, "training_file: no such file"),
        ({"training_file": "../../etc/passwd"}, openai.NotFoundError, "no such file"),
        ({"training_file": pairs}, openai.BadRequestError, "its rows are for method dpo"),
        ({"method": {"type": "magic"}}, openai.BadRequestError, "method.type"),
        ({"method": dpo(beta=-1)}, openai.BadRequestError, "beta"),
        ({"method": {**dpo(), "supervised": {}}}, openai.BadRequestError, "the method's type is 'dpo'"),
        ({"hyperparameters": {"n_epoch": 3}}, openai.BadRequestError, "did you mean 'n_epochs'"),
        ({"hyperparameters": {"batch_size": 0}}, openai.BadRequestError, "batch_size"),
        ({"suffix": 65 * "x"}, openai.BadRequestError, "suffix"),
        ({"extra_body": {"priority": 1}}, openai.BadRequestError, "unknown field"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, openai.BadRequestError, "read its events"),
        ({"seed": 2**40}, openai.BadRequestError, "seed"),
    ]
    for change, error, words in wrong:
        with pytest.raises(error, match=re.escape(words)):
            create(**{"model": BASE, "training_file": talks, **change})
    for grader in ({"type": "python", "source": "1/0", "name": "p"}, {**GRADER, "operation": "ne"}):
        with pytest.raises(openai.BadRequestError, match="grader"):
            create(
                model=BASE, training_file=talks, method={"type": "reinforcement", "reinforcement": {"grader": grader}}
            )
    nan = httpx.post(
        f"{float32_server.api.url}/v1/fine_tuning/jobs",
        content=b'{"model": "model", "training_file": "x", "hyperparameters": {"learning_rate_multiplier": NaN}}',
    )
    assert nan.status_code == 400 and "not valid JSON" in nan.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="line 2") as failed:
        client.files.create(file=("x.jsonl", json.dumps(TALKS[0]).encode() + b"\n{nonsense\n"), purpose="fine-tune")
    assert failed.value.param == "file"
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
    for path in ("ftjob-" + 24 * "x", "..%2F..%2Fetc"):
        with pytest.raises(openai.NotFoundError):
            client.get(f"/fine_tuning/jobs/{path}", cast_to=object)
    with pytest.raises(openai.PermissionDeniedError, match="cancel it"):
        client.fine_tuning.jobs.pause("ftjob-" + 24 * "x")


def test_a_file_that_only_the_method_finds_wrong_fails_the_job_with_the_line(client: Any) -> None:
    rows = [*TASKS[:2], {"messages": TASKS[2]["messages"], "letters": "h"}]
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=upload(client, rows),
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER}},
    )
    job = ended(client, job.id)
    assert (job.status, job.error.code, job.error.param) == ("failed", "invalid_training_file", "training_file")
    assert job.error.message == "line 3: no item.letter, which the grader's reference names"


def trainer_of(job_id: str) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if " train " in " ".join(command) and any(job_id in part for part in command):
            return process
    raise AssertionError(f"no trainer of {job_id}")


def test_a_killed_trainer_fails_its_job_and_a_cancelled_one_ends_and_nothing_is_left(
    client: Any, float32_server: Served
) -> None:
    jobs, talks = client.fine_tuning.jobs, upload(client, 25 * TALKS)
    long = {"n_epochs": 100, "batch_size": 1}  # 10,000 steps: none ends by itself meanwhile
    killed = jobs.create(model=BASE, training_file=talks, hyperparameters=long)
    cancelled = jobs.create(model=BASE, training_file=talks, hyperparameters=long)
    wait_for(client, killed.id, lambda _: len(steps_of(client, killed.id)) > 3)
    trainer_of(killed.id).send_signal(signal.SIGKILL)
    failed = ended(client, killed.id)
    assert (failed.status, failed.error.code) == ("failed", "training_failed") and "SIGKILL" in failed.error.message
    wait_for(client, cancelled.id, lambda _: len(steps_of(client, cancelled.id)) > 3)
    assert jobs.cancel(cancelled.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended: it is cancelled"):
        jobs.cancel(cancelled.id)
    deadline = time.monotonic() + 60
    while left := [
        one["session"] for one in float32_server.api.get("/kt/status")["sessions"] if "ftjob" in one["session"]
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert jobs.retrieve(cancelled.id).status == "cancelled" and jobs.retrieve(cancelled.id).fine_tuned_model is None
    assert answer(client, BASE).choices[0].finish_reason == "length"


def test_a_restarted_server_resumes_a_job_to_the_same_weights(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a key: trainers have one of the server's own. The first one is a new interpreter, as for users."""
    key = "the-key-of-clients"
    monkeypatch.setenv(forked_server.NEW_TRAINERS, "1")
    monkeypatch.setenv("KT_RUNTIME_API_KEY", key)
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    options = ["--dtype", "float32", "--max-total-tokens", "2048", "--adapter-dir", str(tmp_path / "adapters")]
    arguments = place.arguments([*options, "--max-lora-rank", "16"], [])
    settings = {"model": BASE, "seed": 5, "hyperparameters": {"n_epochs": 30, "batch_size": 4}}
    with (
        server(str(tmp_path / "model"), arguments, tmp_path / "first.log", api_key=key) as api,
        connected(api, key) as client,
    ):
        talks = upload(client, TALKS)
        interrupted = client.fine_tuning.jobs.create(training_file=talks, **settings)
        wait_for(client, interrupted.id, lambda _: len(steps_of(client, interrupted.id)) > 7)
        trainer = trainer_of(interrupted.id)
        assert "kt_runtime.cli.main" in trainer.cmdline()
    assert not trainer.is_running()
    monkeypatch.delenv(forked_server.NEW_TRAINERS)
    with (
        server(str(tmp_path / "model"), arguments, tmp_path / "second.log", api_key=key) as api,
        connected(api, key) as client,
    ):
        whole = client.fine_tuning.jobs.create(training_file=talks, **settings)
        done = [ended(client, job.id) for job in (interrupted, whole)]
        assert [job.status for job in done] == ["succeeded", "succeeded"], [job.error for job in done]
        said_of = [event.message for event in client.fine_tuning.jobs.list_events(interrupted.id, limit=100)]
        assert sum("the job resumes from its last checkpoint" in message for message in said_of) == 1
        losses = [[step["train_loss"] for step in steps_of(client, job.id)] for job in done]
        assert len(losses[0]) == 30 and losses[0] == losses[1]
        versions = [api.get(f"/kt/adapters/{job.fine_tuned_model}")["current"] for job in done]
        assert versions[0] == versions[1]
        assert answer(client, done[0].fine_tuned_model).choices[0].message.content
    for path in (tmp_path / "adapters" / ".finetuning").rglob("*"):
        if path.name in ("jobs", "files", "runs") or (path.suffix == ".jsonl" and "files" in path.parts):
            assert path.stat().st_mode & 0o077 == 0, path
