"""The command line `kt-runtime`. Each command's module is imported only when that command runs.

Exit status: 0 done, 1 our fault or the machine's, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import click

from kt_runtime import __version__
from kt_runtime.errors import KtError, UnknownNameError, UserError

INTERRUPTED_STATUS = 130

# Command -> its line in `kt-runtime --help`. The command is `command` in the module `kt_runtime.cli.NAME`, or in the
# module from MODULES.
COMMANDS = {
    "doctor": "What this machine can do, and what is missing.",
    "models": "List presets; make a tiny checkpoint of a real architecture.",
    "serve": "Start a server: SGLang's HTTP API, OpenAI's, adapters, training.",
    "train": "Train a LoRA adapter on the resident model.",
    "predict": "Answer a dataset's questions; BLEU, ROUGE, accuracy.",
    "chat": "Talk with the resident model or one of its adapters.",
    "adapter": "Load, unload, list, show, roll back and export adapters.",
    "session": "List and close the training sessions of a server.",
    "settings": "Show and change a server's targets for latency.",
    "status": "Show a server, and the replicas of its registry.",
    "cache": "Look at, verify and empty the prefix cache.",
    "export": "Merge an adapter into its model, as a recipe says.",
    "bench": "Time kernels, serving and training against limits and peers.",
    "demo": "Train an adapter in a running server and see its answer change.",
}
MODULES = {
    "train": "cli.train.command",
    "predict": "cli.train.predict",
    "chat": "cli.chat.command",
    "adapter": "cli.adapter.command",
    "export": "cli.adapter.export",
    "cache": "cli.cache.command",
    "demo": "cli.demo.command",
    "bench": "bench.command",
}


@dataclass
class Session:
    """The values of the group's own options; click passes the object to commands as `ctx.obj`."""

    debug: bool = False


class LazyCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = MODULES.get(cmd_name, f"cli.{cmd_name}")
        command: click.Command = importlib.import_module(f"kt_runtime.{module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise UnknownNameError("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _set_debug(ctx: click.Context, _: click.Parameter, debug: bool) -> None:
    """Callback of --debug. The option is eager, so that errors in importing a command's module have tracebacks too."""
    ctx.obj.debug = debug
    level = logging.DEBUG if debug else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@click.command(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kt-runtime")
@click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show tracebacks, and log everything.",
)
def cli() -> None:
    """Serve one mixture-of-experts model through SGLang, and LoRA-train it in place."""


# Python collects garbage when it ends. With torch and transformers imported that takes more than a second.
atexit.register(gc.freeze)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; the installed `kt-runtime` exits with it."""
    session = Session()
    try:
        result = cli.main(args=arguments, prog_name="kt-runtime", standalone_mode=False, obj=session)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("kt-runtime: interrupted", err=True)
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        _forget_output()
        return 1
    except KtError as error:
        return _report(str(error), error.exit_status, session, is_ours=not isinstance(error, UserError))
    except Exception as error:  # noqa: BLE001 (the outermost frame: whatever was not foreseen ends here, and is reported)
        return _report(f"unexpected {type(error).__name__}: {error}", 1, session, is_ours=True)
    return result if isinstance(result, int) else 0


def _report(message: str, status: int, session: Session, *, is_ours: bool) -> int:
    """Prints the current error; returns `status`."""
    if session.debug:
        traceback.print_exc()
    click.echo(f"kt-runtime: {message}", err=True)
    if is_ours and not session.debug:
        click.echo("kt-runtime: `kt-runtime --debug COMMAND ...` shows where it happened", err=True)
    return status


def _forget_output() -> None:
    """Redirects stdout to /dev/null after a broken pipe, so that Python's flush at exit does not fail."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
