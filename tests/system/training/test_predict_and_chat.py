"""`kt-runtime predict` and `kt-runtime chat` on a real server, against asking that server directly."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from reference import lora
from reference.server.command_line import run_command

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.train.recipe import read_recipe
from kt_runtime.train.render.rendering import Renderer

COMMAND = [sys.executable, "-P", "-m", "kt_runtime.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "200"}
QUESTIONS = ["Who keeps the lighthouse?", "Where does Mara live?", "Which is it?\nA. the cliff\nB. the boat", "Why?"]
LABELS = ["Mara keeps the lighthouse.", "Mara lives on the cliff.", "B", "Because."]
TOKENS = 6
PATIENCE_SECONDS = 60.0


@dataclass
class Place:
    """A server, a dataset, a recipe for it, and an adapter on disk that is served as "pebble" as well."""

    api: ServerAPI
    model: Path
    directory: Path
    adapter: Path

    @property
    def recipe(self) -> Path:
        return self.directory / "predict.yaml"

    def served(self) -> dict[str, list[str]]:
        """The served names with their versions. Not the whole answer: a version is still written meanwhile."""
        adapters = self.api.get("/kt/adapters")["adapters"]
        return {adapter["name"]: [version["version"] for version in adapter["versions"]] for adapter in adapters}

    def predictions(self) -> list[dict[str, str]]:
        text = (self.directory / "out" / "generated_predictions.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def run(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        arguments = (*arguments, "--url", self.api.url)
        return run_command(*arguments, directory=self.directory, environment={"COLUMNS": "200"}, text=text)

    def answers(self, adapter: str | None, prompts: list[list[int]]) -> list[str]:
        """Straight from /generate, whose answers to rendered text are the reference here."""
        body: dict[str, Any] = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS},
            "lora_path": [adapter] * len(prompts),
        }
        return [answer["text"] for answer in self.api.post("/generate", body)]

    def chat(self, adapter: str | None, messages: list[dict[str, str]], max_tokens: int = TOKENS) -> str:
        base = self.api.get("/v1/models")["data"][0]["id"]
        model = f"{base}:{adapter}" if adapter else base
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        return str(self.api.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])


@pytest.fixture
def workplace(float32_server: Any, tmp_path: Path) -> Iterator[Place]:
    api, model = float32_server.api, float32_server.model_directory
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    adapter = lora.write_adapter(tmp_path / "adapter", lora.random_adapter(config, rank=4, alpha=16.0, seed=5))
    rows = [{"instruction": question, "output": label} for question, label in zip(QUESTIONS, LABELS, strict=True)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "data" / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}', encoding="utf-8")
    (tmp_path / "predict.yaml").write_text(
        f"model_name_or_path: {model}\ndo_predict: true\npredict_with_generate: true\neval_dataset: rows\n"
        f"dataset_dir: {tmp_path / 'data'}\noutput_dir: {tmp_path / 'out'}\nmax_new_tokens: {TOKENS}\n"
        "do_sample: false\nper_device_eval_batch_size: 3\n",
        encoding="utf-8",
    )
    api.post("/kt/adapters", {"name": "pebble", "path": str(adapter)})
    yield Place(api, model, tmp_path, adapter)
    api.delete("/kt/adapters/pebble")


def test_predictions_and_figures_are_those_of_the_server_and_the_libraries(workplace: Place) -> None:
    (workplace.directory / "out").mkdir()
    (workplace.directory / "out" / "all_results.json").write_text('{"train_loss": 2.5}', encoding="utf-8")
    renderer = Renderer(workplace.model, read_recipe(workplace.recipe, [], purpose="predict")[0])
    prompts = [renderer.prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    expected = workplace.answers(None, prompts)

    ran = workplace.run("predict", "--recipe", str(workplace.recipe), "--json")
    assert ran.returncode == 0, ran.stderr
    assert workplace.predictions() == [
        {"prompt": renderer.tokenizer.decode(prompt), "predict": answer, "label": label}
        for prompt, answer, label in zip(prompts, expected, LABELS, strict=True)
    ]
    results = json.loads((workplace.directory / "out" / "predict_results.json").read_text())
    assert results == json.loads(ran.stdout)
    assert {
        *(f"predict_bleu-{order}" for order in (1, 2, 3, 4)),
        *(f"predict_rouge-{kind}" for kind in "12l"),
        *(f"predict_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")),
        *("predict_model_preparation_time", "predict_accuracy", "predict_exact_match"),
    } == set(results)
    for name, count in (("samples", 4), ("steps", 2)):
        seconds, rate = results["predict_runtime"], results[f"predict_{name}_per_second"]
        assert rate * seconds == pytest.approx(count, abs=5e-4 * seconds + 5e-5 * rate)  # 3 and 4 decimals are kept
    everything = json.loads((workplace.directory / "out" / "all_results.json").read_text())
    assert everything == {"train_loss": 2.5, **results}
    assert f"asking the base model for {len(QUESTIONS)} answers" in ran.stderr
    assert f"answered {len(QUESTIONS)}/{len(QUESTIONS)}" in ran.stderr


def test_an_adapter_answers_by_name_or_from_its_directory_which_is_served_meanwhile(workplace: Place) -> None:
    renderer = Renderer(workplace.model, read_recipe(workplace.recipe, [], purpose="predict")[0])
    prompts = [renderer.prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    expected = workplace.answers("pebble", prompts)
    assert expected != workplace.answers(None, prompts)

    by_name = workplace.run("predict", "--recipe", str(workplace.recipe), "--adapter", "pebble")
    assert by_name.returncode == 0, by_name.stderr
    assert [row["predict"] for row in workplace.predictions()] == expected
    by_path = workplace.run("predict", "--recipe", str(workplace.recipe), f"adapter_name_or_path={workplace.adapter}")
    assert by_path.returncode == 0, by_path.stderr
    assert [row["predict"] for row in workplace.predictions()] == expected
    assert [adapter["name"] for adapter in workplace.api.get("/kt/adapters")["adapters"]] == ["pebble"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--adapter", "peble"), "unknown adapter 'peble'; did you mean 'pebble'"),
        (("adapter_name_or_path=/nowhere/adapter",), "/nowhere/adapter"),
        (("model_name_or_path=/nowhere/model",), "the server's resident model is"),
        (("eval_dataset=row",), "unknown dataset 'row'; did you mean 'rows'"),
    ],
)
def test_a_mistake_is_one_message_and_writes_nothing(
    workplace: Place, arguments: tuple[str, ...], message: str
) -> None:
    ran = workplace.run("predict", "--recipe", str(workplace.recipe), *arguments)
    assert ran.returncode == 2, ran.stderr
    assert message in ran.stderr and "Traceback" not in ran.stderr
    assert not (workplace.directory / "out").exists()
    assert [adapter["name"] for adapter in workplace.api.get("/kt/adapters")["adapters"]] == ["pebble"]


def test_a_prompt_that_the_server_cannot_take_is_named_and_left_out(workplace: Place) -> None:
    context = workplace.api.get("/kt/status")["context_tokens"]
    rows = [{"instruction": "boat " * (2 * context), "output": "no"}, {"instruction": "Why?", "output": "Because."}]
    (workplace.directory / "data" / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    ran = workplace.run("predict", "--recipe", str(workplace.recipe))
    assert ran.returncode == 0, ran.stderr
    assert "left out, since the server takes" in ran.stdout and "rows.json" in ran.stdout
    assert [row["label"] for row in workplace.predictions()] == ["Because."]


def test_chat_reads_lines_keeps_history_and_obeys_commands(workplace: Place) -> None:
    user = [{"role": "user", "content": question} for question in QUESTIONS[:2]]
    first = workplace.chat(None, user[:1])
    second = workplace.chat(None, [user[0], {"role": "assistant", "content": first}, user[1]])
    system = {"role": "system", "content": "You keep a boat."}
    third = workplace.chat("pebble", [system, user[0]])
    lines = [QUESTIONS[0], QUESTIONS[1], "/clear", "/system You keep a boat.", "/adapter pebble", QUESTIONS[0], "/exit"]
    options = ("--temperature", "0", "--max-new-tokens", str(TOKENS))
    ran = workplace.run("chat", *options, text="\n".join([*lines, "never asked"]))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{first}\n{second}\n{third}\n"
    assert "adapter pebble of" in ran.stderr


def test_chat_follows_a_recipe_and_its_adapter(workplace: Place) -> None:
    recipe = workplace.directory / "chat.yaml"
    recipe.write_text(
        f"model_name_or_path: {workplace.model}\nadapter_name_or_path: {workplace.adapter}\n"
        "infer_backend: ktransformers\ntrust_remote_code: true\nuse_kt: true\n"
        f"do_sample: false\nmax_new_tokens: {TOKENS}\n",
        encoding="utf-8",
    )
    ran = workplace.run("chat", "--recipe", str(recipe), text=f"{QUESTIONS[0]}\n")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == workplace.chat("pebble", [{"role": "user", "content": QUESTIONS[0]}]) + "\n"
    assert [adapter["name"] for adapter in workplace.api.get("/kt/adapters")["adapters"]] == ["pebble"]


@pytest.mark.parametrize("wrong", ["model", "template"])
def test_what_is_wrong_with_a_chat_recipe_is_said_before_its_adapter_is_served(workplace: Place, wrong: str) -> None:
    recipe = workplace.directory / "chat.yaml"
    model = workplace.model
    if wrong == "model":
        model = make_model("tiny-qwen3-moe", workplace.directory / "another")
    template = "template: deepsek3\n" if wrong == "template" else ""
    recipe.write_text(f"model_name_or_path: {model}\nadapter_name_or_path: {workplace.adapter}\n{template}")
    before = workplace.served()
    ran = workplace.run("chat", str(recipe), text="Who?\n")
    assert ran.returncode == 2 and ran.stdout == ""
    expected = "the server's resident model is" if wrong == "model" else "did you mean deepseek3?"
    assert expected in ran.stderr and "serving" not in ran.stderr
    assert workplace.served() == before


def test_chat_with_a_named_template_prompts_as_that_template_does(workplace: Place) -> None:
    recipe = workplace.directory / "chat.yaml"
    recipe.write_text(
        f"model_name_or_path: {workplace.model}\ntemplate: alpaca\ndo_sample: false\nmax_new_tokens: {TOKENS}\n",
        encoding="utf-8",
    )
    renderer = Renderer(workplace.model, read_recipe(recipe, [], purpose="chat")[0])
    prompt = renderer.prompt([{"role": "user", "content": QUESTIONS[0]}])
    ran = workplace.run("chat", "--recipe", str(recipe), text=f"{QUESTIONS[0]}\n")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == workplace.answers(None, [prompt])[0] + "\n"
    assert "### Instruction:" in ran.stderr


def test_an_error_of_the_server_is_one_line(workplace: Place) -> None:
    context = workplace.api.get("/kt/status")["context_tokens"]
    ran = workplace.run("chat", text="boat " * (2 * context))
    assert ran.returncode == 2
    assert ran.stderr.startswith("kt-runtime: the server answers 400: ") and ran.stderr.count("\n") == 1


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat(workplace: Place) -> None:
    with (
        _held_answers(workplace.api.url, num_events=20) as (url, is_held),
        _terminal("chat", "--temperature", "0", "--url", url) as terminal,
    ):
        terminal.expect("Ctrl-D ends")
        terminal.send("/system Be kind.")
        terminal.expect("the system prompt is set")
        terminal.send("/adapter nobody")
        terminal.expect("error: ")
        terminal.send(QUESTIONS[0])
        assert is_held.wait(PATIENCE_SECONDS)
        terminal.process.send_signal(signal.SIGINT)
        terminal.expect("(stopped)")
        terminal.send("/help")
        terminal.expect("so does Ctrl-D")
        terminal.expect("> ")  # before readline has the terminal, the kernel would take Ctrl-D for a key of no meaning
        os.write(terminal.descriptor, b"\x04")
        assert terminal.process.wait(30) == 0


@contextlib.contextmanager
def _held_answers(url: str, num_events: int) -> Iterator[tuple[str, threading.Event]]:
    """The URL of a relay to the server at `url`. Of a streamed answer it passes on the first `num_events` events and no
    end: such an answer is still going on when its reader stops it, however late that is. The event: it is held.
    """
    is_held = threading.Event()
    target = (str(urlsplit(url).hostname), urlsplit(url).port)

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(target) as server:
                asking = threading.Thread(target=self.pass_questions, args=(server,))
                asking.start()
                answered = passed = b""
                # Few bytes at a time: the end of an answer does not come with its first events.
                while answered.count(b"data: ") < num_events and (passed := server.recv(64)):
                    self.request.sendall(passed)
                    answered += passed
                if passed:
                    is_held.set()
                asking.join()

        def pass_questions(self, server: socket.socket) -> None:
            with contextlib.suppress(ConnectionError):  # the client may close with events that it has not read
                while asked := self.request.recv(65536):
                    server.sendall(asked)
            server.shutdown(socket.SHUT_RDWR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay:
        relaying = threading.Thread(target=relay.serve_forever)
        relaying.start()
        yield f"http://127.0.0.1:{relay.server_address[1]}", is_held
        relay.shutdown()
        relaying.join()


@dataclass
class _Terminal:
    """The other end of a command's pseudo-terminal. `seen`: what was shown and not yet expected."""

    descriptor: int
    process: subprocess.Popen[bytes]
    seen: str = ""

    def send(self, line: str) -> None:
        os.write(self.descriptor, line.encode() + b"\n")

    def expect(self, text: str) -> None:
        self._wait(lambda: text in self.seen, text)
        self.seen = self.seen.partition(text)[2]

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come; seen: {self.seen!r}"
            if select.select([self.descriptor], [], [], 0.5)[0]:
                self.seen += os.read(self.descriptor, 4096).decode(errors="replace")


@contextlib.contextmanager
def _terminal(*arguments: str) -> Iterator[_Terminal]:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**ENVIRONMENT, "TERM": "dumb"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background job
    )
    os.close(follower)
    try:
        yield _Terminal(leader, process)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
