"""Answers a dataset's questions with the resident model and compares the answers with the dataset's.

The last assistant message of each row is the label; the messages before it are the prompt, rendered as in training.
Files in `output_dir`, as in LLaMA-Factory: `generated_predictions.jsonl`, `predict_results.json`, and the results added
to `all_results.json`. A run that ends early leaves its answers in `generated_predictions.jsonl.partial`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from kt_runtime.errors import InvalidValueError, ServerUnreachableError
from kt_runtime.files import write_file
from kt_runtime.train.data import Preference, Question, read_datasets
from kt_runtime.train.data.reading import Read
from kt_runtime.train.predict.generation import Generator, Prompt
from kt_runtime.train.predict.metrics import Scorer, means
from kt_runtime.train.run.result_files import add_results
from kt_runtime.train.serving_path import Progress
from kt_runtime.train.stages.evaluation import identity_of, split

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.train.render.rendering import Renderer

PREDICTIONS_FILE = "generated_predictions.jsonl"
PARTIAL_FILE = f"{PREDICTIONS_FILE}.partial"
RESULTS_FILE = "predict_results.json"
STATUS_SECONDS = 30.0


@dataclass(frozen=True)
class Row:
    """`ids` int32: the prompt. `question`: the last message before the answer. `where`: the row's place."""

    ids: np.ndarray
    label: str
    question: str
    where: str


def predict(
    url: str,
    api_key: str | None,
    recipe: Recipe,
    renderer: Renderer,
    say: Callable[[str], None],
    adapter: str | None,
    *,
    preparation_s: float = 0.0,
    rows: Sequence[Row] | None = None,
) -> dict[str, float]:
    """Sends the prompts to the server at `url`, writes the files, and returns the content of `predict_results.json`.

    `adapter`: a name that the server serves, None for the base. `preparation_s`: seconds spent before, for the results.
    `rows`: the result of `read_rows`, if they were read before. Raises NotFoundError, before the first request, if a
    package for the metrics is missing; otherwise as `Generator.answer` and `read_rows`.
    """
    scorer = Scorer()
    context_tokens = _context_tokens(url, api_key)
    asked = _fitting(read_rows(recipe, renderer, say) if rows is None else rows, context_tokens, say)
    recipe.output_dir.mkdir(parents=True, exist_ok=True)
    who = f"adapter {adapter}" if adapter else "the base model"
    say(f"asking {who} for {len(asked)} answers to {_names(recipe)}, {recipe.per_device_eval_batch_size} at a time")
    answers, seconds = _answer(url, api_key, recipe, renderer, asked, context_tokens, say, adapter)
    figures = means(scorer.score(answer, row.label, row.question) for row, answer in zip(asked, answers, strict=True))
    results = {f"predict_{name}": value for name, value in figures.items()}
    results |= _speed(len(asked), recipe.per_device_eval_batch_size, seconds, preparation_s)
    results = dict(sorted(results.items()))
    add_results(recipe.output_dir, RESULTS_FILE, results)
    say(f"{recipe.output_dir / PREDICTIONS_FILE}: {len(asked)} predictions; figures are in {RESULTS_FILE}")
    return results


def sampling_parameters(recipe: Recipe) -> dict[str, Any]:
    """The recipe's sampling as SGLang's parameters. `top_k` up to 0: all tokens; without `do_sample`: the likeliest."""
    sampled = recipe.do_sample and recipe.temperature > 0
    return {
        "temperature": recipe.temperature if sampled else 0.0,
        "top_p": recipe.top_p if sampled else 1.0,
        "top_k": recipe.top_k if sampled and recipe.top_k > 0 else -1,
        "repetition_penalty": recipe.repetition_penalty,
        "skip_special_tokens": recipe.skip_special_tokens,
    }


def stopping(renderer: Renderer) -> dict[str, Any]:
    """SGLang's parameters for the end of an answer in the recipe's template, which the server may not know."""
    if not renderer.end:
        return {}
    ids = renderer.tokenizer.encode(renderer.end, add_special_tokens=False)
    return {"stop_token_ids": ids} if len(ids) == 1 else {"stop": [renderer.end]}


def read_rows(recipe: Recipe, renderer: Renderer, say: Callable[[str], None]) -> list[Row]:
    """The rows of the recipe's `eval_dataset` or, without one, those of `dataset` held out by `val_size`, or all of it.

    Raises as `read_datasets`, and InvalidValueError for a row that the template can't render, and if there is no row.
    """
    rows = [_row(example, renderer) for example in _read(recipe, renderer, say)]
    if not rows:
        raise InvalidValueError(f"{_names(recipe)}: no row is left to predict")
    return rows


def _names(recipe: Recipe) -> str:
    return ", ".join(recipe.eval_dataset or recipe.dataset)


def _read(recipe: Recipe, renderer: Renderer, say: Callable[[str], None]) -> Iterable[Read]:
    """With `val_size`, holds out the same rows as training with this recipe."""
    if recipe.eval_dataset or not recipe.val_size:
        return read_datasets(recipe, recipe.eval_dataset or recipe.dataset, say)
    rows: list[Read] = []
    identities = []
    for row in read_datasets(recipe, recipe.dataset, say):
        if (rendered := renderer.render(row)) is not None:
            rows.append(row)
            identities.append(identity_of(rendered))
    return split(rows, recipe.val_size, recipe.seed, identities)[1]


def _row(example: Read, renderer: Renderer) -> Row:
    label: dict[str, Any]
    if isinstance(example, Question):
        messages, label = example.messages, {"content": example.answer}
    elif isinstance(example, Preference):
        messages, label = example.messages, example.chosen
    else:
        messages, label = example.messages[:-1], example.messages[-1]
    ids = np.asarray(renderer.prompt(list(messages), example.tools), dtype=np.int32)
    question = messages[-1].get("content") if messages else None
    return Row(ids, _label(label), str(question or ""), example.where)


def _fitting(rows: Sequence[Row], context_tokens: int, say: Callable[[str], None]) -> list[Row]:
    """The rows whose prompt leaves room for an answer; names the others. Raises InvalidValueError if there is none."""
    too_long = [f"{row.where} ({len(row.ids)} tokens)" for row in rows if len(row.ids) >= context_tokens]
    if len(too_long) == len(rows):
        raise InvalidValueError(f"{too_long[0]}: the server takes {context_tokens} tokens; so no row can be answered")
    if too_long:
        more = f" and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        say(f"left out, since the server takes {context_tokens} tokens: {', '.join(too_long[:3])}{more}")
    return [row for row in rows if len(row.ids) < context_tokens]


def _label(message: Any) -> str:
    """The answer's text; tool calls as JSON, one a line."""
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([*filter(None, [message.get("content")]), *calls])


def _answer(
    url: str,
    api_key: str | None,
    recipe: Recipe,
    renderer: Renderer,
    rows: list[Row],
    context_tokens: int,
    say: Callable[[str], None],
    adapter: str | None,
) -> tuple[list[str], float]:
    """(answers in the order of the rows, seconds). Writes the predictions, also after a failure those so far."""
    answers: list[str | None] = [None] * len(rows)
    progress = Progress(len(rows), say)

    def answered(index: int, text: str) -> None:
        answers[index] = text
        progress.add()

    prompts = [Prompt(row.ids, min(recipe.max_new_tokens, context_tokens - len(row.ids)), row.where) for row in rows]
    sampling = sampling_parameters(recipe) | stopping(renderer)
    generator = Generator(url, api_key, adapter, sampling, recipe.per_device_eval_batch_size)
    try:
        say(str(generator.answer(prompts, answered)))
    except BaseException:
        if progress.done:
            path = recipe.output_dir / PARTIAL_FILE
            write_file(path, _lines(renderer, rows, answers))
            say(f"{path}: the {progress.done} of {len(rows)} answers that there are")
        raise
    seconds = progress.seconds
    write_file(recipe.output_dir / PREDICTIONS_FILE, _lines(renderer, rows, answers))
    (recipe.output_dir / PARTIAL_FILE).unlink(missing_ok=True)
    return [answer or "" for answer in answers], seconds


def _lines(renderer: Renderer, rows: list[Row], answers: list[str | None]) -> bytes:
    lines = [
        json.dumps(
            {"prompt": renderer.tokenizer.decode(row.ids.tolist()), "predict": answer, "label": row.label},
            ensure_ascii=False,
        )
        for row, answer in zip(rows, answers, strict=True)
        if answer is not None
    ]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")


def _speed(num_rows: int, rows_per_step: int, seconds: float, preparation_s: float) -> dict[str, float]:
    return {
        "predict_model_preparation_time": round(preparation_s, 4),
        "predict_runtime": round(seconds, 4),
        "predict_samples_per_second": round(num_rows / max(seconds, 1e-9), 3),
        "predict_steps_per_second": round(math.ceil(num_rows / rows_per_step) / max(seconds, 1e-9), 3),
    }


def _context_tokens(url: str, api_key: str | None) -> int:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/kt/status", headers=headers, timeout=STATUS_SECONDS, trust_env=False)
        answer.raise_for_status()
        return int(answer.json()["context_tokens"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerUnreachableError(f"{url}/kt/status: no status of a kt-runtime server ({error})") from None
