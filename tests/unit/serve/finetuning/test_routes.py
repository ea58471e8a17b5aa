"""The API as a client sees it, with trainers that the test plays: states, order, faults, restarts, pages, quotas."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.serve.finetuning import files, jobs, queue
from kt_runtime.serve.finetuning.routes import finetuning_routes, switched_off_routes
from kt_runtime.serve.http.route_table import Access, rule_for


def test_every_route_is_in_the_route_table() -> None:
    routes = [(method, route.path) for route in finetuning_routes(None).routes for method in route.methods]  # type: ignore
    assert len(routes) == 11
    for method, path in routes:
        rule = rule_for(method, path)
        assert rule is not None and rule.access in (Access.READ, Access.GUARDED), (method, path)
    assert rule_for("GET", "/v1/files/{file}/content").access is Access.GUARDED  # type: ignore[union-attr]
    for route in switched_off_routes().routes:
        assert "GET" in route.methods  # type: ignore[attr-defined]


def test_a_job_goes_through_its_states(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        created = await desk.create(suffix="x", metadata={"a": "b"})
        assert created["status"] == "validating_files" and created["hyperparameters"] == {}
        running = await desk.wait(created, "running")
        assert running["hyperparameters"] == {"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 1.0}
        trainer = await desk.trainer(0)
        assert trainer.connection.key == "the key of trainers" and "the key" not in repr(trainer.connection)
        for step in range(1, 6):
            trainer.trains(step)
            trainer.saves(step)
        trainer.exit_status = 0
        done = await desk.wait(created, "succeeded")
        assert done["fine_tuned_model"].startswith("ft.tiny.x.") and done["trained_tokens"] == 25
        shown = (await desk.ask("GET", f"fine_tuning/jobs/{done['id']}/checkpoints"))["data"]
        names = [one["fine_tuned_model_checkpoint"] for one in shown]
        assert names == [f"{done['fine_tuned_model']}.ckpt-step-{step}" for step in (5, 4, 3)]
        assert sorted(desk.adapters.served) == sorted(names)
        assert shown[1]["metrics"]["train_loss"] == 0.25 and shown[1]["step_number"] == 4
        said = await desk.messages(done)
        assert said[:3] == [
            f"Created fine-tuning job: {done['id']}",
            "Files validated, moving job to queued state",
            "Fine-tuning job started",
        ]
        assert said[-1] == "The job has successfully completed" and "Step 2/9: training loss=0.5000" in said
        while list(trainer.output.glob("checkpoint-*")):
            await asyncio.sleep(0.01)

    desk.run(scenario)


def test_one_job_trains_at_a_time_and_a_queued_one_can_be_cancelled(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        first, second, third = [await desk.create() for _ in range(3)]
        await desk.wait(first, "running")
        for job in (second, third):
            await desk.wait(job, "queued")
        assert (await desk.ask("POST", f"fine_tuning/jobs/{second['id']}/cancel"))["status"] == "cancelled"
        again = await desk.ask("POST", f"fine_tuning/jobs/{second['id']}/cancel", 400)
        assert "has ended: it is cancelled" in again["error"]["message"]
        assert (await desk.ask("POST", f"fine_tuning/jobs/{first['id']}/cancel"))["finished_at"]
        await desk.wait(third, "running")
        await desk.trainer(1)
        assert [trainer.place.name for trainer in desk.trainers] == [first["id"], third["id"]]
        assert desk.trainers[0].exit_status == 130 and (await desk.job(first))["status"] == "cancelled"

    desk.run(scenario)


def test_a_job_cancelled_while_its_record_is_written_stays_cancelled_on_disk(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json, is_writing, may_write = jobs.write_json, threading.Event(), threading.Event()

    def slowly(path: Path, record: Any, **named: Any) -> None:
        if record["status"] == "queued":
            is_writing.set()
            assert may_write.wait(60)
        write_json(path, record, **named)

    monkeypatch.setattr(jobs, "write_json", slowly)
    made: list[Any] = []

    async def scenario(desk: Any) -> None:
        made.append(await desk.create())
        await asyncio.to_thread(is_writing.wait, 60)
        cancelling = asyncio.create_task(desk.ask("POST", f"fine_tuning/jobs/{made[0]['id']}/cancel"))
        while len(await desk.messages(made[0])) < 2:  # the cancellation's; its record is written next
            await asyncio.sleep(0.01)
        threading.Timer(0.2, may_write.set).start()
        await cancelling

    desk.run(scenario)
    assert jobs.JobStore(desk.place / ".finetuning").get(made[0]["id"]).status == "cancelled"


def test_what_a_client_has_seen_is_on_disk_after_the_server_s_end(desk: Any) -> None:
    """The server ends while the write of a record waits for a thread."""
    made: list[Any] = []

    async def scenario(desk: Any) -> None:
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        made.append(await desk.create())
        record = desk.jobs.get(made[0]["id"])
        while record.status == "validating_files":
            await asyncio.sleep(0)
            may_end = threading.Event()
            threads.submit(may_end.wait, 0.001)  # before the write, if that is next

    desk.run(scenario)
    assert jobs.JobStore(desk.place / ".finetuning").get(made[0]["id"]).status != "validating_files"


def test_jobs_train_in_the_order_of_their_creation(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the files of the second are checked after those of the third."""
    check, may_check = queue.prepare, threading.Event()

    def slowly(job: Any, *given: Any) -> Any:
        assert job.sequence != 2 or may_check.wait(60)
        return check(job, *given)

    monkeypatch.setattr(queue, "prepare", slowly)

    async def scenario(desk: Any) -> None:
        first, second = await desk.create(), await desk.create()
        desk.queue._preparing = asyncio.Semaphore(2)
        third = await desk.create()
        await desk.wait(third, "queued")
        may_check.set()
        await desk.wait(second, "queued")
        for number, job in enumerate((first, second, third)):
            (await desk.trainer(number)).exit_status = 0
            assert desk.trainers[number].place.name == job["id"]

    desk.run(scenario)


def test_a_failed_trainers_reason_names_the_file_and_no_path_of_the_server(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        job = await desk.create()
        trainer = await desk.trainer(0)
        desk.adapters.sessions += [f"{job['id']}-12345678", "another"]
        desk.adapters.served |= {f"rollouts-{job['id']}-12345678": "v", "mine": "v"}
        trainer.exit_status = 2
        failed = await desk.wait(job, "failed")
        assert failed["error"] == {
            "code": "training_failed",
            "message": f"{job['training_file']}:3: is wrong (x)",
            "param": None,
        }
        assert desk.resident.closed == [f"{job['id']}-12345678"] and list(desk.adapters.served) == ["mine"]
        assert failed["fine_tuned_model"] is None

    desk.run(scenario)


def test_a_restarted_server_resumes_the_interrupted_job_before_queued_ones(desk: Any) -> None:
    found: list[Any] = []

    async def before(desk: Any) -> None:
        found.extend([await desk.create() for _ in range(3)])
        await desk.wait(found[0], "running")
        (await desk.trainer(0)).trains(1)
        for job in found[1:]:
            await desk.wait(job, "queued")
        while len(await desk.messages(found[0])) < 4:
            await asyncio.sleep(0.01)

    async def after(desk: Any) -> None:
        assert desk.trainers[0].was_killed
        resumed = await desk.trainer(1)
        assert resumed.place.name == found[0]["id"]
        resumed.trains(1)
        resumed.trains(2)
        resumed.exit_status = 0
        await desk.wait(found[0], "succeeded")
        said = await desk.messages(found[0])
        assert sum(message.startswith("Step 1/9") for message in said) == 1
        assert "The server was restarted: the job resumes from its last checkpoint" in said
        for number, job in ((2, found[1]), (3, found[2])):
            assert (await desk.trainer(number)).place.name == job["id"]
            desk.trainers[number].exit_status = 0

    desk.run(before)
    desk.run(after)


def test_a_job_whose_record_is_written_slowly_is_not_overtaken(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save = jobs.JobStore.save

    def slow_for_the_first(store: jobs.JobStore, job: jobs.JobRecord) -> None:
        if job.sequence == 1 and job.status == "queued":
            time.sleep(0.5)
        save(store, job)

    async def scenario(desk: Any) -> None:
        created = [await desk.create() for _ in range(2)]
        for number, job in enumerate(created):
            assert (await desk.trainer(number)).place.name == job["id"]
            desk.trainers[number].exit_status = 0

    monkeypatch.setattr(jobs.JobStore, "save", slow_for_the_first)
    desk.run(scenario)


def test_a_job_that_every_server_dies_of_fails(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_RESTARTS", 2)
    jobs_made: list[Any] = []

    async def train(desk: Any) -> None:
        number = len(desk.trainers)
        if not jobs_made:
            jobs_made.append(await desk.create())
        job = await desk.job(jobs_made[0])
        while len(desk.trainers) <= number and job["status"] != "failed":
            await asyncio.sleep(0.01)
            job = await desk.job(jobs_made[0])

    for _ in range(4):
        desk.run(train)

    async def look(desk: Any) -> None:
        failed = await desk.job(jobs_made[0])
        assert failed["status"] == "failed" and "2 restarts" in failed["error"]["message"]

    desk.run(look)
    assert len(desk.trainers) == 3


def test_lists_have_pages(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        file_id = (await desk.upload())["id"]
        made = [(await desk.create(file_id, metadata={"n": str(number % 2)}))["id"] for number in range(5)][::-1]
        first = await desk.ask("GET", "fine_tuning/jobs", params={"limit": 2})
        assert [job["id"] for job in first["data"]] == made[:2] and first["has_more"]
        rest = await desk.ask("GET", "fine_tuning/jobs", params={"limit": 3, "after": made[1]})
        assert [job["id"] for job in rest["data"]] == made[2:] and not rest["has_more"]
        assert (rest["first_id"], rest["last_id"]) == (made[2], made[4])
        odd = await desk.ask("GET", "fine_tuning/jobs", params={"metadata[n]": "1"})
        assert [job["id"] for job in odd["data"]] == made[1::2]
        assert (await desk.ask("GET", "files", params={"order": "asc", "limit": 1}))["data"][0]["id"] == file_id
        for path, params, status in (
            ("fine_tuning/jobs", {"limit": 0}, 400),
            ("fine_tuning/jobs", {"limt": 1}, 400),
            ("fine_tuning/jobs", {"after": "ftjob-x"}, 404),
            ("files", {"order": "up"}, 400),
        ):
            assert (await desk.ask("GET", path, status, params=params))["error"]["message"]

    desk.run(scenario)


def test_files_and_jobs_are_bounded_and_survive_a_restart(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    monkeypatch.setattr(jobs, "MAX_JOBS", 1)
    kept: list[str] = []

    async def fill(desk: Any) -> None:
        kept.extend([(await desk.upload())["id"] for _ in range(2)])
        assert "delete some" in (await desk.upload(status=400))["error"]["message"]
        await desk.create(kept[0])
        assert "1 jobs" in (await desk.create(kept[0], 400))["error"]["message"]

    async def look(desk: Any) -> None:
        assert {one["id"] for one in (await desk.ask("GET", "files"))["data"]} == set(kept)
        assert (await desk.ask("DELETE", f"files/{kept[0]}"))["deleted"]
        monkeypatch.setattr(files, "MAX_TOTAL_BYTES", 100)
        assert "of 100" in (await desk.upload(status=400))["error"]["message"]
        assert [path.name for path in (desk.place / ".finetuning" / "files").glob(".tmp*")] == []

    desk.run(fill)
    (desk.place / ".finetuning" / "files" / ".tmp-left").write_text("by a crash")
    (desk.place / ".finetuning" / "files" / ("file-" + 24 * "y" + ".json")).write_text("{")
    desk.run(look)


def test_a_file_deleted_before_it_was_read_fails_the_job(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Any) -> None:
        file_id = (await desk.upload())["id"]
        desk.files.path(file_id).unlink()
        failed = await desk.wait(await desk.create(file_id), "failed")
        assert failed["error"]["code"] == "invalid_training_file" and "was deleted" in failed["error"]["message"]

    desk.run(scenario)


def test_an_upload_that_is_wrong_leaves_nothing(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        for answer in (
            await desk.upload({"messages": []}, status=400),
            await desk.upload(status=400, purpose="batch"),
            await desk.ask("POST", "files", 400, content=b"{}", headers={"Content-Type": "application/json"}),
        ):
            assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert list((desk.place / ".finetuning" / "files").iterdir()) == []
        for path in (desk.place / ".finetuning").rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path

    desk.run(scenario)


def test_a_body_that_is_no_job_is_refused(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        for content, said in ((b"[]", "JSON object"), (b'{"model": "tiny", "x": 1}', "unknown field"), (b"{", "JSON")):
            answer = await desk.ask("POST", "fine_tuning/jobs", 400, content=content)
            assert said in answer["error"]["message"], json.dumps(answer)
        desk.adapters.served["mine"] = "abc"
        assert (await desk.create(model="tiny:mine"))["model"] == "tiny:mine"
        assert (await desk.create(model="tiny:other", status=404))["error"]["param"] == "model"

    desk.run(scenario)
