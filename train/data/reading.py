"""The recipe's datasets, row by row, in the order of `mix_strategy`. Only the current row is kept in memory."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kt_runtime.errors import InvalidValueError, UnknownNameError, UserError
from kt_runtime.train.data import alpaca, chat
from kt_runtime.train.data.catalog import DatasetInfo, read_catalog
from kt_runtime.train.data.conversations import Conversation, Message, Preference, Question
from kt_runtime.train.data.mixing import STRATEGIES, mix
from kt_runtime.train.data.rows import Report, Row, read_rows, refuse
from kt_runtime.train.data.turns import RowSkipped, Turns, is_empty

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe

Say = Callable[[str], None]
Read = Conversation | Preference | Question

_NUM_NAMED = 5


def read_datasets(recipe: Recipe, names: tuple[str, ...], say: Say) -> Iterator[Read]:
    """Rows of all named datasets, at most `max_samples` of each. `say` names and counts rows left out.

    Checks names and descriptions at once, rows while reading. Raises NotFoundError, UnknownNameError, and
    InvalidValueError for a row that violates its format, and for a dataset without a usable row.
    """
    datasets = _open(recipe, names, say)
    _check_mixing(recipe, names)
    return mix([dataset.rows for dataset in datasets], recipe.mix_strategy, recipe.interleave_probs, recipe.seed)


def read_named(recipe: Recipe, names: tuple[str, ...], say: Say) -> Iterator[tuple[str, Read]]:
    """As `read_datasets`, with each row's dataset name, and always one dataset after the other."""
    return ((dataset.info.name, row) for dataset in _open(recipe, names, say) for row in dataset.rows())


def read_all_that_can_be(recipe: Recipe, names: tuple[str, ...], report: Report) -> Iterator[Read]:
    """As `read_named`, without the names. Passes each problem of a dataset or row to `report` and continues with the
    next one. Not for runs."""
    for name in names:
        try:
            for dataset in _open(recipe, (name,), lambda _: None, report):
                yield from dataset.rows()
        except UserError as error:
            report(error)
    try:
        _check_mixing(recipe, names)
    except UserError as error:
        report(error)


def _open(recipe: Recipe, names: tuple[str, ...], say: Say, report: Report = refuse) -> list[_Dataset]:
    infos = read_catalog(recipe.dataset_dir, names, recipe.where("dataset_dir"), needs_answers=recipe.stage != "grpo")
    for info in infos:
        if info.ranking != (recipe.stage == "dpo"):
            fits, kind = ("dpo", "pairs of answers") if info.ranking else ("sft or grpo", "single answers")
            raise InvalidValueError(
                f"{recipe.where('stage')}: stage: {recipe.stage}: does not fit dataset {info.name!r} ({info.path}), "
                f"whose rows hold {kind} (ranking: {str(info.ranking).lower()}, {info.where}); it fits stage: {fits}"
            )
    return [_Dataset(info, recipe, say, report) for info in infos]


def _check_mixing(recipe: Recipe, names: tuple[str, ...]) -> None:
    if recipe.mix_strategy not in STRATEGIES:
        where = recipe.where("mix_strategy")
        raise UnknownNameError("mix_strategy", str(recipe.mix_strategy), STRATEGIES, where=where)
    shares = recipe.interleave_probs
    if shares is None or recipe.mix_strategy == "concat":
        return
    where = f"{recipe.where('interleave_probs')}: interleave_probs: {list(shares)}"
    if len(shares) != len(names):
        raise InvalidValueError(f"{where}: {len(shares)} shares for {len(names)} datasets ({', '.join(names)})")
    if not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-8):
        raise InvalidValueError(f"{where}: must be above 0 and sum to 1, they sum to {sum(shares):g}")


class _Dataset:
    """One dataset of the recipe. Each call of `rows` reads the file; only the first one prints messages."""

    def __init__(self, info: DatasetInfo, recipe: Recipe, say: Say, report: Report) -> None:
        self.info, self._recipe, self._tell, self._report = info, recipe, say, report
        self._asks = recipe.stage == "grpo"
        reader = alpaca if info.formatting == "alpaca" else chat
        self._read = reader.read_question if self._asks else reader.read_turns
        # A reward may read any column of a question; `read_rows` reads all columns for none.
        self._columns = frozenset(column for column in info.columns.values() if column and not self._asks)
        self._passes = self._num_wrong = 0

    def rows(self) -> Iterator[Read]:
        self._passes += 1
        say = self._tell if self._passes == 1 else lambda _: None
        num_rows = num_skipped = 0
        try:
            for row in self._chosen_rows():
                if num_rows == 0:
                    self._say_columns(row, say)
                num_rows += 1
                try:
                    made = self._convert(row)
                except RowSkipped as reason:
                    num_skipped += 1
                    if num_skipped <= _NUM_NAMED:
                        say(f"dataset {self.info.name}: {row.where}: left out: {reason}")
                except InvalidValueError as error:
                    self._problem(error)
                else:
                    yield made
        finally:
            if num_skipped:
                say(f"dataset {self.info.name}: {num_skipped:,} of {num_rows:,} rows left out")
        if num_rows == num_skipped and not self._num_wrong:
            problem = "every row was left out" if num_rows else "it holds no rows"
            raise InvalidValueError(f"{self.info.where}: {self.info.path}: {problem}; there is nothing to learn")

    def _problem(self, error: UserError) -> None:
        self._num_wrong += 1
        self._report(error)

    def _chosen_rows(self) -> Iterator[Row]:
        """The first `max_samples` rows; with `num_samples` that many random rows, in the order of the file."""
        most, wanted = self._recipe.max_samples, self.info.num_samples
        if wanted is None:
            for number, row in enumerate(read_rows(self.info.path, self._columns, self._problem)):
                if number == most:
                    return
                yield row
            return
        num_rows = sum(1 for _ in read_rows(self.info.path, self._columns, lambda _: None))
        repeats = self._draw(num_rows, min(wanted, most or wanted)) if num_rows else []
        for row, repeat in zip(read_rows(self.info.path, self._columns, self._problem), repeats, strict=False):
            for _ in range(repeat):
                yield row

    def _draw(self, num_rows: int, num_wanted: int) -> list[int]:
        """How often each row is taken. If more rows are wanted than exist, some are repeated, as in LLaMA-Factory."""
        random = np.random.default_rng([self._recipe.seed, zlib.crc32(self.info.name.encode())])
        if num_wanted >= num_rows:
            return (1 + random.multinomial(num_wanted - num_rows, np.full(num_rows, 1 / num_rows))).tolist()
        repeats = np.zeros(num_rows, np.int64)
        repeats[random.permutation(num_rows)[:num_wanted]] = 1
        return repeats.tolist()

    def _say_columns(self, row: Row, say: Say) -> None:
        """Reports which columns of the first row are read or not, where the recipe's author may expect otherwise."""
        if self.info.formatting == "openai":
            return
        names = ("system", "tools", "history") if self.info.formatting == "alpaca" else ("system", "tools")
        filled = [name for name in names if row.values.get(name)]
        unread = [name for name in filled if name not in self.info.columns.values()]
        where = f"dataset {self.info.name}: {row.where}"
        if self.info.named_columns and unread:
            say(f"{where}: column {', '.join(unread)} is not read: columns in {self.info.where} does not name it")
        elif filled and not self.info.named_columns:
            say(f"{where}: column {', '.join(filled)} is read, though dataset_info.json does not name it")

    def _convert(self, row: Row) -> Read:
        turns = self._read(row, self.info)
        system = turns.system or self._recipe.default_system
        messages = [{"role": "system", "content": system}, *turns.messages] if system else turns.messages
        if self._asks:
            answer = str(turns.answers[0]["content"]) if turns.answers else None
            return Question(tuple(messages), answer, row.values, turns.tools, row.where)
        if self.info.ranking:
            chosen, rejected = turns.answers
            self._check_answers((chosen, rejected))
            if chosen == rejected:
                raise RowSkipped("chosen and rejected are the same answer")
            return Preference(tuple(messages), chosen, rejected, turns.tools, row.where)
        self._check_answers(turns.answers if self._recipe.mask_history else _answers(turns))
        return Conversation((*messages, *turns.answers), turns.tools, row.where)

    def _check_answers(self, answers: tuple[Message, ...]) -> None:
        if any(is_empty(answer) for answer in answers):
            raise RowSkipped("its answer is empty" if len(answers) == 1 else "one of its answers is empty")


def _answers(turns: Turns) -> tuple[Message, ...]:
    """All answers, those before the last question included: all of them are trained on."""
    return tuple(message for message in (*turns.messages, *turns.answers) if message["role"] == "assistant")
