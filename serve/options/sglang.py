"""Checks options passed through to SGLang: all of SGLang's options are allowed but those that kt-runtime sets.

Only full names are accepted: SGLang's parser also accepts abbreviations, which would bypass the check.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.options.peers import nearest_options
from kt_runtime.serve.options.sglang_names import NAMES

# (reason, options refused for it); a name that ends in * matches every name with that prefix.
REFUSED: tuple[tuple[str, str], ...] = (
    ("use kt-runtime's own option", "--model --model-path --host --port --dtype --device --max-total-tokens"),
    ("use kt-runtime's own option", "--max-running-requests --max-lora-rank"),
    ("use kt-runtime's own option", "--served-model-name"),
    ("use kt-runtime's own option --tp-size", "--tp-size --tensor-parallel-size"),
    ("use kt-runtime's own option", "--nnodes --node-rank --dist-init-addr"),
    ("use --context-tokens", "--context-length"),
    ("use --lora-slots", "--max-loras-per-batch"),
    ("use --device cuda:N", "--base-gpu-id --gpu-id-step"),
    ("SGLang logs its arguments; set KT_RUNTIME_API_KEY instead", "--api-key --admin-api-key"),
    ("a file can hold options that kt-runtime decides; write them out", "--config"),
    (
        "ranks are of one kind, set by --tp-size: heads, outputs and experts are split over them all",
        "--pp-size --pipeline-parallel-size --dp-size --data-parallel-size --ep "
        "--ep-size --expert-parallel-size --moe-dp-size --moe-data-parallel-size --dcp-size "
        "--decode-context-parallel-size --attn-cp-size --attention-context-parallel-size --attn-dp-size "
        "--attention-data-parallel-size --enable-dp-attention --use-ray "
        "--tokenizer-worker-num --detokenizer-worker-num --disaggregation-* --encoder-* --elastic-ep-* "
        "--enable-pd-role-switch --enable-elastic-expert-backup",
    ),
    (
        "LoRA is always on, and adapters are loaded, versioned and dropped through POST /kt/adapters",
        "--enable-lora --enable-lora-overlap-loading --lora-backend --lora-drain-wait-threshold "
        "--lora-eviction-policy --lora-paths --lora-target-modules --max-loaded-loras --uno-lora-path",
    ),
    (
        "the resident model is trained on in place and must be what its checkpoint says",
        "--load-format --quantization --quantization-param-path --quantize-and-serve --modelopt-* --model-impl "
        "--model-config-parser --json-model-override-args --is-embedding --delete-ckpt-after-loading "
        "--enable-memory-saver --enable-weights-cpu-backup --cpu-offload-gb --offload-* --remote-instance-* "
        "--weight-cache-* --custom-weight-loader --startup-weight-load-mode --decrypted-config-file "
        "--checkpoint-engine-wait-weights-before-ready",
    ),
    (
        "training runs between SGLang's batches, which this would hide",
        "--enable-torch-compile --enable-mixed-chunk --enable-two-batch-overlap "
        "--enable-single-batch-overlap --enable-pdmux --dllm-*",
    ),
    (
        "kt-runtime decodes without drafts: a model's heads for multi-token prediction (EAGLE, NEXTN) are read past, "
        "and no draft model is loaded",
        "--speculative-* --no-speculative-* --enable-multi-layer-eagle",
    ),
    (
        "the models are served as text models: a vision tower is read past",
        "--enable-multimodal --language-only --limit-mm-data-per-request --mm-* --no-mm-* --enable-mm-global-cache "
        "--enable-prefix-mm-cache --enable-broadcast-mm-inputs-process --image-processor-backend "
        "--disable-fast-image-processor --trust-mm-content-hashes",
    ),
    (
        "the host computes the routed experts between captured segments: allowed are breakable and disabled",
        "--cuda-graph-backend-decode --cuda-graph-backend-prefill",
    ),
    (
        "use --no-graphs, or --cuda-graph-backend-decode and --cuda-graph-backend-prefill with breakable or disabled",
        "--cuda-graph-config --disable-cuda-graph --disable-decode-cuda-graph --disable-prefill-cuda-graph "
        "--debug-cuda-graph --enable-profile-cuda-graph",
    ),
    ("use --expert-threads", "--kt-cpuinfer --kt-threadpool-count"),
    (
        "the experts are read from the model's checkpoint; --expert-format int8 or int4 quantizes them while loading",
        "--kt-method --kt-weight-path",
    ),
    (
        "--gpu-experts SIZE keeps the most used experts of each layer on the GPU",
        "--kt-num-gpu-experts",
    ),
    (
        "an expert's result is used in its own layer",
        "--kt-max-deferred-experts-per-token",
    ),
    (
        "routed experts are run by kt-runtime's expert store",
        "--moe-runner-backend --moe-a2a-backend --enable-eplb --init-expert-location --enable-paged-experts --kt-* "
        "--enforce-shared-experts-fusion",
    ),
    (
        "it lets a request or a file name code to run",
        "--enable-custom-logit-processor --forward-hooks --trust-request-chat-template --tool-server",
    ),
    (
        "kt-runtime's access rules and routes cover SGLang's one Python HTTP server only",
        "--grpc-* --smg-* --enable-http2 --sidecar --sidecar-args --fastapi-root-path --enable-ssl-refresh",
    ),
    (
        "versions are swapped under running requests; that is tested with the prefix cache on",
        "--disable-radix-cache --enable-mis",
    ),
    ("the OpenAI routes need the tokenizer", "--skip-tokenizer-init"),
    ("every answer would be kept in memory for as long as the server runs", "--enable-response-store"),
    ("what clients' grammars may take is bounded for xgrammar only", "--grammar-backend"),
    (
        "kt-runtime's own options set up the tiers of the prefix cache: --cache-host, --cache-disk, --cache-dir",
        "--hicache-* --enable-hierarchical-cache --enable-hicache --file-storage-path",
    ),
    (
        "the prefix cache has one owner, which knows adapter versions; another would serve pages of older ones",
        "--radix-cache-backend --enable-lmcache --lmcache-config-file --enable-flexkv --flexkv-config-file "
        "--enable-unified-cache-external-linker --unified-cache-external-linker-* --enable-linker-mla-dedup",
    ),
    (
        "events name an adapter by its place in the cache's keys, which hold its content's hash here",
        "--kv-events-config",
    ),
    (
        "the pages of the host and disk tiers have SGLang's plain layout",
        "--enable-hisparse --hisparse-config --enable-kv-cache-sharding --enable-page-major-kv-layout "
        "--enable-unified-memory --enable-dsa-cache-layer-split",
    ),
    (
        "states of linear attention are kept in float32, in slots of SGLang's strategy no_buffer, which kt-runtime's "
        "backend reads",
        "--mamba-radix-cache-strategy --mamba-ssm-dtype --mamba-backend --linear-attn-* --enable-linear-replayssm* "
        "--enable-int8-mamba-checkpoint",
    ),
)

# Options refused only when kt-runtime sets up the prefix cache's tiers.
REFUSED_WITH_TIERS: tuple[tuple[str, str], ...] = (
    ("use --cache-page-tokens", "--page-size --c128-page-size"),
    ("sizes of the prefix cache are computed for KV of the server's --dtype", "--kv-cache-dtype"),
    (
        "SGLang 0.5.23's scheduler ends when a streaming session's next turn is looked up in the tiers",
        "--enable-streaming-session",
    ),
    ("it keeps KV of its own beside the tiers", "--enable-session-radix-cache --prefill-only-disable-kv-cache"),
)
CHUNK_OPTION = "--chunked-prefill-size"

# Allowed values of refused options: defaults and harmless ones, separated by spaces.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size"), "1"),
    **dict.fromkeys(("--dp-size", "--data-parallel-size", "--ep", "--ep-size", "--expert-parallel-size"), "1"),
    **dict.fromkeys(("--nnodes", "--tokenizer-worker-num", "--detokenizer-worker-num"), "1"),
    "--node-rank": "0",
    **dict.fromkeys(("--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"), "breakable disabled"),
    "--grammar-backend": "xgrammar none",
}


def reason_against(option: str, *, with_tiers: bool = False) -> str | None:
    for reason, names in REFUSED + (REFUSED_WITH_TIERS if with_tiers else ()):
        for name in names.split():
            if option == name or (name.endswith("*") and option.startswith(name[:-1])):
                return reason
    return None


def check_passed_on(arguments: Sequence[str], *, own: Collection[str] = (), with_tiers: bool = False) -> None:
    """Raises InvalidValueError for the first argument that SGLang may not get.

    `own`: kt-runtime's options, for suggestions. `with_tiers`: kt-runtime sets up the prefix cache's tiers.
    """
    if arguments and not arguments[0].startswith("-"):
        raise InvalidValueError(f"{arguments[0]!r} is not an option of SGLang's; options begin with --")
    for position, argument in enumerate(arguments):
        if not argument.startswith("-") or _is_number(argument):
            continue
        name, equals, value = argument.partition("=")
        if name not in NAMES:
            raise InvalidValueError(_unknown(name, own))
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        reason = reason_against(name, with_tiers=with_tiers)
        if reason and (value if equals else following) not in HARMLESS.get(name, "").split():
            raise InvalidValueError(f"{name} can't be passed on to SGLang: {reason}")


def _unknown(name: str, own: Collection[str]) -> str:
    near = nearest_options(name, [*own, *NAMES])
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown option {name}: neither kt-runtime nor SGLang has it; {hint}"
        "`kt-runtime serve --help` lists kt-runtime's, `python -m sglang.launch_server --help` SGLang's"
    )


def check_chunks(arguments: Sequence[str], page_tokens: int) -> None:
    """Raises InvalidValueError if SGLang's prefill chunk is not a whole number of pages: SGLang would fail an
    assertion."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != CHUNK_OPTION:
            continue
        value = value if equals else "".join(arguments[position + 1 : position + 2])
        if _is_number(value) and float(value) > 0 and float(value) % page_tokens:
            raise InvalidValueError(f"{CHUNK_OPTION} {value}: must be a multiple of --cache-page-tokens, {page_tokens}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
