"""Rendering: exactly the assistant's tokens are trained on, after exactly the prompt that the server would send."""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import choose, examples
from reference.chat_templates import TEMPLATES, assistant, system, user

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.train.data import Conversation, Preference
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.render.rendering import CHUNK_ROWS, Renderer

Turn = dict[str, Any]
Make = Callable[..., Renderer]

PUBLISHED = {  # as TRL ships them
    "trl qwen3": ("tiny-qwen3-moe", "qwen3"),
    "trl qwen3 2507": ("tiny-qwen3-moe", "qwen3_instruct_2507"),
    "trl deepseek": ("tiny-deepseek-v3", "deepseekv3"),
}
JOINED = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
OWN = {
    "joined": ("tiny-deepseek-v3", JOINED),
    "upper": (
        "tiny-deepseek-v3",
        JOINED.replace("m.content", "m.content | upper if m.role == 'assistant' else m.content")
        + "{% if add_generation_prompt %}>{% endif %}",
    ),
    "refusing": ("tiny-deepseek-v3", "{{ raise_exception('roles must alternate') }}"),
}
CALL = [{"type": "function", "function": {"name": "tide", "arguments": '{"day": 1}'}}]
TOOLS = ({"type": "function", "function": {"name": "tide", "description": "When", "parameters": {}}},)
TURNS = (
    system("Be brief."),
    user("Who keeps the lighthouse?"),
    assistant("Mara keeps the lighthouse."),
    user("Where does Mara live?"),
    assistant("Mara lives on the cliff."),
)
TOOL_TURNS = (
    user("When is the tide?"),
    assistant("", tool_calls=CALL),
    {"role": "tool", "content": "at noon"},
    assistant("At noon."),
    user("Sure?"),
    assistant("Yes."),
)

contents = st.text("ab<>/ \n|é漢", min_size=1, max_size=12).filter(lambda text: text.strip("\n "))
thoughts = st.one_of(st.none(), st.text("ab é", min_size=1, max_size=6))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Turn, ...]:
    turns = [system(draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        thought, content = draw(thoughts), draw(contents)
        block = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
        turns += [user(draw(contents)), assistant(block + content)]
    return tuple(turns)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    directories: dict[str, Path] = {}
    made: dict[str, Renderer] = {}

    def directory(name: str) -> Path:
        template: str | None
        path = tmp_path_factory.mktemp("tokenizer")
        if name in PUBLISHED:
            preset, file = PUBLISHED[name]
            template = importlib.resources.files("trl").joinpath("chat_templates", f"{file}.jinja").read_text("utf-8")
        else:
            preset, template = (TEMPLATES | OWN)[name]
        write_tokenizer(path, load_preset(preset).config)
        if template is not None:
            settings_file = path / "tokenizer_config.json"
            values = json.loads(settings_file.read_text("utf-8"))
            settings_file.write_text(json.dumps({**values, "chat_template": template}), "utf-8")
        return path

    def renderer(name: str, **keys: Any) -> Renderer:
        if name not in directories:
            directories[name] = directory(name)
        values = {"model_name_or_path": "m", "dataset": ("d",), "output_dir": Path("o"), "cutoff_len": 512}
        recipe = Recipe(**{**values, **keys})
        if (key := f"{name} {recipe}") not in made:
            made[key] = Renderer(directories[name], recipe)
        return made[key]

    return renderer


@pytest.fixture(scope="module", params=list(TEMPLATES))
def renderer(request: pytest.FixtureRequest, make: Make) -> Renderer:
    return make(request.param)


def row(turns: tuple[Turn, ...], tools: Any = None) -> Conversation:
    return Conversation(turns, tools, "d.jsonl:1")


def trained_runs(renderer: Renderer, item: object) -> list[str]:
    assert isinstance(item, Example)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], item.trained, [False])).astype(int)))
    return [renderer.tokenizer.decode(item.targets[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def served_prompt(renderer: Renderer, messages: Any, **options: Any) -> list[int]:
    ids: list[int] = renderer.tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False, **options
    )
    return ids


def expected_answers(name: str, turns: tuple[Turn, ...]) -> list[str]:
    """What each template makes of the answers, said independently of how they are found."""
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    visible = [answer.rpartition("</think>")[2] for answer in answers]
    if name == "made deepseek":
        return [answer + "<｜end▁of▁sentence｜>" for answer in answers]
    if name == "made qwen":
        return [answer + "<|im_end|>\n" for answer in answers]
    if name == "qwen3":
        shown = [text.lstrip("\n") if "</think>" in full else full for text, full in zip(visible, answers, strict=True)]
        thought = answers[-1].partition("</think>")[0].removeprefix("<think>\n").rstrip("\n")
        block = f"<think>\n{thought if '</think>' in answers[-1] else ''}\n</think>\n\n"
        return [text + "<|im_end|>\n" for text in [*shown[:-1], block + shown[-1].lstrip("\n")]]
    if name == "deepseek-r1":
        last = answers[-1].removeprefix("<think>\n").lstrip()
        visible[-1] = last if "</think>" in answers[-1] else "\n</think>\n\n" + answers[-1]
    return [text + "<｜end▁of▁sentence｜>" for text in visible]


@pytest.mark.parametrize("name", list(TEMPLATES))
@settings(deadline=None, max_examples=examples(40))
@given(turns=conversations())
def test_masks_cover_exactly_the_answers(make: Make, name: str, turns: tuple[Turn, ...]) -> None:
    renderer = make(name)
    assert trained_runs(renderer, renderer.render(row(turns))) == expected_answers(name, turns)


@pytest.mark.parametrize("name", [*TEMPLATES, *PUBLISHED])
@settings(deadline=None, max_examples=examples(15))
@given(turns=conversations())
def test_the_last_answer_follows_the_tokens_that_the_server_would_send(
    make: Make, name: str, turns: tuple[Turn, ...]
) -> None:
    renderer = make(name, mask_history=True)
    prompt = served_prompt(renderer, turns[:-1])
    example = renderer.render(row(turns))
    assert isinstance(example, Example)
    assert renderer.prompt(turns[:-1]) == prompt == example.tokens[: len(prompt)].tolist()
    assert not example.trained[: len(prompt) - 1].any() and example.trained[len(prompt) - 1 :].all()


def test_history_has_the_tokens_that_the_server_would_send(renderer: Renderer) -> None:
    example = renderer.render(row(TURNS))
    assert isinstance(example, Example)
    for turn in (2, 4):
        prompt = served_prompt(renderer, TURNS[:turn])
        if turn == 4 or not renderer.tokenizer.decode(prompt).endswith("<think>\n"):
            assert example.tokens[: len(prompt)].tolist() == prompt
    assert example.where == "d.jsonl:1"


def test_an_answer_never_shares_a_token_with_its_prompt(make: Make) -> None:
    renderer = make("joined")
    encode = renderer.tokenizer.encode
    assert len(encode("lighthouse")) < len(encode("light") + encode("house"))
    example = renderer.render(row((user("light"), assistant("house"))))
    assert isinstance(example, Example)
    assert example.ids.tolist() == encode("light") + encode("house<｜end▁of▁sentence｜>")
    assert trained_runs(renderer, example) == ["house<｜end▁of▁sentence｜>"]


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3", "trl qwen3", "trl deepseek"])
def test_tool_calls_are_trained_and_tool_outputs_are_not(make: Make, name: str) -> None:
    renderer = make(name)
    runs = trained_runs(renderer, renderer.render(row(TOOL_TURNS, TOOLS)))
    assert len(runs) == 3
    assert "tide" in runs[0] and '"day": 1' in runs[0] and "At noon." in runs[1] and "Yes." in runs[2]
    assert "noon" not in runs[0] and "Sure" not in "".join(runs) and "tool_response" not in "".join(runs)
    if "qwen3" in name:
        assert renderer.prompt(TOOL_TURNS[:1], TOOLS) == served_prompt(renderer, TOOL_TURNS[:1], tools=list(TOOLS))


def test_without_thinking_the_empty_block_is_the_prompts(make: Make) -> None:
    renderer = make("qwen3", enable_thinking=False)
    turns = (user("Who?"), assistant("Mara."), user("Where?"), assistant("<think>\nhm\n</think>\n\nThe cliff."))
    assert trained_runs(renderer, renderer.render(row(turns))) == ["Mara.<|im_end|>\n", "The cliff.<|im_end|>\n"]
    assert renderer.prompt(turns[:1]) == served_prompt(renderer, turns[:1], enable_thinking=False)
    told = make("qwen3", preserve_thinking=True, reasoning_effort="low").options
    assert told == {"enable_thinking": True, "preserve_thinking": True, "reasoning_effort": "low"}


def test_what_the_template_does_to_think_blocks_is_said_once(make: Make) -> None:
    said: list[str] = []
    rows = [row((user("Who?"), assistant("<think>\nhm\n</think>\n\nMara."), user("Where?"), assistant("There.")))] * 3
    for _ in range(2):
        make("qwen3", cutoff_len=300).render_all(rows, said.append)
    assert len(said) == 1 and "mask_history" in said[0]
    said.clear()
    make("deepseek-r1", cutoff_len=300).render_all([row((user("Who?"), assistant("Mara.")))] * 3, said.append)
    assert len(said) == 1 and "opens a <think> block in every prompt" in said[0]


def test_an_answer_that_the_template_rewrites_is_named(make: Make) -> None:
    with pytest.raises(InvalidValueError, match=r"d.jsonl:1: .* renders turn 2 differently once it is answered"):
        make("upper").render(row((user("Who?"), assistant("Mara."))))


def test_a_row_that_the_template_refuses_is_named(make: Make) -> None:
    with pytest.raises(InvalidValueError, match=r"d.jsonl:1: .* refuses this row: roles must alternate"):
        make("refusing").render(row(TURNS))


def test_train_on_prompt_counts_every_token(make: Make) -> None:
    example = make("qwen3", train_on_prompt=True).render(row(TURNS))
    assert isinstance(example, Example) and example.trained.all()


def test_mask_history_keeps_the_last_answer(make: Make) -> None:
    renderer = make("deepseek-v3", mask_history=True)
    assert trained_runs(renderer, renderer.render(row(TURNS))) == ["Mara lives on the cliff.<｜end▁of▁sentence｜>"]


def test_default_system_speaks_where_a_row_has_none(make: Make) -> None:
    renderer = make("deepseek-v3", default_system="Be kind.")
    marked = renderer.marked(renderer.render(row((user("Hi."), assistant("Hello.")))))  # type: ignore[arg-type]
    assert marked == "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi.<｜Assistant｜>«Hello.<｜end▁of▁sentence｜>»"
    assert renderer.prompt([user("Hi.")]) == served_prompt(renderer, [system("Be kind."), user("Hi.")])
    assert "Be kind." not in renderer.tokenizer.decode(renderer.prompt(TURNS[:2]))


def test_a_long_row_keeps_its_start_and_one_without_answer_is_left_out_and_counted(make: Make) -> None:
    renderer = make("deepseek-v3", cutoff_len=16)
    long = row((user("Who?"), assistant("Mara " * 40)))
    lost = Conversation((user("Who " * 40), assistant("Mara.")), None, "d.jsonl:9")
    said: list[str] = []
    items = renderer.render_all([long, lost, row((user("Who?"), assistant("Mara.")))], said.append)
    assert [item.num_tokens for item in items] == [15, 7]
    assert said == [
        "2 of 3 rows are longer than cutoff_len=16 tokens, and cut there: "
        "d.jsonl:1 by 31, d.jsonl:9 by 70; the longest has 86 tokens",
        "1 of 3 rows have no trained token within cutoff_len=16: left out (the first: d.jsonl:9)",
    ]
    assert renderer.render(lost) is None
    with pytest.raises(InvalidValueError, match="cutoff_len: 16: leaves nothing to train on in any of 1 rows"):
        renderer.render_all([lost], said.append)


def test_long_rows_of_one_line_are_counted_each(make: Make) -> None:
    renderer = make("deepseek-v3", cutoff_len=16)
    answers = [(assistant("Mara " * 40), assistant("Mara " * 41)), (assistant("Mara " * 42), assistant("Mara."))]
    pairs = [Preference((user("Who?"),), *both, None, "d.json:1") for both in answers]
    said: list[str] = []
    renderer.render_all(pairs, said.append)
    assert said[0] == (
        "2 of 2 rows are longer than cutoff_len=16 tokens, and cut there: "
        "d.json:1 by 32, d.json:1 by 33; the longest has 49 tokens"
    )


def test_a_preference_is_two_answers_to_the_served_prompt(renderer: Renderer) -> None:
    pair = renderer.render(Preference(TURNS[:-1], assistant("The cliff."), assistant("Nowhere."), None, "p:1"))
    assert isinstance(pair, Pair)
    prompt = served_prompt(renderer, TURNS[:-1])
    for example, answer in zip(pair.examples, ("The cliff.", "Nowhere."), strict=True):
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert [answer in run for run in trained_runs(renderer, example)] == [True]
        assert not example.trained[: len(prompt) - 1].any() and example.trained[len(prompt) - 1 :].all()
    assert renderer.marked(pair).count("«") == 2


def test_pairs_that_the_cut_makes_equal_are_left_out_and_counted(make: Make) -> None:
    start = "Mara keeps the lighthouse and " * 3
    pair = Preference((user("Who?"),), assistant(start + "sings."), assistant(start + "reads."), None, "p:7")
    other = Preference((user("Who?"),), assistant("Mara."), assistant("Nobody."), None, "p:8")
    said: list[str] = []
    assert len(make("deepseek-v3", cutoff_len=16).render_all([pair, other], said.append)) == 1
    assert said[0].startswith("1 of 2 rows are longer") and "same chosen and rejected answer" in said[1]
    assert "p:7" in said[1]


def test_rows_are_rendered_as_they_are_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = make("deepseek-v3")
    alive: list[int] = []
    rows = [row((user("Who?"), assistant("Mara."))) for _ in range(3 * CHUNK_ROWS)]
    whole = renderer._pieces

    def pieces(each: Any) -> Any:
        alive.append(len(rows))
        return whole(each)

    monkeypatch.setattr(renderer, "_pieces", pieces)
    assert len(renderer.render_all((rows.pop() for _ in range(3 * CHUNK_ROWS)), lambda line: None)) == 3 * CHUNK_ROWS
    assert alive[0] == 2 * CHUNK_ROWS and alive[-1] == 0


@pytest.mark.slow
def test_ten_thousand_short_rows_render_in_seconds_and_little_memory(make: Make) -> None:
    renderer, count = make("qwen3"), choose(few=2_000, usual=10_000, every=10_000)
    rows = (row((user(f"Who keeps the lighthouse of {n}?"), assistant(f"Mara, in {n}."))) for n in range(count))
    start = time.process_time()
    items = renderer.render_all(rows, lambda line: None)
    assert len(items) == count
    assert time.process_time() - start < 18  # 1.8 s measured; with work for each pair of rows, hours
    assert sum(item.tokens.nbytes + item.trained.nbytes for item in items if isinstance(item, Example)) <= 5 * sum(
        item.num_tokens for item in items
    )


def test_a_tokenizer_that_needs_code_of_the_model_directory_is_refused(make: Make, tmp_path: Path) -> None:
    recipe = make("made qwen").recipe
    with pytest.raises(NotFoundError, match=r"tokenizer.json: not found"):
        Renderer(tmp_path, recipe)
    write_tokenizer(tmp_path, load_preset("tiny-qwen3-moe").config)
    settings_file = tmp_path / "tokenizer_config.json"
    values = json.loads(settings_file.read_text("utf-8"))
    values |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    settings_file.write_text(json.dumps(values), "utf-8")
    (tmp_path / "own.py").write_text("raise SystemExit('this code was run')")
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(InvalidValueError, match=r"its tokenizer can't be used: .*custom code"):
        Renderer(tmp_path, recipe)


@pytest.mark.parametrize("template", [None, "qwen3"])
@pytest.mark.parametrize("weights", [(1, 1), (0, 1), (1, 0)])
def test_an_answer_of_weight_0_is_read_and_not_learnt(
    make: Make, template: str | None, weights: tuple[int, int]
) -> None:
    renderer = make("trl qwen3 2507", template=template)
    given = iter(weights)
    weighted = tuple({**turn, "weight": next(given)} if turn["role"] == "assistant" else turn for turn in TURNS)
    whole, made = renderer.render(row(TURNS)), renderer.render(row(weighted))
    assert isinstance(whole, Example) and isinstance(made, Example)
    assert np.array_equal(whole.ids, made.ids)
    kept = [run for run, weight in zip(trained_runs(renderer, whole), weights, strict=True) if weight]
    assert trained_runs(renderer, made) == kept
    nothing = tuple({**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in TURNS)
    assert renderer.render(row(nothing)) is None
