"""`report_to`: experiment trackers, each imported only when a recipe names it.

No data leave the machine unless the user has configured it: without WANDB_MODE, WANDB_API_KEY or a login, wandb runs
offline; the other trackers behave likewise.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kt_runtime.errors import InvalidValueError, UnknownNameError

PROJECT = "kt-runtime"
MLFLOW_PARAMETERS = 100  # limit of its REST API per request
WANDB_HOSTS = ("api.wandb.ai",)


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises UnknownNameError, or InvalidValueError naming a named tracker's missing package."""
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError("tracker", name, TRACKERS, where="report_to")
        if importlib.util.find_spec(name) is None:
            raise InvalidValueError(f"report_to: {name}: is not installed; `pip install {name}`, or report_to: none")


def open_trackers(
    names: tuple[str, ...], directory: Path, run_name: str, settings: Mapping[str, Any], first_step: int = 0
) -> list[Tracker]:
    """One tracker per name. `settings`: the recipe's values, for the tracker's record of the run.

    `first_step`: the step from which a run resumes; TensorBoard then hides its data of later steps.
    """
    check_trackers(names)
    return [TRACKERS[name](directory, run_name, settings, first_step) for name in names]


def named(values: Mapping[str, float]) -> dict[str, float]:
    """The keys as Hugging Face's trainer reports them: `train/loss`, `eval/loss`."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in values.items()
    }


class _TensorBoard:
    def __init__(self, directory: Path, run_name: str, settings: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(directory / "runs" / run_name), purge_step=first_step + 1 if first_step else None
        )
        self._writer.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in named(values).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path, run_name: str, settings: Mapping[str, Any], first_step: int) -> None:
        import wandb

        mode = None if wandb_is_configured(os.environ) else "offline"
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(project=project, name=run_name, dir=str(directory), mode=mode, config=dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(named(values), step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_is_configured(environment: Mapping[str, str]) -> bool:
    """True if the user has chosen a mode, given a key, or logged in: wandb then follows that choice."""
    if environment.get("WANDB_MODE") or environment.get("WANDB_API_KEY"):
        return True
    try:
        logins = netrc.netrc(environment.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    hosts = [*WANDB_HOSTS, environment.get("WANDB_BASE_URL", "").partition("://")[2].strip("/")]
    return any(host in logins for host in hosts if host)


class _Swanlab:
    def __init__(self, directory: Path, run_name: str, settings: Mapping[str, Any], first_step: int) -> None:
        import swanlab

        mode = None if os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY") else "offline"
        logs = str(directory / "swanlog")
        self._run = swanlab.init(
            project=PROJECT, experiment_name=run_name, logdir=logs, mode=mode, config=dict(settings)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(named(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Keeps its runs on this machine unless a space is configured."""

    def __init__(self, directory: Path, run_name: str, settings: Mapping[str, Any], first_step: int) -> None:
        import trackio

        self._run = trackio.init(project=PROJECT, name=run_name, config=dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(named(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """Writes below the output directory unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, directory: Path, run_name: str, settings: Mapping[str, Any], first_step: int) -> None:
        import mlflow

        self._mlflow = mlflow
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri((directory / "mlruns").resolve().as_uri())
        mlflow.start_run(run_name=run_name)
        named = [(key, str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(named), MLFLOW_PARAMETERS):
            mlflow.log_params(dict(named[start : start + MLFLOW_PARAMETERS]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(named(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


# The keys are both recipe names and package names.
TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "swanlab": _Swanlab,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}
