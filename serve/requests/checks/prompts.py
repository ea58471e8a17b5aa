"""Checks the number of prompts in a request, and that per-prompt lists have that length.

SGLang infers a list's type from its first entry, and indexes per-prompt lists without a length check. Errors in either
would end in SGLang's status 500, so both are checked here.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.serve.requests.bodies.bounds import MAX_PROMPTS, Body
from kt_runtime.serve.requests.bodies.chat import ChatCompletion
from kt_runtime.serve.requests.bodies.completions import Detokenize, TextCompletion
from kt_runtime.serve.requests.bodies.generate import Generate, LogprobFields, VertexGenerate
from kt_runtime.serve.requests.bodies.sampling import SamplingParams
from kt_runtime.serve.requests.bodies.scoring import Score
from kt_runtime.serve.requests.checks.checking import shortened
from kt_runtime.serve.requests.checks.refusal import Refusal

PER_PROMPT_OF_OPENAI = ("rid", "lora_path", "extra_key", "cache_salt")
PER_PROMPT = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *PER_PROMPT_OF_OPENAI,
)


def check_prompts(request: Body) -> None:
    """Raises Refusal (400)."""
    if isinstance(request, Generate):
        _check_generate(request)
    elif isinstance(request, VertexGenerate):
        _check_vertex(request)
    elif isinstance(request, TextCompletion):
        num_prompts = _num_of_list("prompt", request.prompt)
        _check_samples(num_prompts or 1, max(request.n, request.best_of or 1))
        _check_lists(request, num_prompts, PER_PROMPT_OF_OPENAI)
    elif isinstance(request, ChatCompletion):
        _check_lists(request, None, PER_PROMPT_OF_OPENAI)
    elif isinstance(request, Detokenize):
        _num_of_list("tokens", request.tokens)
    elif isinstance(request, Score):
        if isinstance(request.items, list):
            _one_kind("items", request.items)
            if isinstance(request.items[0], str) is not isinstance(request.query, str):
                raise Refusal(400, "query and items must both be text or both be token ids", field="items")
        _one_kind("label_token_ids", request.label_token_ids)


def _check_generate(request: Generate) -> None:
    if (request.text is None) is (request.input_ids is None):
        raise Refusal(400, "either text or input_ids must be given, and not both", field="text")
    if request.text is not None:
        num_prompts = len(request.text) if isinstance(request.text, list) else None
    else:
        assert request.input_ids is not None
        continues = request.session_params is not None and not request.input_ids
        num_prompts = None if continues else _num_of_list("input_ids", request.input_ids)
    _check_fields(request, num_prompts)


def _check_vertex(request: VertexGenerate) -> None:
    kinds = {(one.text is None, one.input_ids is None) for one in request.instances}
    if request.instances and kinds not in ({(True, False)}, {(False, True)}):
        raise Refusal(400, "each of instances must have text, or each input_ids", field="instances")
    if request.parameters is not None:
        if request.parameters.stream:
            raise Refusal(400, "parameters.stream: this route does not stream", field="parameters.stream")
        _check_fields(request.parameters, len(request.instances))


def _check_fields(request: LogprobFields, num_prompts: int | None) -> None:
    """`num_prompts` None: one prompt, not in a list. For n samples SGLang turns the prompt into a batch."""
    sampling = request.sampling_params
    each = [sampling] if isinstance(sampling, SamplingParams) else sampling or []
    if len({one.n for one in each}) > 1:
        raise Refusal(400, "sampling_params: n must be the same for all prompts", field="sampling_params")
    samples = each[0].n if each else 1
    _check_samples(num_prompts or 1, samples)
    _check_lists(request, num_prompts, PER_PROMPT)
    ids = request.token_ids_logprob
    if ids is not None and ids:
        nested = _one_kind("token_ids_logprob", ids)
        if nested and len(ids) != num_prompts:
            raise _wrong_length("token_ids_logprob", ids, num_prompts)
    for one in each:
        if sum(grammar is not None for grammar in (one.json_schema, one.regex, one.ebnf, one.structural_tag)) > 1:
            message = "only one of json_schema, regex, ebnf and structural_tag may be given"
            raise Refusal(400, f"sampling_params: {message}", field="sampling_params")


def _check_samples(num_prompts: int, samples: int) -> None:
    if num_prompts * samples > MAX_PROMPTS:
        raise Refusal(
            400,
            f"{num_prompts} prompts with n {samples} are {num_prompts * samples} sequences; one request may have "
            f"{MAX_PROMPTS}",
            field="n",
        )


def _check_lists(request: Any, num_prompts: int | None, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(request, name)
        if isinstance(value, list) and len(value) != num_prompts:
            raise _wrong_length(name, value, num_prompts)


def _wrong_length(name: str, value: list[Any], num_prompts: int | None) -> Refusal:
    expected = "one value, since there is one prompt" if num_prompts is None else f"one value for each of {num_prompts}"
    return Refusal(400, f"{name}: a list of {len(value)} for {num_prompts or 1} request(s); must be {expected}", name)


def _num_of_list(name: str, value: Any) -> int | None:
    """The number of prompts in a text, list of texts, list of token ids or list of such lists; None: one prompt."""
    if isinstance(value, str):
        return None
    if not value:
        raise Refusal(400, f"{name}: must have at least one entry", field=name)
    _one_kind(name, value)
    if isinstance(value[0], int):
        return None
    if len(value) > MAX_PROMPTS:
        raise Refusal(400, f"{name}: {len(value)} prompts; one request may have {MAX_PROMPTS}", field=name)
    for position, one in enumerate(value):
        if isinstance(one, list) and not one:
            raise Refusal(400, f"{name}[{position}]: must have at least one entry", field=name)
    return len(value)


def _one_kind(name: str, values: list[Any]) -> bool:
    """Whether the entries are lists. Raises Refusal for a mixture."""
    first = type(values[0])
    for position, value in enumerate(values):
        if type(value) is not first:
            raise Refusal(
                400, f"{name}[{position}] {shortened(value)}: all entries must be of the kind of the first", field=name
            )
    return first is list
