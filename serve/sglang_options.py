"""What a user may pass on to SGLang after `--`: every option of SGLang's but those that kt-runtime decides.

Checked by full name: SGLang's parser also accepts abbreviations, which would slip past.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kt_runtime.errors import InvalidValueError, UnknownNameError

# (why, the options it holds for); a name that ends in * stands for all that begin so.
REFUSED: tuple[tuple[str, str], ...] = (
    ("use kt-runtime's own option", "--model --model-path --host --port --dtype --device --max-total-tokens"),
    ("use kt-runtime's own option", "--max-running-requests --max-lora-rank"),
    ("use --context-tokens", "--context-length"),
    ("use --lora-slots", "--max-loras-per-batch"),
    ("SGLang logs its arguments; set KT_RUNTIME_API_KEY instead", "--api-key --admin-api-key"),
    ("a file can hold options that kt-runtime decides; write them out", "--config"),
    (
        "kt-runtime runs one model on one rank in this version",
        "--tp-size --tensor-parallel-size --pp-size --pipeline-parallel-size --dp-size --data-parallel-size --ep "
        "--ep-size --expert-parallel-size --moe-dp-size --moe-data-parallel-size --dcp-size "
        "--decode-context-parallel-size --attn-cp-size --attention-context-parallel-size --attn-dp-size "
        "--attention-data-parallel-size --nnodes --node-rank --dist-init-addr --enable-dp-attention --use-ray "
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
        "--cuda-graph-* --enable-profile-cuda-graph --enable-torch-compile --enable-mixed-chunk --speculative-* "
        "--enable-two-batch-overlap --enable-single-batch-overlap --enable-pdmux --dllm-*",
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
    ("versions are swapped under running requests; that is tested with the prefix cache on", "--disable-radix-cache"),
    ("the OpenAI routes need the tokenizer", "--skip-tokenizer-init"),
)

# Values that say what is so anyway.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size"), "1"),
    **dict.fromkeys(("--dp-size", "--data-parallel-size", "--ep", "--ep-size", "--expert-parallel-size"), "1"),
    **dict.fromkeys(("--nnodes", "--tokenizer-worker-num", "--detokenizer-worker-num"), "1"),
    "--node-rank": "0",
}


def reason_against(option: str) -> str | None:
    for reason, names in REFUSED:
        for name in names.split():
            if option == name or (name.endswith("*") and option.startswith(name[:-1])):
                return reason
    return None


def check_passed_on(arguments: Sequence[str], known: Collection[str]) -> None:
    """Raises InvalidValueError or UnknownNameError for the first argument that can't be passed on.

    `known`: the names of SGLang's options, each in full.
    """
    if arguments and not arguments[0].startswith("-"):
        raise InvalidValueError(f"after `--`: {arguments[0]!r} is not an option of SGLang's; options begin with --")
    for position, argument in enumerate(arguments):
        if not argument.startswith("-") or _is_number(argument):
            continue
        name, equals, value = argument.partition("=")
        if name not in known:
            raise UnknownNameError("option of SGLang", name, known, where="after `--`")
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        reason = reason_against(name)
        if reason and HARMLESS.get(name) != (value if equals else following):
            raise InvalidValueError(f"{name} can't be passed on to SGLang: {reason}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
