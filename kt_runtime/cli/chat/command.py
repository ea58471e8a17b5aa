"""`kt-runtime chat`: talk with the resident model or one of its adapters.

At a terminal Ctrl-C stops an answer and Ctrl-D ends the chat. When standard input is no terminal, each of its lines is
a question or a command, only the answers are printed, and an error ends the command.

FILE is a recipe in YAML or JSON (model, adapter, template, sampling), KEY=VALUE overrides what it says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx

from kt_runtime.cli.chat.conversation import Conversation
from kt_runtime.cli.connection import ServerAPI, running_status, server_options, server_url
from kt_runtime.cli.recipe_argument import find_recipe, recipe_arguments
from kt_runtime.cli.train.recipe_problems import with_all_problems
from kt_runtime.cli.train.run_server import recipes_model, running_server
from kt_runtime.cli.train.temporary_adapter import adapter_in_use, check_exists, check_served, rank_of, served_names
from kt_runtime.errors import KtError, UnknownNameError

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.train.render.rendering import Renderer

HELP = {
    "/help": "this list",
    "/clear": "forget what was said",
    "/adapter NAME": "let adapter NAME answer from now on; - is the base; without NAME, list them",
    "/system TEXT": "set the system prompt; without TEXT, take it away",
    "/exit": "end (so does Ctrl-D)",
}
ANSWER_SECONDS, CONNECT_SECONDS = 600.0, 10.0
# Removed from terminal output, since they could change terminal settings: control characters but tab and newline.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


@click.command(name="chat", help=__doc__)
@click.option("--adapter", help="An adapter that is served. [default: the recipe's, or none]")
@click.option("--system", help="The system prompt.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Of one answer. [default: the recipe's, or what fits]")
@click.option("--temperature", type=click.FloatRange(0), help="0: always the likeliest. [default: the model's]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="[default: the model's]")
@recipe_arguments
@server_options
def command(
    adapter: str | None,
    system: str | None,
    recipe_path: Path | None,
    arguments: tuple[str, ...],
    max_new_tokens: int | None,
    url: str | None,
    api_key: str | None,
    **sampling: float | None,
) -> None:
    recipe_path, overrides = find_recipe(recipe_path, arguments)
    if overrides and recipe_path is None:
        raise click.UsageError(f"{overrides[0]!r}: KEY=VALUE changes a recipe; name its FILE, or use --recipe FILE")
    given = {name: value for name, value in sampling.items() if value is not None}
    with contextlib.ExitStack() as stack:
        recipe = directory = None
        if recipe_path is None:
            api = ServerAPI(server_url(url), api_key)
        else:
            status = running_status(url, api_key)
            with with_all_problems(recipe_path, overrides, "chat", status):
                recipe = _read(recipe_path, list(overrides))
                recipes_model(recipe, status)
                directory = None if adapter else recipe.adapter_name_or_path
                check_exists(directory, f"{recipe.where('adapter_name_or_path')}: adapter_name_or_path")
            api = stack.enter_context(_server_for(recipe, directory, url, api_key))
        status = api.get("/kt/status")
        # Checks model and template before an adapter is loaded for the wrong model or an unusable template.
        renderer = None if recipe is None else _renderer(recipe, status)
        name = stack.enter_context(adapter_in_use(api, adapter, directory, _say))
        http = stack.enter_context(_http(api.url, api_key))
        conversation = Conversation(
            http, api.get("/v1/models")["data"][0]["id"], status["context_tokens"], name, max_new_tokens, system, given
        )
        if recipe is not None and renderer is not None:
            _follow(conversation, recipe, renderer)
        _Chat(conversation, api).run()


def _say(line: str) -> None:
    click.echo(line, err=True)


def _read(path: Path, overrides: list[str]) -> Recipe:
    from kt_runtime.train.recipe import read_recipe

    recipe, notes = read_recipe(path, overrides, purpose="chat")
    for note in notes:
        _say(note)
    return recipe


def _http(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    return httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)


def _server_for(
    recipe: Recipe, adapter: Path | None, url: str | None, api_key: str | None
) -> contextlib.AbstractContextManager[ServerAPI]:
    from kt_runtime.serve.memory.resident_notes import rule_file

    model, rank = recipe.model_name_or_path, rank_of(adapter)
    return running_server(model, url, api_key, _say, max_lora_rank=rank, placement=rule_file(recipe))


def _renderer(recipe: Recipe, status: dict[str, Any]) -> Renderer:
    """The recipe's renderer. Raises ConflictError if the recipe's model is not resident, and `Renderer`'s errors."""
    from kt_runtime.train.render.rendering import Renderer

    return Renderer(recipes_model(recipe, status), recipe)


def _follow(conversation: Conversation, recipe: Recipe, renderer: Renderer) -> None:
    """Applies the recipe's sampling, system prompt and template. The client renders a template that differs from the
    server's."""
    from kt_runtime.train.predict.run import sampling_parameters, stopping

    conversation.system = conversation.system or recipe.default_system
    conversation.max_new_tokens = conversation.max_new_tokens or recipe.max_new_tokens
    conversation.options = sampling_parameters(recipe) | conversation.options
    if comparison := renderer.comparison():
        _say(comparison)
        conversation.render = renderer.prompt
        conversation.sampling = conversation.options | stopping(renderer)
    elif renderer.options:
        conversation.options["chat_template_kwargs"] = renderer.options


@dataclass
class _Chat:
    """Reads questions and commands until the end of the input."""

    conversation: Conversation
    api: ServerAPI

    def run(self) -> None:
        if sys.stdin.isatty():
            _say(f"{self._who()}; /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
            self._talk()
        else:
            for line in sys.stdin:
                if self._take(line.strip()):
                    return

    def _talk(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for `input`)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D ends)", err=True)
                continue
            try:
                if self._take(line):
                    return
            except KeyboardInterrupt:
                click.echo("\n(stopped)", err=True)
            except KtError as error:
                _say(f"error: {error}")

    def _take(self, line: str) -> bool:
        """Runs a command or asks a question; returns True for /exit. Two slashes start a question with one slash."""
        if line.startswith("/") and not line.startswith("//"):
            return self._run_command(line)
        if line:
            question = (line[1:] if line.startswith("/") else line).encode(errors="replace").decode()
            with contextlib.closing(self.conversation.ask(question)) as pieces:
                for piece in pieces:
                    click.echo(piece.translate(CONTROLS) if sys.stdout.isatty() else piece, nl=False)
            click.echo()
        return False

    def _run_command(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/adapter": self._set_adapter,
            "/system": self._set_system,
        }
        if name == "/exit":
            return True
        if name not in commands:
            raise UnknownNameError("command", name, [*commands, "/exit"])
        commands[name](argument.strip())
        return False

    def _help(self, _: str) -> None:
        for usage, meaning in HELP.items():
            _say(f"{usage:16} {meaning}")

    def _clear(self, _: str) -> None:
        self.conversation.turns.clear()
        _say("what was said is forgotten")

    def _set_adapter(self, name: str) -> None:
        if not name:
            _say(f"{self._who()}; served: {', '.join(served_names(self.api)) or 'none'}")
            return
        if name != "-":
            check_served(self.api, name)
        self.conversation.adapter = None if name == "-" else name
        _say(self._who())

    def _set_system(self, text: str) -> None:
        self.conversation.system = text or None
        _say("the system prompt is set" if text else "there is no system prompt")

    def _who(self) -> str:
        talk = self.conversation
        return f"adapter {talk.adapter} of {talk.base} answers" if talk.adapter else f"{talk.base} answers"
