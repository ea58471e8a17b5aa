"""The native step's table: each tensor or number that does not fit is refused with its name, its value and the rule.

What the step computes is compared with SGLang's modules (tests/unit/sglang_patch/cpu/step), and with double
precision (tests/unit/csrc/step/step_test.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from reference.expert_problems import build_layer, random_problem

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.experts import ExpertLayer, available_isas, free_spare_memory
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.native import spare_memory_bytes
from kt_runtime.experts.step import (
    GatedDelta,
    GatedMlp,
    GroupedQuery,
    Latent,
    LayerLora,
    LoraPool,
    RoutedExperts,
    Step,
    StepLayer,
)

HIDDEN, HEADS, KEY_HEADS, SIZE, EXPERTS, INNER = 16, 4, 2, 6, 4, 8
QUERIES, QKV = HEADS * SIZE, (HEADS + 2 * KEY_HEADS) * SIZE
QUERY_RANK, LATENT, NOPE, VALUE = 5, 8, 4, 3
DELTA_KEY_HEADS, DELTA_HEADS, DELTA_KEY, DELTA_VALUE, TAPS, STATES = 2, 4, 3, 5, 4, 6
RESULTS = DELTA_HEADS * DELTA_VALUE
CHANNELS = 2 * DELTA_KEY_HEADS * DELTA_KEY + RESULTS
LORA_SLOTS, RANK = 3, 2
WHOLE = {"embedding": (10, HIDDEN), "angles": (12, SIZE), "final_norm": (HIDDEN,)}
NORMS = {"input_norm": (HIDDEN,), "post_norm": (HIDDEN,)}
GROUPED_QUERY = {
    "qkv": (QKV, HIDDEN),
    "qkv_bias": (QKV,),
    "query_norm": (SIZE,),
    "key_norm": (SIZE,),
    "keys": (9, KEY_HEADS, SIZE),
    "values": (9, KEY_HEADS, SIZE),
    "out": (HIDDEN, QUERIES),
    "out_bias": (HIDDEN,),
    "sinks": (HEADS,),
}
LATENT_ATTENTION = {
    "compress": (QUERY_RANK + LATENT + SIZE, HIDDEN),
    "query_norm": (QUERY_RANK,),
    "query": (HEADS * (NOPE + SIZE), QUERY_RANK),
    "latent_norm": (LATENT,),
    "key_heads": (HEADS, LATENT, NOPE),
    "value_heads": (HEADS, VALUE, LATENT),
    "keys": (9, 1, LATENT + SIZE),
    "out": (HIDDEN, HEADS * VALUE),
}
GATED_DELTA = {
    "inputs": (CHANNELS + RESULTS, HIDDEN),
    "gates": (2 * DELTA_HEADS, HIDDEN),
    "filter": (CHANNELS, TAPS),
    "log_rate": (DELTA_HEADS,),
    "bias": (DELTA_HEADS,),
    "norm": (DELTA_VALUE,),
    "out": (HIDDEN, RESULTS),
    "kept_inputs": (STATES, CHANNELS, TAPS - 1),
    "states": (STATES, DELTA_HEADS, DELTA_KEY, DELTA_VALUE),
}
MLP = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "gate": (1, HIDDEN)}
ROUTED = {"gate": (EXPERTS, HIDDEN), "gate_bias": (EXPERTS,)}
LORA = {
    "qkv_a": (LORA_SLOTS, 3 * RANK, HIDDEN),
    "qkv_b": (LORA_SLOTS, QKV, RANK),
    "out_a": (LORA_SLOTS, RANK, QUERIES),
    "out_b": (LORA_SLOTS, HIDDEN, RANK),
    "mlp_gate_up_a": (LORA_SLOTS, 2 * RANK, HIDDEN),
    "mlp_gate_up_b": (LORA_SLOTS, 2 * INNER, RANK),
    "mlp_down_a": (LORA_SLOTS, RANK, INNER),
    "mlp_down_b": (LORA_SLOTS, HIDDEN, RANK),
    "gate_up_a": (LORA_SLOTS, EXPERTS, 2 * RANK, HIDDEN),
    "gate_up_b": (LORA_SLOTS, EXPERTS, 2 * INNER, RANK),
    "down_a": (LORA_SLOTS, EXPERTS, RANK, INNER),
    "down_b": (LORA_SLOTS, EXPERTS, HIDDEN, RANK),
}
PARTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "whole": WHOLE, "norms": NORMS, "attention": GROUPED_QUERY, "latent": LATENT_ATTENTION, "delta": GATED_DELTA,
    "mlp": MLP, "routed": ROUTED, "lora": LORA,
}  # fmt: skip
OF_LLAMA_4 = {"rotates", "norms_last", "is_chunked", "temperatures", "temperature_every"}
OF_SPARSE_ATTENTION = {"indexer", "top_k"}
LEFT_OUT = {"attention": {"is_gated"}, "delta": {"key_heads", "by_key_head"}, "routed": {"bias"}}
PLACES = [(place, name) for place, names in PARTS.items() for name in names]
PREFIXES = {
    "whole": "", "norms": "layers[1].", "latent": "layers[1].attention.", "delta": "layers[1].attention."
}  # fmt: skip
OPTIONAL = {
    *(("attention", name) for name in ("qkv_bias", "query_norm", "key_norm", "out_bias", "sinks")),
    *(("routed", "gate_bias"), ("mlp", "gate")),
}
# Tensors from which others' sizes follow: what is said of another last size, and of their absence.
OTHER_SIZE = {
    ("whole", "embedding"): f"final_norm has shape [{HIDDEN}]; expected [{HIDDEN + 1}]",
    ("whole", "angles"): f"angles has {SIZE + 1} columns; must be even",
    ("attention", "query_norm"): f"layers[1].attention.query_norm has shape [7]; expected [{SIZE}] or [{QUERIES}]",
    ("attention", "key_norm"): f"layers[1].attention.key_norm has shape [7]; expected [{SIZE}] or [{KEY_HEADS * SIZE}]",
    ("latent", "query_norm"): "layers[1].attention.compress has shape [19, 16]; expected [20, 16]",
    ("latent", "key_heads"): "layers[1].attention.query has shape [40, 5]; expected [44, 5]",
    ("mlp", "down"): "layers[1].mlp.gate_up has shape [16, 16]; expected [18, 16]",
    ("delta", "filter"): (
        f"layers[1].attention.kept_inputs has shape [6, {CHANNELS}, 3]; expected [6, {CHANNELS}, {TAPS}]"
    ),
    ("delta", "states"): f"layers[1].attention.filter has shape [{CHANNELS}, 4]; expected [{CHANNELS + 4}, any]",
}
ABSENT = {
    ("latent", "query_norm"): "layers[1].attention.compress has shape [19, 16]; expected [14, 16]",
    ("latent", "latent_norm"): (
        "layers[1].attention.latent_norm: the attention is of another kind than that of layers[0]"
    ),
    **{("lora", name): f"layers[1].lora.{name} is missing: A and B come in pairs" for name in LORA},
}
ANY = {"value_heads": [HEADS, "any", LATENT], "down": [HIDDEN, "any"]}


def prefix(place: str) -> str:
    return PREFIXES.get(place, f"layers[1].{place}.")


@dataclass
class Table:
    """What a step is built from: two layers, and a LoRA pool. `latent`: both have latent attention. `delta`: the second
    one is Gated DeltaNet."""

    experts: list[ExpertLayer]
    latent: bool = False
    delta: bool = False

    def __post_init__(self) -> None:
        self.scalars: dict[str, Any] = {
            "heads": HEADS, "top_k": 2, "normalises": True, "groups": None, "epsilon": 1e-6, "scaling": SIZE**-0.5,
            "interleaved": False,
        }  # fmt: skip
        self.pool = {"slots": LORA_SLOTS, "rank": RANK}
        self.parts = {place: [drawn(shapes), drawn(shapes)] for place, shapes in PARTS.items()}

    def tensors(self, place: str) -> dict[str, Any]:
        """Those that a test changes: of the whole, or of the second layer."""
        if place == "latent":
            self.latent = True
            for pool in self.parts["lora"]:
                pool |= dict.fromkeys(name for name in pool if name.startswith(("qkv", "out")))
        if place == "delta":
            self.delta = True
            self.parts["delta"][1] |= {"key_heads": DELTA_KEY_HEADS, "by_key_head": False}
            self.parts["lora"][1] |= dict.fromkeys(("qkv_a", "qkv_b", "out_a", "out_b"))
        return self.parts[place][0 if place == "whole" else 1]

    def attention(self, index: int) -> GroupedQuery | Latent | GatedDelta:
        if self.latent:
            return Latent(**self.parts["latent"][index])
        if self.delta and index == 1:
            return GatedDelta(**self.parts["delta"][index])
        return GroupedQuery(**self.parts["attention"][index])

    def build(self, **options: Any) -> Step:
        layers = [
            StepLayer(
                **self.parts["norms"][index],
                attention=self.attention(index),
                mlp=GatedMlp(**self.parts["mlp"][index]),
                routed=RoutedExperts(**self.parts["routed"][index], bias=None, experts=one),
            )
            for index, one in enumerate(self.experts)
        ]
        pool = LoraPool(**self.pool, layers=[LayerLora(**layer) for layer in self.parts["lora"]])
        return Step(self.scalars, self.parts["whole"][0], layers, pool, **{"num_threads": 1, **options})


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


@pytest.fixture
def table() -> Table:
    return Table([build_layer(random_problem(EXPERTS, HIDDEN, INNER, 1, 1, seed=seed).experts) for seed in (0, 1)])


def run(step: Step, states: list[int] | None = None) -> tuple[torch.Tensor, list[int]]:
    two = torch.tensor([3, 4])
    sequences = Sequences(torch.tensor([[0, 2, 0, 0]]), two.int()[None])
    return step.run(two, two - 3, two, sequences, states=None if states is None else torch.tensor(states))


def refusal(table: Table, **options: Any) -> str:
    with pytest.raises(InvalidValueError) as refused:
        table.build(**options)
    return str(refused.value)


def test_the_table_of_these_tests_is_whole(table: Table) -> None:
    parts = {"attention": GroupedQuery, "latent": Latent, "delta": GatedDelta, "mlp": GatedMlp, "routed": RoutedExperts}
    for place, part in parts.items():
        left_out = {"experts", "window", *OF_LLAMA_4, *OF_SPARSE_ATTENTION, *LEFT_OUT.get(place, ())}
        assert PARTS[place].keys() == {field.name for field in fields(part)} - left_out
    assert NORMS.keys() == {field.name for field in fields(StepLayer)} - {"attention", "mlp", "routed"}
    of_others = {f"{name}_{side}" for name in ("compress", "query", "kv_b", "inputs", "gates") for side in "ab"}
    assert LORA.keys() == {field.name for field in fields(LayerLora)} - of_others
    for place, states in (("attention", None), ("delta", [5]), ("latent", None)):
        table.tensors(place)
        hidden, refused = run(table.build(), states)
        assert hidden.shape == (2, HIDDEN) and hidden.isfinite().all() and refused == []


def test_what_only_llama_4_has_is_checked(table: Table) -> None:
    attention, positions = table.tensors("attention"), len(table.tensors("whole")["angles"])
    attention |= {"rotates": False, "is_chunked": True, "temperatures": torch.ones(positions // 4 + 1)}
    attention["temperature_every"] = 4
    table.scalars["chunk"] = 3
    assert run(table.build())[1] == []
    attention["temperatures"] = torch.ones(positions // 4)
    shapes = f"has shape [{positions // 4}]; expected [{positions // 4 + 1}]"
    assert refusal(table) == f"layers[1].attention.temperatures {shapes}"
    attention["temperature_every"] = 0
    assert refusal(table) == "layers[1].attention.temperature_every is 0; must be at least 1"
    table.scalars["chunk"] = -1
    assert refusal(table) == "chunk is -1; must be at least 1, or 0 for none"
    table.scalars["weighs_input"] = True
    assert refusal(table) == "top_k is 2; with weighs_input it must be 1: an expert's input has one weight"


def test_what_only_hybrids_have_is_checked(table: Table) -> None:
    delta = table.tensors("delta")
    for heads in (0, 3):
        delta["key_heads"] = heads
        assert refusal(table) == (
            f"layers[1].attention.key_heads is {heads}; states has 4 heads of values, which must be a multiple of it, "
            "the same one in all layers"
        )
    delta["key_heads"], delta["filter"] = DELTA_KEY_HEADS, torch.zeros(CHANNELS, 9)
    assert refusal(table) == "layers[1].attention.filter has 9 taps; allowed: 1 to 8"
    attention, table.delta = table.tensors("attention"), False
    attention |= {"is_gated": True, "query_norm": torch.ones(QUERIES), "qkv": torch.zeros(QKV + QUERIES, HIDDEN)}
    attention["qkv_bias"] = torch.zeros(QKV + QUERIES)
    assert refusal(table) == (
        f"layers[1].attention.query_norm has shape [{QUERIES}]; with gates expected [{SIZE}], the elements of a head"
    )
    attention |= {"query_norm": None, "temperatures": torch.ones(13)}
    assert refusal(table) == "layers[1].attention.temperatures: a layer with gates has none"
    attention["temperatures"] = None
    assert run(table.build())[1] == []


def test_the_states_of_a_batch_are_those_of_its_layers(table: Table) -> None:
    with pytest.raises(InvalidValueError, match="states is given; the step has no layers that keep states"):
        run(table.build(), [0])
    kept = table.tensors("delta")
    step, before = table.build(), kept["states"].clone()
    for states, message in (
        (None, "states is missing: the step has layers that keep states"),
        ([0, 1], "states has 2 slots; there are 1 sequences"),
        ([STATES], rf"states\[0\] is {STATES}; allowed: 0 to {STATES - 1}"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            run(step, states)
    assert torch.equal(kept["states"], before), "nothing is written"
    hidden = run(step, [2])[0]
    assert torch.equal(run(step, [4])[0], hidden) and torch.equal(kept["states"][4], kept["states"][2])
    assert [slot for slot in range(STATES) if not torch.equal(kept["states"][slot], before[slot])] == [2, 4]


def test_layers_without_any_keys_are_refused(table: Table) -> None:
    table.tensors("delta")
    table.experts, table.parts["lora"] = table.experts[1:], table.parts["lora"][1:]
    for parts in (table.parts["norms"], table.parts["delta"], table.parts["mlp"], table.parts["routed"]):
        parts.pop(0)
    table.attention = lambda index: GatedDelta(**table.parts["delta"][index])  # type: ignore[method-assign]
    assert refusal(table) == "layers: none has keys; expected attention in one at least"


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(table: Table, place: str, name: str) -> None:
    tensors = table.tensors(place)
    wanted = list(tensors[name].shape)
    tensors[name] = torch.zeros(*wanted[:-1], wanted[-1] + 1)
    expected = str(ANY.get(name, wanted)).replace("'", "")
    message = f"{prefix(place)}{name} has shape {list(tensors[name].shape)}; expected {expected}"
    assert refusal(table) == OTHER_SIZE.get((place, name), message)


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_tensor_of_another_number_of_dimensions_is_refused(table: Table, place: str, name: str) -> None:
    tensors = table.tensors(place)
    tensors[name] = torch.zeros(2, 1, *tensors[name].shape)
    count = tensors[name].dim()
    shape = f" has shape {list(tensors[name].shape)}; expected ["
    message = refusal(table)
    assert message.startswith(prefix(place) + name + (shape if count <= 4 else f" has {count} dimensions; expected "))
    assert name not in ("embedding", "angles") or message.endswith("expected [any, any]")


@pytest.mark.parametrize(("place", "name"), PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_a_tensor_of_another_dtype_is_refused_with_both(
    table: Table, place: str, name: str, dtype: torch.dtype
) -> None:
    tensors = table.tensors(place)
    tensors[name] = tensors[name].to(dtype)
    found = {torch.float16: "an unsupported type"}.get(dtype, str(dtype).removeprefix("torch."))
    message = refusal(table)
    if name != "embedding":
        assert message == f"{prefix(place)}{name} has dtype {found}; allowed: float32"
    elif dtype == torch.bfloat16:  # the dtype of all others
        assert message == "angles has dtype float32; allowed: bfloat16"
    else:
        assert message == f"embedding has dtype {found}; allowed: float32 or bfloat16"


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_tensor_that_is_not_contiguous_is_refused(table: Table, place: str, name: str) -> None:
    tensors = table.tensors(place)
    tensors[name] = tensors[name].repeat_interleave(2, -1)[..., ::2]
    where = " in its last dimension" if name == "embedding" else ""
    assert refusal(table) == f"{prefix(place)}{name} is not contiguous{where}"


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_missing_tensor_is_refused_with_its_name(table: Table, place: str, name: str) -> None:
    tensors = table.tensors(place)
    if place == "whole":
        del tensors[name]
    else:
        tensors[name] = None
    if (place, name) in OPTIONAL:
        assert table.build().scratch_bytes == 0
    else:
        assert refusal(table) == ABSENT.get((place, name), f"{prefix(place)}{name} is missing")


def test_more_columns_of_angles_than_a_head_has_are_refused(table: Table) -> None:
    table.tensors("whole")["angles"] = torch.zeros(12, SIZE + 2)
    assert refusal(table) == f"layers[0].attention.keys has heads of {SIZE} elements; the angles rotate {SIZE + 2}"


OF_FOUR = "layers[0].routed.experts has 4 experts; 2 of them can't be chosen from"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"heads": 5}, "heads is 5; must be a multiple of the key heads, 2"),
        ({"heads": 0}, "heads is 0; must be at least 1"),
        ({"top_k": 0}, "top_k is 0; must be at least 1"),
        ({"top_k": 5}, "layers[0].routed.experts has 4 experts of hidden size 16; expected at least 5 of 16"),
        ({"groups": (3, 1, True, 1.0)}, f"{OF_FOUR} 1 of 3 groups"),
        ({"groups": (4, 1, True, 1.0)}, f"{OF_FOUR} 1 of 4 groups"),
        ({"groups": (2, 3, False, 1.0)}, f"{OF_FOUR} 3 of 2 groups"),
        ({"groups": (0, 1, False, 1.0)}, f"{OF_FOUR} 1 of 0 groups"),
        ({"slots": 0}, "lora_slots is 0 and lora_rank 2; both are 0, or both are at least 1"),
        ({"rank": -1}, "lora_slots is 3 and lora_rank -1; both are 0, or both are at least 1"),
    ],
)
def test_a_number_that_does_not_fit_is_refused_with_its_value(
    table: Table, numbers: dict[str, Any], message: str
) -> None:
    for name, number in numbers.items():
        (table.pool if name in table.pool else table.scalars)[name] = number
    assert refusal(table) == message


def test_experts_of_other_sizes_are_refused(table: Table) -> None:
    second = table.experts[1]
    table.experts[1] = build_layer(random_problem(EXPERTS, HIDDEN + 1, INNER, 1, 1).experts)
    assert refusal(table) == "layers[1].routed.experts has 4 experts of hidden size 17; expected at least 2 of 16"
    table.experts[1] = build_layer(random_problem(EXPERTS - 1, HIDDEN, INNER, 1, 1).experts)
    assert refusal(table) == "layers[1].routed.gate has shape [4, 16]; expected [3, 16]"
    table.experts[1] = second
    assert table.build().scratch_bytes == 0


def test_layers_are_counted(table: Table) -> None:
    table.parts["lora"].pop()
    assert refusal(table) == "the LoRA pool has 1 layers; the decoder stack has 2"
    table.experts, table.parts["lora"] = [], []
    assert refusal(table) == "layers is empty"


def test_an_unknown_instruction_set_lists_those_of_this_machine(table: Table) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(available_isas()[-1])):
        table.build(isa="avx1024")


def test_scratch_is_spare_memory(table: Table) -> None:
    step = table.build()
    expected = run(step)[0]
    assert 0 < step.scratch_bytes <= spare_memory_bytes()
    free_spare_memory()
    assert step.scratch_bytes == spare_memory_bytes() == 0
    assert torch.equal(run(step)[0], expected)


def test_scratch_of_a_running_step_is_not_freed(table: Table) -> None:
    step = table.build()
    expected = run(step)[0]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [run(step)[0] for _ in range(100)])
        while not running.done():
            free_spare_memory()
        assert all(torch.equal(found, expected) for found in running.result())


def test_the_chosen_experts_are_handed_out_and_change_nothing(table: Table) -> None:
    plain, _ = run(table.build())
    step, routes = table.build(), torch.full((2, 2, 2), 77, dtype=torch.int32)
    two = torch.tensor([3, 4])
    batch = (two, two - 3, two, Sequences(torch.tensor([[0, 2, 0, 0]]), two.int()[None]))
    hidden, refused = step.run(*batch, routes=routes)
    assert torch.equal(hidden, plain) and refused == []
    assert routes.min() >= 0 and routes.max() < EXPERTS and (routes[..., 0] != routes[..., 1]).all()
    assert torch.equal(step.run(*batch)[0], plain)
    with pytest.raises(InvalidValueError, match=re.escape("routes has shape [1, 2, 2]; expected [2, 2, 2]")):
        step.run(*batch, routes=routes[:1])


def test_a_negative_window_is_refused_with_its_value(table: Table) -> None:
    table.parts["attention"][1]["window"] = -3
    assert refusal(table) == "layers[1].attention.window is -3; allowed: 0 or more"
