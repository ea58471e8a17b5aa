"""`kt-runtime serve`: one server for SGLang's HTTP API, OpenAI's, adapters and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kt_runtime.cli.connection import KEY_VARIABLE
from kt_runtime.errors import InvalidValueError


class ServeCommand(click.Command):
    """Accepts SGLang's options among its own, and aliases of its own options (`serve.options.peers`)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from kt_runtime.serve.options.peers import sorted_arguments

        takes_value = {"--help": False, "-h": False}
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                takes_value |= dict.fromkeys(parameter.opts, not parameter.is_flag)
        return super().parse_args(ctx, sorted_arguments(args, takes_value))


@click.command(name="serve", cls=ServeCommand)
@click.option("--model", required=True, help="A preset, a directory, or an entry of the Hugging Face cache.")
@click.option("--served-model-name", help="What clients call the model. [default: what --model names]")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=30000, show_default=True, type=int)
@click.option(
    "--api-key",
    envvar=KEY_VARIABLE,
    help=f"What clients must present. Better in the environment, where `ps` doesn't show it. [env: {KEY_VARIABLE}]",
)
@click.option(
    "--client-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keys of clients that may ask the model, each with limits (docs/http.md).",
)
@click.option("--allow-no-key", is_flag=True, help="Listen beyond this machine without a key.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="URL",
    help="A site whose pages may call the server, such as http://localhost:3000. May be given several times.",
)
@click.option(
    "--max-body-size", metavar="SIZE", help="The largest request. [default: 1MiB and 64 bytes a token of the context]"
)
@click.option("--any-model-name", is_flag=True, help="Requests that name an unknown model get the model, not 404.")
@click.option("--dtype", default="bfloat16", show_default=True, help="bfloat16 or float32.")
@click.option(
    "--device",
    metavar="cpu|cuda|cuda:N",
    help="Where attention and dense layers are. [default: the first GPU; without one the CPU]",
)
@click.option("--context-tokens", type=int, help="The longest sequence. [default: the model's]")
@click.option("--max-total-tokens", type=int, help="Tokens that the KV cache holds. [default: 16384]")
@click.option("--max-running-requests", default=32, show_default=True, type=int)
@click.option(
    "--max-lora-rank",
    type=int,
    help="The highest rank an adapter may have. [default: 64, or of 32, 16 and 8 what fits]",
)
@click.option("--lora-slots", type=int, help="Adapter versions in one batch; the base counts. [default: 8]")
@click.option(
    "--lora-memory",
    metavar="SIZE",
    help="Memory for the adapters in batches, as many as it holds, instead of --lora-slots. A host's ranks share it.",
)
@click.option("--adapter-dir", type=click.Path(path_type=Path), help="Where published versions are kept.")
@click.option("--max-adapters", type=int, help="Names that may have an adapter at once. [default: any number]")
@click.option(
    "--max-adapter-disk",
    metavar="SIZE",
    help="Nothing is published, loaded or saved once --adapter-dir has so many bytes. [default: no limit]",
)
@click.option(
    "--registry",
    metavar="DIR|URL",
    help="A shared directory or s3:// URL: adapters published on one server of it become available on all"
    " (docs/scale.md).",
)
@click.option(
    "--expert-isa",
    help="Instruction set of the expert kernels, without a GPU of all kernels. [default: the best there is]",
)
@click.option(
    "--expert-threads",
    type=int,
    help="Threads for the routed experts, without a GPU for attention and linear layers too."
    " [default: physical cores, at most the CPU quota]",
)
@click.option(
    "--tp-size",
    default=1,
    show_default=True,
    help="Ranks: processes that compute the model together, without a GPU; each has a share of heads and experts.",
)
@click.option("--nnodes", default=1, show_default=True, help="Hosts: machines over which the ranks are split.")
@click.option("--node-rank", default=0, show_default=True, help="This host. Host 0 has the HTTP server.")
@click.option(
    "--dist-init-addr",
    metavar="HOST:PORT",
    help="With several hosts: an address of host 0 that all of them reach (docs/scale.md).",
)
@click.option(
    "--expert-format",
    metavar="int8|int4",
    help="Quantize a bf16 or fp8 checkpoint's experts while loading. [default: the checkpoint's own format]",
)
@click.option(
    "--placement",
    type=click.Path(path_type=Path),
    help="A KTransformers rule file (kt_optimize_rule): its experts' format is taken, the rest checked."
    " An item gpu_experts pins experts to the GPU.",
)
@click.option(
    "--gpu-experts", metavar="SIZE", help="The most used experts of each layer are kept on the GPU too. [default: none]"
)
@click.option(
    "--gpu-experts-format",
    metavar="auto|published|model",
    default="auto",
    show_default=True,
    help="How the GPU keeps them: codes and scales as published, dequantized when they are used, or in the model's"
    " dtype. auto: published where experts are quantized.",
)
@click.option(
    "--stream-experts",
    metavar="auto|off|TOKENS",
    default="auto",
    show_default=True,
    help="Calls of at least TOKENS tokens compute on the GPU; their experts stream there from memory.",
)
@click.option(
    "--routing-replay",
    metavar="SIZE",
    help="Keep the experts chosen for served tokens, for training with routing_replay; the oldest make room. Each rank"
    " takes SIZE. [default: none]",
)
@click.option("--no-step", is_flag=True, help="On a CPU, run SGLang's modules instead of the native step.")
@click.option("--no-graphs", is_flag=True, help="On a GPU, run every layer eagerly, without captured graphs.")
@click.option(
    "--exact", is_flag=True, help="Refuse to start unless training's log-probabilities equal served ones to the bit."
)
@click.option(
    "--tpot-target-ms",
    type=float,
    help="Time per output token that is kept while training runs, which gets what it leaves. [default: none]",
)
@click.option(
    "--ttft-target-ms",
    type=float,
    help="Time to the first token; while requests wait for it, there is no training. [default: none]",
)
@click.option(
    "--train-share", default=0.5, show_default=True, help="Largest share of time for training while requests run."
)
@click.option("--microbatch-tokens", default=2048, show_default=True, help="Tokens that training computes at once.")
@click.option("--max-sessions", default=64, show_default=True, help="Training sessions that may be open at once.")
@click.option(
    "--session-memory",
    metavar="SIZE",
    help="Memory of all training sessions. [default: one of --max-lora-rank, and half of the memory left free]",
)
@click.option(
    "--tinker-timeout",
    "tinker_timeout_s",
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="After so much silence of a Tinker client its training sessions end.",
)
@click.option(
    "--finetuning-dir",
    metavar="DIR|off",
    help="Where OpenAI's fine-tuning API keeps its files and jobs, with several hosts a directory that all see; "
    "off: no such API. [default: in --adapter-dir]",
)
@click.option("--cache-device", metavar="SIZE", help="What the KV cache takes, instead of --max-total-tokens.")
@click.option(
    "--cache-host",
    metavar="SIZE",
    help="Memory for prefixes, in addition to the KV cache; holds a copy of the cache too.",
)
@click.option("--cache-disk", metavar="SIZE", help="Size of the disk tier, whose prefixes survive restarts.")
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Directory of the disk tier. [default: this model's, in the user's cache directory]",
)
@click.option("--cache-read-only", is_flag=True, help="Read prefixes from --cache-dir, write none.")
@click.option(
    "--cache-page-tokens",
    type=int,
    help="Tokens of a page, the unit of all tiers. [default: 64; 1 for a device tier alone]",
)
@click.option("--tool-call-parser", help="SGLang's parser of tool calls, or none. [default: the model's own]")
@click.option("--reasoning-parser", help="SGLang's parser of reasoning, or none. [default: the model's own]")
@click.option(
    "--runtime-dir", type=click.Path(path_type=Path), help="Where the sockets and the log are. [default: the user's]"
)
@click.option("--verbose", is_flag=True, help="Show all that SGLang logs, instead of keeping it in a file.")
@click.argument("passed_on", nargs=-1, type=click.UNPROCESSED, metavar="[SGLANG OPTIONS]")
def command(**options: Any) -> None:
    """Load a model once; serve it, and train adapters on it while it serves.

    A SIZE is in bytes or has a unit: 512MiB, 20G; 0 turns the part off. Docs: docs/cache.md.

    SGLang's options are accepted among these, or after `--`, except those that kt-runtime sets. --model-path,
    --context-length and --max-loras-per-batch are names of options below. The server ends on Ctrl-C or SIGTERM.
    """
    from kt_runtime.serve.console.console import terminal
    from kt_runtime.serve.launch import serve
    from kt_runtime.serve.options.named import ServeOptions

    may_be_lower = options["max_lora_rank"] is None
    asked = ServeOptions(**_with_sizes(options), lora_rank_may_be_lower=may_be_lower)
    with terminal() as terminal_file:
        serve(asked, lambda line: click.echo(line, file=terminal_file))


def _with_sizes(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of ServeOptions, with sizes in bytes. Options that were not given are omitted, for their defaults."""
    from kt_runtime.serve.memory.sizes import parse_size

    if options["cache_device"] is not None and options["max_total_tokens"] is not None:
        raise InvalidValueError(
            "--cache-device and --max-total-tokens both set the size of the KV cache: leave out one of them"
        )
    if options["lora_memory"] is not None and options["lora_slots"] is not None:
        raise InvalidValueError(
            "--lora-memory and --lora-slots both bound the adapters in batches: leave out one of them"
        )
    fields = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in (
            "cache_device",
            "cache_host",
            "cache_disk",
            "max_adapter_disk",
            "session_memory",
            "lora_memory",
            "gpu_experts",
            "routing_replay",
        ):
            fields[f"{name}_bytes"] = parse_size(value, f"--{name.replace('_', '-')}")
        elif name == "max_body_size":
            fields["max_body_bytes"] = parse_size(value, "--max-body-size")
        else:
            fields[name] = value
    return fields
