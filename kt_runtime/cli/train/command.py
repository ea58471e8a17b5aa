"""`kt-runtime train`: LoRA fine-tuning on the resident model of a running server, or of one started for the run.

FILE is a recipe in YAML or JSON, KEY=VALUE overrides what it says: `kt-runtime train lora.yaml lora_rank=16`.

A recipe with do_predict alone answers its evaluation data, as `kt-runtime predict` does; one with do_eval alone
evaluates.

Ctrl-C ends a run after the current step, saves it and prints how to resume (exit status 130); a second Ctrl-C ends
it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kt_runtime.cli.connection import ServerAPI, resident_client, running_status, server_options, server_url
from kt_runtime.cli.main import INTERRUPTED_STATUS
from kt_runtime.cli.recipe_argument import recipe_arguments, recipe_of
from kt_runtime.cli.train.predict import predict_alone, prepare_prediction
from kt_runtime.cli.train.recipe_against_model import check_rank, check_targets, say_resident_notes
from kt_runtime.cli.train.recipe_problems import with_all_problems
from kt_runtime.cli.train.run_server import check_model, check_named_server, recipes_model, running_server
from kt_runtime.cli.train.temporary_adapter import adapter_in_use, rank_of
from kt_runtime.documents import is_secret
from kt_runtime.errors import KtError, NotFoundError

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.train.run.display import Display
    from kt_runtime.train.run.inputs import Inputs
    from kt_runtime.train.run.loop import RunResult
    from kt_runtime.train.serving_path import ServingPath
    from kt_runtime.train.stages.grpo import Sampling
    from kt_runtime.train.stages.reference_logprobs import Serving
    from kt_runtime.wire.replies import PublishReply

ABANDON_SECONDS = 3.0
# The timeout of one call: 16,384 tokens through the largest models' experts on the CPU, behind other sessions and many
# streams. The death of the server is still noticed within a minute, and Ctrl-C ends the waiting.
CALL_SECONDS = 86400.0


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The validated inputs of a training run. `config`: the content of the model's config.json. `stopping`: SGLang's
    parameters for the end of an answer in the recipe's template."""

    recipe: Recipe
    inputs: Inputs
    config: dict[str, Any]
    stopping: dict[str, Any]


@click.command(name="train", help=__doc__)
@click.option("--check", is_flag=True, help="Check recipe, data and adapter, print the plan, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@recipe_arguments
@server_options
def command(
    recipe_path: Path | None,
    arguments: tuple[str, ...],
    check: bool,
    as_json: bool,
    url: str | None,
    api_key: str | None,
) -> int:
    from kt_runtime.train.run.display import display_for

    recipe_path, overrides = recipe_of(recipe_path, arguments, "train")
    with display_for(sys.stderr if as_json else sys.stdout) as display:
        api = ServerAPI(server_url(url), api_key)
        status = running_status(url, api_key)
        with with_all_problems(recipe_path, overrides, "train", status):
            recipe = _read(recipe_path, overrides, display.say)
            if recipe.do_train or recipe.do_eval:
                if status is None:
                    check_named_server(url, recipe.model_name_or_path)
                prepared = _prepare(recipe, status, display.say)
            else:
                prediction = prepare_prediction(recipe, None, url, api_key, display.say, status)
        if not (recipe.do_train or recipe.do_eval):
            return predict_alone(recipe, prediction, url, api_key, display.say, check=check, as_json=as_json)
        if check:
            from kt_runtime.cli.train.check import check_run

            check_run(prepared.recipe, prepared.inputs, prepared.config, api if status else None, display.say)
            return 0
        result = _run(prepared, url, api_key, display)
        if result.interrupted:
            _say_how_to_resume(result, prepared.recipe, recipe_path, overrides, url, display.say)
    if as_json:
        click.echo(json.dumps(_as_json(result)))
    return INTERRUPTED_STATUS if result.interrupted else 0


def _read(path: Path, overrides: tuple[str, ...], say: Callable[[str], None]) -> Recipe:
    from kt_runtime.train.recipe import read_recipe
    from kt_runtime.train.run.trackers import check_trackers

    recipe, notes = read_recipe(path, list(overrides))
    for note in notes:
        say(note)
    if recipe.do_predict:
        from kt_runtime.train.predict.metrics import check_packages

        check_packages()
    check_trackers(recipe.report_to)
    return recipe


def _prepare(recipe: Recipe, status: dict[str, Any] | None, say: Callable[[str], None]) -> Prepared:
    """Reads and checks model directory, adapter, rule file, data and checkpoint, before any server is started or gets a
    request other than for its status. Raises their errors."""
    from kt_runtime.cli.train.starting_adapter import with_starting_adapter
    from kt_runtime.serve.memory.resident_notes import asked_placement
    from kt_runtime.serve.models.checkpoint_files import read_config
    from kt_runtime.train.predict.run import stopping
    from kt_runtime.train.render.rendering import Renderer
    from kt_runtime.train.rollouts.rewards import check_prompts
    from kt_runtime.train.run.inputs import read_inputs
    from kt_runtime.train.run.loop import check_lengths, check_routing_replay, resumed_from

    directory = recipes_model(recipe, status)
    config = read_config(directory)
    max_rank = None if status is None else int(status["max_lora_rank"])
    if status is not None:
        check_routing_replay(recipe, status.get("kept_routes") is not None)
    recipe = with_starting_adapter(recipe, config, max_rank, say)
    check_rank(recipe, max_rank)
    check_targets(recipe, config)
    asked_placement(recipe, config if status is None else None)
    renderer = Renderer(directory, recipe)
    if comparison := renderer.comparison():
        say(comparison)
    inputs = read_inputs(recipe, renderer, say)
    check_prompts(recipe, inputs.train, *inputs.evaluation.values())
    if status is not None:
        check_lengths(recipe, inputs, int(status["context_tokens"]))
    resumed_from(recipe, inputs, None)
    return Prepared(recipe, inputs, config, stopping(renderer))


def _run(prepared: Prepared, url: str | None, api_key: str | None, display: Display) -> RunResult:
    from kt_runtime.serve.memory.resident_notes import rule_file
    from kt_runtime.serve.models.checkpoint import count_parameters
    from kt_runtime.train.run.loop import run
    from kt_runtime.train.run.session import session_name
    from kt_runtime.train.stages.dpo import reference_adapter

    recipe = prepared.recipe
    parameters = count_parameters(prepared.config).active
    rank = max(recipe.lora_rank, rank_of(reference_adapter(recipe)))
    placement = rule_file(recipe)
    with running_server(
        recipe.model_name_or_path,
        url,
        api_key,
        display.say,
        max_lora_rank=rank,
        placement=placement,
        keeps_routes=recipe.stage == "grpo" and recipe.routing_replay != "off",
    ) as api:
        check_model(recipe.model_name_or_path, api.get("/kt/status"))
        with resident_client(api, timeout_s=CALL_SECONDS) as client:
            say_resident_notes(recipe, client.status(), display.say)
            try:
                result = run(
                    client,
                    recipe,
                    prepared.inputs,
                    display,
                    parameters=parameters,
                    serving=reference_serving(api, api_key, recipe, display.say),
                    sampling=rollout_sampling(api, api_key, recipe, prepared.stopping),
                )
            except KeyboardInterrupt:
                _abandon(api, session_name(recipe.output_dir))
                raise
        if result.published is not None and api.url != server_url(url):
            say_where_published(api, result.published, recipe.model_name_or_path, display.say)
        if recipe.do_predict and not result.interrupted:
            from kt_runtime.cli.train.predict import predict_after_training

            predict_after_training(api, api_key, recipe, display.say)
        return result


def say_where_published(api: ServerAPI, published: PublishReply, model: str, say: Callable[[str], None]) -> None:
    """Prints, for a server that ends with the run, the directory of the version and how to serve its name again."""
    from kt_runtime.cli.adapter.place import wait_until_written

    directory = Path(api.get("/kt/status")["adapter_directory"]) / published.name / published.version
    try:
        wait_until_written(directory, published.name)
    except NotFoundError:
        say(f"{published.name} was published, but its version was not written to {directory}: the next server lacks it")
        return
    say(
        f"the server of this run ends with it; {published.name} is in {directory}, and the next "
        f"`kt-runtime serve --model {model}` serves it again"
    )


def reference_serving(api: ServerAPI, api_key: str | None, recipe: Recipe, say: Callable[[str], None]) -> Serving:
    """A context manager that serves the reference's adapter, or the base, for `ref_logprobs: serving`."""
    from kt_runtime.train.serving_path import ServingPath

    @contextlib.contextmanager
    def served(adapter: Path | None) -> Iterator[ServingPath]:
        with adapter_in_use(api, None, adapter, say) as name:
            yield ServingPath(api.url, api_key, name, recipe.per_device_eval_batch_size)

    return served


def rollout_sampling(api: ServerAPI, api_key: str | None, recipe: Recipe, stopping: dict[str, Any]) -> Sampling | None:
    """For `stage: grpo`, how the run samples and judges. Runs the file of a reward that the user wrote."""
    if recipe.stage != "grpo":
        return None
    from kt_runtime.train.predict.run import sampling_parameters
    from kt_runtime.train.rollouts.rewards import reward_of
    from kt_runtime.train.rollouts.sampling import HttpSampler
    from kt_runtime.train.stages.grpo import Sampling

    parameters = sampling_parameters(recipe) | stopping | {"max_new_tokens": recipe.max_new_tokens}
    return Sampling(HttpSampler(api.url, api_key, parameters), reward_of(recipe))


def _abandon(api: ServerAPI, session: str) -> None:
    """Asks the server on a separate connection to close the session after its current call. Waits ABANDON_SECONDS."""
    with contextlib.suppress(KtError), resident_client(api, timeout_s=ABANDON_SECONDS) as client:
        client.close_session(session)


def _say_how_to_resume(
    result: RunResult,
    recipe: Recipe,
    recipe_path: Path,
    overrides: tuple[str, ...],
    url: str | None,
    say: Callable[[str], None],
) -> None:
    if result.checkpoint is None:
        say("interrupted before the first step: nothing to save")
        return
    if recipe.save_only_model:
        say(
            f"interrupted after step {result.steps}; the adapter is in {result.checkpoint}, without its optimizer's "
            "state (save_only_model: true), so the run can't resume from there"
        )
        return
    keys = {override: override.partition("=")[0].strip() for override in overrides}
    kept = [text for text, key in keys.items() if key != "resume_from_checkpoint" and not is_secret(key)]
    command = ["kt-runtime", "train", "--recipe", str(recipe_path), *(["--url", url] if url else []), *kept]
    say(f"interrupted after step {result.steps}; resume with:")
    say(f"  {shlex.join([*command, f'resume_from_checkpoint={result.checkpoint}'])}")


def _as_json(result: RunResult) -> dict[str, Any]:
    published = result.published
    return {
        **dataclasses.asdict(dataclasses.replace(result, published=None)),
        "published": published
        and {"name": published.name, "version": published.version, "publish_ms": published.publish_ms},
    }
