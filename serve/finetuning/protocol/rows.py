"""The rows of training files: their form by method, checked line by line, and translated for the trainer.

    supervised      {"messages": [..., assistant], "tools": [...], "parallel_tool_calls": true}
    dpo             {"input": {"messages": [..., user], "tools": [...]}, "preferred_output": [assistant],
                     "non_preferred_output": [assistant]}
    reinforcement   {"messages": [..., user], "tools": [...], and any fields for the grader}

Questions (user, or answers of tools) and answers (assistant) alternate, after at most one system or developer message:
the trainer leaves other rows out (`train/data/chat.py`), so they are refused here. Every line of the translation is the
row of the same line, so that the trainer's errors have the file's lines.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.finetuning.protocol.bodies import MethodName
from kt_runtime.serve.finetuning.protocol.graders import StringCheck, reference_of
from kt_runtime.serve.requests.bodies.bounds import Body, Name
from kt_runtime.serve.requests.bodies.chat import TextPart, Tools
from kt_runtime.serve.requests.checks.checking import fitted, read_json, shortened
from kt_runtime.serve.requests.checks.refusal import Refusal

MOST_SHOWN = 10
LONGEST_LINE_BYTES = 32 * 1024 * 1024
OLD_FORMS = {
    "prompt": "rows with prompt and completion are of older models; write messages",
    "completion": "rows with prompt and completion are of older models; write messages",
    "functions": "it is the old way; write tools",
}
QUESTIONS = ("user", "tool")

Text: TypeAlias = str | Annotated[list[TextPart], Meta(min_length=1)]


class CalledFunction(Body, kw_only=True):
    name: Name
    arguments: str


class ToolCall(Body, kw_only=True):
    id: Name
    type: Literal["function"]
    function: CalledFunction


class Message(Body, kw_only=True):
    """`weight` 0: an answer that is read and not learnt. `reasoning_content`: for templates of reasoning models."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: Name | None = None
    weight: Literal[0, 1] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(min_length=1)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    refusal: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1)]


class SupervisedRow(Body, kw_only=True):
    left_out = OLD_FORMS

    messages: Messages
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None


class PreferenceInput(Body, kw_only=True):
    messages: Messages
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None


class PreferenceRow(Body, kw_only=True):
    input: PreferenceInput
    preferred_output: Annotated[list[Message], Meta(min_length=1, max_length=1)]
    non_preferred_output: Annotated[list[Message], Meta(min_length=1, max_length=1)]


class Question(Body, kw_only=True):
    """The fields of a reinforcement row that are not the grader's."""

    messages: Messages
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


Row: TypeAlias = SupervisedRow | PreferenceRow | Question


def method_of(row: dict[str, Any]) -> MethodName:
    """The method whose form the row is meant to have."""
    if "input" in row or "preferred_output" in row or "non_preferred_output" in row:
        return "dpo"
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    asks = isinstance(last, dict) and last.get("role") in QUESTIONS
    return "reinforcement" if asks and not set(row) <= set(SupervisedRow.__struct_fields__) else "supervised"


def read_row(row: dict[str, Any], method: MethodName) -> Row:
    """The checked row. Raises InvalidValueError, Refusal."""
    if method == "dpo":
        pair = fitted(row, PreferenceRow)
        _check_order(pair.input.messages, ends_with=QUESTIONS)
        chosen, rejected = pair.preferred_output[0], pair.non_preferred_output[0]
        for name, answer in (("preferred_output", chosen), ("non_preferred_output", rejected)):
            if answer.role != "assistant":
                raise InvalidValueError(f"{name}[0].role is {answer.role!r}; it must be 'assistant'")
            _check_message(answer, f"{name}[0]")
        if chosen == rejected:
            raise InvalidValueError("preferred_output and non_preferred_output are the same answer")
        return pair
    if method == "supervised":
        talk = fitted(row, SupervisedRow)
        _check_order(talk.messages, ends_with=("assistant",))
        if all(message.weight == 0 for message in talk.messages if message.role == "assistant"):
            raise InvalidValueError("every assistant message has weight 0: there is nothing to learn")
        return talk
    asked = fitted({name: row[name] for name in Question.__struct_fields__ if name in row}, Question)
    if asked.response_format is not None and asked.response_format.get("type", "text") != "text":
        raise InvalidValueError("response_format: answers are sampled without a grammar; leave it out")
    _check_order(asked.messages, ends_with=QUESTIONS)
    return asked


def _check_order(messages: list[Message], *, ends_with: tuple[str, ...]) -> None:
    before = ""
    for index, message in enumerate(messages):
        role, where = message.role, f"messages[{index}]"
        follows = f"follows {before!r}" if before else "comes first"
        if role in ("system", "developer") and index:
            raise InvalidValueError(f"{where}: a {role} message {follows}; it must be the first")
        wanted = {"user": ("", "system", "assistant"), "assistant": QUESTIONS, "tool": ("assistant", "tool")}.get(role)
        if wanted is not None and before not in wanted:
            raise InvalidValueError(
                f"{where}: {role!r} {follows}; user and assistant messages must alternate, and tool messages follow "
                "an assistant's"
            )
        _check_message(message, where)
        before = "system" if role == "developer" else role
    if before not in ends_with:
        needed = "the assistant's answer" if ends_with == ("assistant",) else "the question, of role user or tool"
        raise InvalidValueError(f"messages: the last is of role {before!r}; it must be {needed}")


def _check_message(message: Message, where: str) -> None:
    if message.role == "assistant":
        if not message.text.strip() and not message.tool_calls:
            raise InvalidValueError(f"{where}: the assistant's message has neither content nor tool_calls")
        for number, call in enumerate(message.tool_calls or []):
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise InvalidValueError(
                    f"{where}.tool_calls[{number}].function.arguments {shortened(call.function.arguments)}: must be a "
                    "JSON object as text"
                )
        return
    for name in ("weight", "tool_calls", "reasoning_content"):
        if getattr(message, name) is not None:
            raise InvalidValueError(f"{where}.{name}: only an assistant's message has it")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidValueError(f"{where}: a tool message needs tool_call_id")
    if message.content is None or (message.role == "user" and not message.text.strip()):
        raise InvalidValueError(f"{where}: a {message.role} message needs content")


# Files.


def check_file(path: Path) -> tuple[MethodName, int]:
    """(the method that the file's rows are for, the number of rows).

    Raises InvalidValueError with the first MOST_SHOWN problems, each with its line.
    """
    method: MethodName | None = None
    num_rows = 0
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            row = _object(line)
            if method is None:
                method = method_of(row)
            elif method_of(row) != method and method != "reinforcement":
                raise InvalidValueError(f"a row for method {method_of(row)}; the rows before are for {method}")
            read_row(row, method)
            num_rows += 1
        except (InvalidValueError, Refusal) as error:
            problems.append(f"line {number}: {_said(error)}")
    if problems:
        raise _listed(problems)
    if method is None:
        raise InvalidValueError("the file is empty: it must have a JSON object on each line")
    return method, num_rows


def translate(path: Path, target: Path, method: MethodName, grader: StringCheck | None) -> int:
    """Writes the rows as the trainer reads them (OpenAI's format of `dataset_info.json`, with columns messages, tools,
    chosen, rejected); returns their number. Raises as `check_file`."""
    num_rows = 0
    problems: list[str] = []
    with target.open("w", encoding="utf-8") as written:
        following = 1
        for number, line in _lines(path):
            try:
                row = _object(line)
                made = _translated(read_row(row, method), row, grader)
            except (InvalidValueError, Refusal) as error:
                problems.append(f"line {number}: {_said(error)}")
                continue
            written.write("\n" * (number - following) + json.dumps(made) + "\n")
            following, num_rows = number + 1, num_rows + 1
    if problems:
        raise _listed(problems)
    return num_rows


def _translated(row: Row, given: dict[str, Any], grader: StringCheck | None) -> dict[str, Any]:
    if isinstance(row, PreferenceRow):
        chosen, rejected = _message(row.preferred_output[0]), _message(row.non_preferred_output[0])
        talk = _talk(row.input.messages, given["input"].get("tools"))
        return {**talk, "chosen": chosen, "rejected": rejected}
    talk = _talk(row.messages, given.get("tools"))
    if isinstance(row, Question):
        assert grader is not None, "of method reinforcement"
        talk["messages"].append({"role": "assistant", "content": reference_of(grader, given)})
    return talk


def _talk(messages: list[Message], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """`tools`: as they are in the file, checked."""
    talk: dict[str, Any] = {"messages": [_message(message) for message in messages]}
    return {**talk, "tools": [{"type": "function", "function": tool["function"]} for tool in tools]} if tools else talk


def _message(message: Message) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in ("name", "weight", "tool_call_id", "reasoning_content")}
    made = {name: value for name, value in fields.items() if value is not None}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return {**made, "role": "system" if message.role == "developer" else message.role, "content": message.text}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not blank."""
    with path.open("rb") as file:
        read: Callable[[], bytes] = lambda: file.readline(LONGEST_LINE_BYTES + 1)  # noqa: E731
        for number in itertools.count(1):
            line = read()
            if not line:
                return
            if len(line) > LONGEST_LINE_BYTES:
                raise InvalidValueError(f"line {number}: has more than {LONGEST_LINE_BYTES} bytes")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _object(line: bytes) -> dict[str, Any]:
    row = read_json(line)
    if not isinstance(row, dict):
        raise InvalidValueError(f"must be a JSON object, not {shortened(row)}")
    return row


def _said(error: InvalidValueError | Refusal) -> str:
    text = error.message if isinstance(error, Refusal) else str(error)
    return text.replace("the body", "the row")


def _listed(problems: list[str]) -> InvalidValueError:
    more = f"\nand {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
    return InvalidValueError("\n".join(problems[:MOST_SHOWN]) + more)
