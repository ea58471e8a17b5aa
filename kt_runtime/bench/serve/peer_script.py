"""Runs the cases with Hugging Face or llama.cpp, in a process and perhaps an interpreter of their own.

The argument is a JSON file (`peers.ScriptPeer`). Prints one JSON line first, the facts, then one with the
log-probabilities of the scored prompts, then one for each case: seconds of each counted run, the share of the server's
tokens that this engine would have chosen too, and the mean number of distinct experts of a decode step, if the engine
reports its routing. Does not import kt_runtime.

An engine is fed the tokens that the server answered with, so that all sides read the same experts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

WARM_UP_STEPS = 16
EAGER = ("gpt_oss",)  # transformers has no sdpa attention with sinks


class Engine(Protocol):
    facts: dict[str, Any]

    def begin(self, sequences: int, tokens: int) -> None:
        """Empties the KV cache, and makes room for `sequences` of `tokens` each."""

    def step(self, new: list[list[int]]) -> list[int]:
        """Computes new tokens, as many for each sequence; returns the most probable next token of each."""

    def score(self, prompt: list[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, given those before. Empties the KV cache."""

    def count_experts(self, is_on: bool) -> float | None:
        """Switches counting on or off; returns the mean of distinct experts since it was switched on, None: unknown."""


class HuggingFace:
    def __init__(self, question: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        torch.set_num_threads(question["threads"])
        torch.set_grad_enabled(False)
        dtype = getattr(torch, question["dtype"])
        self._device = torch.device(question["device"])
        # A device map loads each tensor onto the device at once: the model need not fit into the host's memory.
        placed = {} if self._device.type == "cpu" else {"device_map": {"": self._device}}
        load = transformers.AutoModelForCausalLM.from_pretrained
        kind = transformers.AutoConfig.from_pretrained(question["model"]).model_type
        attention = "eager" if kind in EAGER else "sdpa"
        self._model = load(question["model"], dtype=dtype, attn_implementation=attention, **placed).eval()
        self._cache: Any = None
        self._counts: list[int] = []
        self._hooks: list[Any] = []
        implementation = str(getattr(self._model.config, "_experts_implementation", None))
        versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
        self.facts = versions | {"dtype": question["dtype"], "experts": implementation, "device": question["device"]}

    def begin(self, sequences: int, tokens: int) -> None:
        self._cache = self._transformers.DynamicCache(config=self._model.config)

    def step(self, new: list[list[int]]) -> list[int]:
        tokens = self._torch.tensor(new, device=self._device)
        made = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return made.logits[:, -1].argmax(-1).tolist()

    def score(self, prompt: list[int]) -> list[float]:
        logits = self._model(input_ids=self._torch.tensor([prompt], device=self._device)).logits[0, :-1].double()
        chosen = self._torch.tensor(prompt[1:], device=self._device)
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()

    def count_experts(self, is_on: bool) -> float | None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if is_on:
            self._counts = []
            layers = [part for name, part in self._model.named_modules() if name.endswith("mlp.experts")]
            self._hooks = [layer.register_forward_pre_hook(self._count) for layer in layers]
        return sum(self._counts) / len(self._counts) if self._counts else None

    def _count(self, _: Any, inputs: Any) -> None:
        """`inputs` of transformers' experts: hidden states, chosen experts, their weights."""
        self._counts.append(inputs[1].unique().numel())


class LlamaCpp:
    def __init__(self, question: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self._api, self._numpy, self._threads = llama_cpp, numpy, question["threads"]
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = question["device_layers"]
        self._model = llama_cpp.llama_model_load_from_file(question["model"].encode(), parameters)
        if not self._model:
            raise SystemExit("llama.cpp does not load the GGUF file")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape = (0, 0)
        self._positions: list[int] = []
        system = llama_cpp.llama_print_system_info().decode().strip()
        self.facts = {"llama_cpp_python": llama_cpp.__version__, "system": system, "dtype": "bfloat16"}
        self.facts["layers_on_gpu"] = question["device_layers"] if llama_cpp.llama_supports_gpu_offload() else 0

    def begin(self, sequences: int, tokens: int) -> None:
        api = self._api
        if (sequences, tokens) != self._shape:
            if self._context is not None:
                api.llama_free(self._context)
            parameters = api.llama_context_default_params()
            parameters.n_ctx, parameters.n_seq_max = sequences * (tokens + 256), sequences
            parameters.n_batch = sequences * tokens
            parameters.n_threads = parameters.n_threads_batch = self._threads
            self._context, self._shape = api.llama_init_from_model(self._model, parameters), (sequences, tokens)
            if not self._context:
                raise SystemExit(f"llama.cpp has no context for {sequences} sequences of {tokens} tokens")
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        self._positions = [0] * sequences

    def step(self, new: list[list[int]]) -> list[int]:
        return [int(self._logits(index).argmax()) for index in self._decode(new, every=False)]

    def score(self, prompt: list[int]) -> list[float]:
        self.begin(1, len(prompt))
        rows = [self._logits(index).astype("float64") for index in self._decode([prompt], every=True)[:-1]]
        exp, log = self._numpy.exp, self._numpy.log
        pairs = zip(rows, prompt[1:], strict=True)
        return [float(row[token] - row.max() - log(exp(row - row.max()).sum())) for row, token in pairs]

    def _decode(self, new: list[list[int]], every: bool) -> list[int]:
        """Computes new tokens; returns the places of the logits: of each sequence's last token, or of every one."""
        api, count = self._api, sum(map(len, new))
        batch, last = api.llama_batch_init(count, 0, 1), []
        batch.n_tokens = count
        index = 0
        for sequence, tokens in enumerate(new):
            for token in tokens:
                batch.token[index], batch.pos[index] = token, self._positions[sequence]
                batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, int(every)
                self._positions[sequence] += 1
                index += 1
            batch.logits[index - 1] = 1
            last.append(index - 1)
        if status := api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode of {count} tokens ended with status {status}")
        api.llama_batch_free(batch)
        return list(range(count)) if every else last

    def _logits(self, index: int) -> Any:
        logits = self._api.llama_get_logits_ith(self._context, index)
        return self._numpy.ctypeslib.as_array(logits, shape=(self._vocabulary,))

    def count_experts(self, is_on: bool) -> float | None:
        return None


class Case:
    """Measures one case: `prompts` and `answers` by run and sequence."""

    def __init__(self, engine: Engine, case: dict[str, Any]) -> None:
        self._engine, self._is_prefill = engine, case["kind"] == "prefill"
        self._runs = list(zip(case["prompts"], case["answers"], strict=True))
        self._same = self._compared = 0

    def result(self) -> dict[str, Any]:
        prompts, answers = self._runs[0]
        if self._is_prefill:
            self._prefill(prompts, answers)
            experts = None
        else:
            experts = self._warm_up(prompts, answers)
        self._same = self._compared = 0
        run = self._prefill if self._is_prefill else self._decode
        seconds = [run(*one) for one in self._runs]
        steps = len(answers[0]) - 1
        same = self._same / self._compared
        return {"seconds": seconds, "steps": steps, "experts": experts, "same_tokens": same}

    def _prefill(self, prompts: list[list[int]], answers: list[list[int]]) -> float:
        self._engine.begin(len(prompts), len(prompts[0]) + len(answers[0]))
        started = time.perf_counter()
        chosen = self._engine.step(prompts)
        seconds = time.perf_counter() - started
        self._compare(chosen, [answer[0] for answer in answers])
        return seconds

    def _warm_up(self, prompts: list[list[int]], answers: list[list[int]]) -> float | None:
        self._prefill(prompts, answers)
        self._engine.count_experts(True)
        for at in range(min(WARM_UP_STEPS, len(answers[0]) - 1)):
            self._engine.step([[answer[at]] for answer in answers])
        return self._engine.count_experts(False)

    def _decode(self, prompts: list[list[int]], answers: list[list[int]]) -> float:
        """Seconds of all steps but the first, which is the prompt's."""
        self._prefill(prompts, answers)
        started = time.perf_counter()
        chosen = [self._engine.step([[answer[at]] for answer in answers]) for at in range(len(answers[0]) - 1)]
        seconds = time.perf_counter() - started
        for at, tokens in enumerate(chosen, start=1):
            self._compare(tokens, [answer[at] for answer in answers])
        return seconds

    def _compare(self, chosen: list[int], expected: list[int]) -> None:
        self._compared += len(expected)
        self._same += sum(one == other for one, other in zip(chosen, expected, strict=True))


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {"hugging_face": HuggingFace, "llama_cpp": LlamaCpp}


def main() -> None:
    question = json.loads(Path(sys.argv[1]).read_text())
    engine = ENGINES[question["engine"]](question)
    print(json.dumps({"facts": engine.facts}), flush=True)
    print(json.dumps({"scores": [engine.score(prompt) for prompt in question["scored"]]}), flush=True)
    for number, case in enumerate(question["cases"]):
        print(json.dumps({"case": number} | Case(engine, case).result()), flush=True)


if __name__ == "__main__":
    main()
