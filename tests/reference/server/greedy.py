"""Greedy answers of Hugging Face in float32, and how a server's are compared with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ANSWER_TOKENS = 12
Answer = tuple[list[int], list[float]]  # tokens, and log-probabilities of prompt and answer


@dataclass(frozen=True)
class Expected:
    """`tokens`: prompt and greedy continuation. `logprobs[i]`: of tokens[i + 1], given those before it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def load_hugging_face(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model


@torch.no_grad()
def hugging_face(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> Expected:
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return Expected(prompt, tokens, logprobs_of(model, tokens))


@torch.no_grad()
def expected_of(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> Expected:
    """As `hugging_face`, in one pass instead of one a token: an answer whose every token is the likeliest after those
    before it is the greedy one. Of another answer the tokens differ."""
    scores = model(torch.tensor([[*prompt, *answer][:-1]])).logits[0].log_softmax(-1)
    tokens = [*prompt, *scores[len(prompt) - 1 :].argmax(-1).tolist()]
    return Expected(prompt, tokens, scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    """Of tokens[1:], each given those before it."""
    scores = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def generate(api: Any, prompts: list[list[int]], new_tokens: int, **options: Any) -> list[dict[str, Any]]:
    """`api`: a ServerAPI. Greedy, with log-probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **options}
    answers: list[dict[str, Any]] = api.post("/generate", body)
    return answers


def ask(api: Any, prompt: list[int], adapter: str | None = None) -> Answer:
    """ANSWER_TOKENS tokens of the base or of an adapter, and what a comparison of bits needs."""
    answer = generate(api, [prompt], ANSWER_TOKENS, logprob_start_len=0, lora_path=[adapter])[0]
    return answer["output_ids"], given_logprobs(answer)


def given_logprobs(answer: dict[str, Any]) -> list[float]:
    """Of the prompt's tokens that the answer has and that have tokens before them, and of the answer's."""
    meta = answer["meta_info"]
    return [item[0] for item in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]


def check(answer: dict[str, Any], expected: Expected, tolerance: float) -> float:
    """The largest difference of a logprob, of prompt tokens too where the answer has them."""
    assert expected.prompt + answer["output_ids"] == expected.tokens
    found = given_logprobs(answer)
    largest = max(abs(a - b) for a, b in zip(found, expected.logprobs[-len(found) :], strict=True))
    assert largest <= tolerance
    return largest


def largest_difference(api: Any, directory: Path, new_tokens: int, tolerance: float) -> float:
    """Of a logprob, in prompts of up to 150 tokens and their answers, between server and model in `directory`."""
    model = load_hugging_face(directory)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 700, (length,), generator=generator).tolist() for length in (1, 7, 33, 150)]
    answers = generate(api, prompts, new_tokens, logprob_start_len=0)
    expected = [
        expected_of(model, prompt, answer["output_ids"]) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return max(check(answer, case, tolerance) for answer, case in zip(answers, expected, strict=True))
