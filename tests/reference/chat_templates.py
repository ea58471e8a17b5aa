"""Chat templates with the structure of published ones, in our words: what they write, drop and rewrite is theirs.

DEEPSEEK_V3: system texts first; a call of a tool joins name and arguments as text; an answer to a tool's output follows
it without a header; `</think>` and what is before it is dropped from every answer.
DEEPSEEK_R1: the same, and every prompt opens a think block.
QWEN3: an answer to the last question has a think block, empty where there is no reasoning; earlier answers have none;
without thinking the prompt holds the empty block. Tools are listed in the system turn.
"""

from __future__ import annotations

from typing import Any

_DEEPSEEK = """\
{%- set state = namespace(system='', after_tool=false, first_output=true) -%}
{%- for message in messages if message.role == 'system' -%}
{%- set state.system = state.system + ('' if loop.first else '\n\n') + message.content -%}
{%- endfor -%}
{{- bos_token + state.system -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set state.after_tool = false -%}
{{- '<｜User｜>' + message.content -}}
{%- elif message.role == 'tool' -%}
{%- if state.first_output -%}{{- '<｜tool▁outputs▁begin｜>' -}}{%- set state.first_output = false -%}{%- endif -%}
{%- set state.after_tool = true -%}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{%- set state.after_tool = false -%}
{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' -}}
{%- for call in message.tool_calls -%}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' -}}
{{- call.function.arguments + '\n```<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' + eos_token -}}
{%- elif message.role == 'assistant' -%}
{{- '<｜tool▁outputs▁end｜>' if state.after_tool else '<｜Assistant｜>' -}}
{%- set state.after_tool = false -%}
{{- message.content.split('</think>')[-1] + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if state.after_tool -%}{{- '<｜tool▁outputs▁end｜>' -}}
{%- elif add_generation_prompt -%}{{- '<｜Assistant｜>OPENING' -}}{%- endif -%}
"""
DEEPSEEK_V3 = _DEEPSEEK.replace("OPENING", "")
DEEPSEEK_R1 = _DEEPSEEK.replace("OPENING", "<think>\\n")

QWEN3 = """\
{%- set given = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|im_start|>system\n' + (given + '\n\n' if given else '') + '# Tools\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' -}}
{%- elif given -%}
{{- '<|im_start|>system\n' + given + '<|im_end|>\n' -}}
{%- endif -%}
{%- set state = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set state.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set content, thought = message.content, '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > state.question and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name -}}
{{- '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""

TEMPLATES: dict[str, tuple[str, str | None]] = {
    "made deepseek": ("tiny-deepseek-v3", None),
    "made qwen": ("tiny-qwen3-moe", None),
    "deepseek-v3": ("tiny-deepseek-v3", DEEPSEEK_V3),
    "deepseek-r1": ("tiny-deepseek-v3", DEEPSEEK_R1),
    "qwen3": ("tiny-qwen3-moe", QWEN3),
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}
