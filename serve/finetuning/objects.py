"""OpenAI's objects of jobs and checkpoints, and pages of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kt_runtime.errors import NotFoundError
from kt_runtime.serve.finetuning.jobs import JobRecord

ORGANIZATION = "kt-runtime"


def shown_job(job: JobRecord) -> dict[str, Any]:
    error = job.error
    method: dict[str, Any] = {"hyperparameters": job.hyperparameters}
    if job.grader is not None:
        method["grader"] = job.grader
    return {
        "object": "fine_tuning.job",
        "id": job.id,
        "created_at": job.created_at,
        "error": {"code": error.code, "message": error.message, "param": error.param} if error else None,
        "estimated_finish": None,
        "fine_tuned_model": job.result if job.status == "succeeded" else None,
        "finished_at": job.finished_at,
        "hyperparameters": job.hyperparameters if job.method == "supervised" else {},
        "integrations": [],
        "metadata": job.metadata,
        "method": {"type": job.method, job.method: method},
        "model": job.model,
        "organization_id": ORGANIZATION,
        "result_files": [],
        "seed": job.seed,
        "status": job.status,
        "suffix": job.suffix,
        "trained_tokens": job.trained_tokens,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
    }


def shown_checkpoints(job: JobRecord) -> list[dict[str, Any]]:
    """The newest first."""
    return [
        {
            "object": "fine_tuning.job.checkpoint",
            "id": one.id,
            "created_at": one.created_at,
            "fine_tuned_model_checkpoint": one.model,
            "fine_tuning_job_id": job.id,
            "metrics": one.metrics,
            "step_number": one.step,
        }
        for one in reversed(job.checkpoints)
    ]


def page(entries: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """The page behind the entry `after`. Raises NotFoundError for an unknown one."""
    begin = 0
    if after is not None:
        ids = [entry["id"] for entry in entries]
        if after not in ids:
            raise NotFoundError(f"after {after!r}: no such entry of this list")
        begin = ids.index(after) + 1
    data = list(entries[begin : begin + limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(entries),
    }
