"""Turns conversations into token ids and loss masks, with the chat template that the server itself uses.

An answer's tokens follow its prompt's tokens exactly as in serving. Text is cut where an answer begins and the parts
are tokenised separately, because the model never emits a token that straddles the end of its prompt. Between two
answers the text is tokenised as a whole, as the server tokenises history.

A row longer than `cutoff_len` is truncated at its end. As in TRL, a row without a trained token is then left out and
counted. (LLaMA-Factory truncates prompt and answer in proportion, and trains on rows without a trained token.)
A question to be answered is never truncated: it is left out if its prompt is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.train.data import Conversation, Preference, Question
from kt_runtime.train.examples import Example, Mask, Pair, Prompt, Tokens
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.render.chat_template import ChatTemplate
from kt_runtime.train.render.named_template import NamedTemplate
from kt_runtime.train.render.pieces import Messages, Piece, Template, Tools, tokenize
from kt_runtime.train.render.tally import EQUAL, NOTHING_TRAINED, TOO_LONG, Tally
from kt_runtime.train.render.template_comparison import compare
from kt_runtime.train.templates.table import named

Row = Conversation | Preference | Question
Item = Example | Pair | Prompt

CHUNK_ROWS = 256


class Renderer:
    """Renders with the tokenizer from the served model's directory. No code from that directory is run.

    Raises NotFoundError without a tokenizer.json, InvalidValueError if it is unreadable or if there is neither a chat
    template nor a named one, UnknownNameError for an unknown template.
    """

    def __init__(self, model_directory: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer: Any = _load_tokenizer(Path(model_directory))
        self._served = ChatTemplate(self.tokenizer, self.options) if self.tokenizer.chat_template else None
        self._named = self._named_template()
        template: Template | None = self._named or self._served
        if template is None:
            raise InvalidValueError(
                f"{model_directory}: the tokenizer has no chat template; name one in the recipe (template: deepseek3)"
            )
        self._template = template

    def render(self, row: Row) -> Item | None:
        """None if truncation at `cutoff_len` leaves no trained token, or two equal answers, and for a longer prompt."""
        return self._rendered([row], Tally())[0]

    def render_all(self, rows: Iterable[Row], say: Callable[[str], None]) -> list[Item]:
        """Renders rows while reading them; reports how many rows were truncated and left out.

        Raises InvalidValueError for a row that the template can't render, and if no row is left.
        """
        tally = Tally()
        items: list[Item] = []
        remaining = iter(rows)
        while chunk := list(itertools.islice(remaining, CHUNK_ROWS)):
            items += [item for item in self._rendered(chunk, tally) if item is not None]
        tally.report(self.recipe.cutoff_len, say)
        for note in self._served.new_notes() if self._served else ():
            say(note)
        if tally.num_rows and not items:
            raise InvalidValueError(
                f"{self.recipe.where('cutoff_len')}: cutoff_len: {self.recipe.cutoff_len}: leaves nothing to train on "
                f"in any of {tally.num_rows} rows"
            )
        return items

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Token ids of the prompt for the next answer, not truncated."""
        pieces = self._template.prompt(self._with_system(messages), tools, "the prompt")
        ids: list[int] = tokenize(self.tokenizer, [pieces])[0][0].tolist()
        return ids

    @property
    def options(self) -> dict[str, Any]:
        """The model's chat template's arguments besides the messages: a request's `chat_template_kwargs`."""
        recipe = self.recipe
        options: dict[str, Any] = {}
        if recipe.enable_thinking is not None:
            options["enable_thinking"] = recipe.enable_thinking
        if recipe.preserve_thinking:
            options["preserve_thinking"] = True
        if recipe.reasoning_effort is not None:
            options["reasoning_effort"] = recipe.reasoning_effort
        return options

    @property
    def end(self) -> str | None:
        """The end of an answer in a named template, which the server may not know; None for the server's template."""
        return self._named.end if self._named else None

    def marked(self, item: Item) -> str:
        """The text with trained tokens between «»; for a pair, both answers after their prompt."""
        if isinstance(item, Prompt):
            return str(self.tokenizer.decode(item.ids))
        if isinstance(item, Pair):
            return f"chosen:\n{self.marked(item.chosen)}\nrejected:\n{self.marked(item.rejected)}"
        starts = [0, *(np.flatnonzero(np.diff(item.trained)) + 1).tolist(), item.num_tokens]
        text = self.tokenizer.decode(item.tokens[:1]) if item.num_tokens else ""
        for start, end in itertools.pairwise(dict.fromkeys(starts)):
            run = self.tokenizer.decode(item.targets[start:end])
            text += f"«{run}»" if item.trained[start] else run
        return str(text)

    def comparison(self) -> str | None:
        """A warning, with both texts, if a named template and the server's render differently; otherwise None."""
        if self._named is None:
            return None
        return compare(self._named, self._served, self.tokenizer, self.recipe.where("template"))

    def _named_template(self) -> NamedTemplate | None:
        recipe = self.recipe
        template = named(recipe.template, recipe.where("template"))
        if template is None:
            return None
        bos, eos = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
        return NamedTemplate(str(recipe.template), template, bos, eos, recipe.enable_thinking, recipe.preserve_thinking)

    def _rendered(self, rows: Sequence[Row], tally: Tally) -> list[Item | None]:
        tally.num_rows += len(rows)
        sequences = [pieces for row in rows for pieces in self._pieces(row)]
        tokenized = iter(tokenize(self.tokenizer, sequences))
        return [self._item(row, tokenized, tally) for row in rows]

    def _item(self, row: Row, tokenized: Iterator[tuple[Tokens, Mask]], tally: Tally) -> Item | None:
        if isinstance(row, Question):
            return self._prompt(row, next(tokenized)[0], tally)
        if isinstance(row, Preference):
            return self._pair(row, next(tokenized), next(tokenized), tally)
        return self._example(row, next(tokenized), tally)

    def _pieces(self, row: Row) -> list[list[Piece]]:
        """One sequence for a conversation, two for a preference."""
        messages = self._with_system(row.messages)
        if isinstance(row, Question):
            return [self._template.prompt(messages, row.tools, row.where)]
        if isinstance(row, Preference):
            replies = [
                self._template.reply(messages, answer, row.tools, row.where) for answer in (row.chosen, row.rejected)
            ]
            return [prompt + answer for prompt, answer in replies]
        pieces = self._template.conversation(messages, row.tools, row.where, last_only=self.recipe.mask_history)
        return [[piece.whole for piece in pieces] if self.recipe.train_on_prompt else pieces]

    def _prompt(self, row: Question, ids: Tokens, tally: Tally) -> Prompt | None:
        if len(ids) > self.recipe.cutoff_len:
            tally.lose(TOO_LONG, row.where)
            return None
        return Prompt(ids, str(row.messages[-1].get("content") or ""), row.answer, row.columns, row.where)

    def _example(self, row: Row, sequence: tuple[Tokens, Mask], tally: Tally) -> Example | None:
        [example] = self._cut(row, [sequence], tally)
        if not example.num_trained:
            tally.lose(NOTHING_TRAINED, row.where)
            return None
        return example

    def _pair(
        self, row: Preference, chosen: tuple[Tokens, Mask], rejected: tuple[Tokens, Mask], tally: Tally
    ) -> Pair | None:
        better, worse = self._cut(row, [chosen, rejected], tally)
        pair = Pair(better, worse, row.where)
        if not all(example.num_trained for example in pair.examples):
            tally.lose(NOTHING_TRAINED, row.where)
        elif np.array_equal(pair.chosen.ids, pair.rejected.ids):
            tally.lose(EQUAL, row.where)
        else:
            return pair
        return None

    def _cut(self, row: Row, sequences: Sequence[tuple[Tokens, Mask]], tally: Tally) -> list[Example]:
        """The examples of one row. A row counts once, by its longest sequence."""
        limit = self.recipe.cutoff_len
        longest = max(len(ids) for ids, _ in sequences)
        if longest > limit:
            tally.cut(row.where, longest)
        return [
            Example.of(ids if len(ids) <= limit else ids[:limit].copy(), trained[:limit], row.where)
            for ids, trained in sequences
        ]

    def _with_system(self, messages: Messages) -> Messages:
        """Adds `default_system` to a row without a system turn."""
        if self.recipe.default_system is None or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": self.recipe.default_system}, *messages]


def _load_tokenizer(model_directory: Path) -> Any:
    from transformers import AutoTokenizer

    if not (model_directory / "tokenizer.json").is_file():
        raise NotFoundError(
            f"{model_directory / 'tokenizer.json'}: not found; rows are tokenised with it, and no code of a model's "
            "directory is run"
        )
    try:
        return AutoTokenizer.from_pretrained(model_directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"{model_directory}: its tokenizer can't be used: {error}") from None
