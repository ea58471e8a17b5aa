"""LLaMA-Factory's templates of the supported families, as data, for recipes that name one.

Recipes without a template name use the model's own chat template, as the server does. `render.named_template` renders
messages with a template.
"""

from __future__ import annotations

from dataclasses import dataclass

from kt_runtime.errors import UnknownNameError
from kt_runtime.train.templates.tool_formats import DEFAULT, LLAMA3, QWEN, ToolFormat

AUTO = "auto"
BOS, EOS, CONTENT = "{bos}", "{eos}", "{content}"


@dataclass(frozen=True, slots=True)
class Template:
    """Slots: text with `{content}` for the message's text, or the whole slot is `{bos}` or `{eos}`.

    `reasoning`: answers have a think block, an empty one where the data have none. `end`: the end of an answer.
    `observation`: the slot of a tool result, None: as a user's turn. `tools`: the format of tools and their calls.
    """

    user: tuple[str, ...]
    assistant: tuple[str, ...] = (CONTENT, EOS)
    system: tuple[str, ...] = (CONTENT,)
    prefix: tuple[str, ...] = ()
    default_system: str = ""
    reasoning: bool = False
    end: str = EOS
    observation: tuple[str, ...] | None = None
    tools: ToolFormat = DEFAULT


_CHATML_USER = ("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",)
_CHATML_ANSWER = ("{content}<|im_end|>\n",)
_CHATML_SYSTEM = ("<|im_start|>system\n{content}<|im_end|>\n",)
_QWEN_OBSERVATION = (
    "<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
_DEEPSEEK3_USER = ("<｜User｜>{content}<｜Assistant｜>",)


def _qwen(default_system: str = "", *, reasoning: bool = False) -> Template:
    return Template(
        user=_CHATML_USER,
        assistant=_CHATML_ANSWER,
        system=_CHATML_SYSTEM,
        default_system=default_system,
        reasoning=reasoning,
        end="<|im_end|>",
        observation=_QWEN_OBSERVATION,
        tools=QWEN,
    )


TEMPLATES: dict[str, Template] = {
    "alpaca": Template(
        user=("### Instruction:\n{content}\n\n### Response:\n",),
        assistant=(CONTENT, EOS, "\n\n"),
        default_system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
    ),
    "chatml": Template(
        user=_CHATML_USER,
        assistant=_CHATML_ANSWER,
        system=_CHATML_SYSTEM,
        end="<|im_end|>",
        observation=("<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n",),
    ),
    "deepseek": Template(user=("User: {content}\n\nAssistant:",), system=("{content}\n\n",), prefix=(BOS,)),
    "deepseek3": Template(user=_DEEPSEEK3_USER, prefix=(BOS,)),
    "deepseekr1": Template(user=_DEEPSEEK3_USER, prefix=(BOS,), reasoning=True),
    "default": Template(
        user=("Human: {content}", EOS, "\nAssistant:"),
        assistant=(CONTENT, EOS, "\n"),
        system=("System: {content}", EOS, "\n"),
    ),
    "empty": Template(user=(CONTENT,), assistant=(CONTENT,), end=""),
    "llama3": Template(
        user=(
            "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        assistant=("{content}<|eot_id|>",),
        system=("<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",),
        prefix=(BOS,),
        end="<|eot_id|>",
        observation=(
            "<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        tools=LLAMA3,
    ),
    "moonlight": Template(
        user=("<|im_user|>user<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>",),
        assistant=("{content}<|im_end|>",),
        system=("<|im_system|>system<|im_middle|>{content}<|im_end|>",),
        default_system="You are a helpful assistant provided by Moonshot-AI.",
        end="<|im_end|>",
    ),
    "qwen": _qwen("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _qwen(reasoning=True),
    "qwen3_nothink": _qwen(),
}


def named(name: str | None, where: str) -> Template | None:
    """None for the model's own chat template. Raises UnknownNameError with the nearest known name."""
    if name is None or name == AUTO:
        return None
    if name not in TEMPLATES:
        raise UnknownNameError("template", name, [AUTO, *TEMPLATES], where=where)
    return TEMPLATES[name]
