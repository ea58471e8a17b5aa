"""The native step over real ranks: the bits of one process, for hidden states, keys and values."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from reference import moe
from reference.expert_problems import per_expert_tensors
from reference.ranks.real_ranks import KINDS, run_ranks
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.step import (
    AdapterRows,
    BatchLora,
    ExpertAdapter,
    GatedDelta,
    GatedMlp,
    GroupedQuery,
    Latent,
    LayerLora,
    LoraPool,
    RoutedExperts,
    Step,
    StepLayer,
    StepShare,
)
from kt_runtime.ranks import Exchange, Pieces, Share

HIDDEN, HEADS, SIZE, EXPERTS, INNER, TOP_K = 48, 6, 8, 6, 36, 3
QUERY_RANK, LATENT, NOPE, VALUE = 12, 16, 6, 4  # the rotary part of a head has SIZE elements
VOCABULARY, IDS_PER_RANK = 50, {1: 50, 2: 32, 3: 20}
KV_SLOTS, POSITIONS, SLOTS, RANK = 96, 64, 2, 4
MANY, FEW = 40, 5  # tokens of a prompt; a rank sums all columns of up to 32 tokens
KEY = "experts"
ONE = Share(0, 1)


KEY_SIZE, VALUE_SIZE, TAPS = 8, 4, 3  # of Gated DeltaNet: HEADS key heads, twice as many value heads
CHANNELS = (HEADS * KEY_SIZE, HEADS * KEY_SIZE, 2 * HEADS * VALUE_SIZE)
Kind = Literal["plain", "rich", "latent", "delta"]


@dataclass
class Model:
    """All tensors of one process, by name; `experts` of the second layer. "rich": norms of all heads at once, biases,
    sinks, a window, and shared experts beside the routed ones. "latent": latent attention, and shared experts.
    "delta": the first layer is Gated DeltaNet; shared experts."""

    tensors: dict[str, Tensor]
    experts: moe.ReferenceExperts
    dtype: torch.dtype
    kind: Kind = "plain"

    @property
    def is_rich(self) -> bool:
        return self.kind == "rich"

    @classmethod
    def drawn(cls, dtype: torch.dtype, kind: Kind = "plain") -> Model:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int, scale: float = 0.2) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        qkv = 3 * HEADS * SIZE
        tensors = {
            "embedding": draw(VOCABULARY, HIDDEN, scale=1),
            "gate": draw(EXPERTS, HIDDEN, scale=1),
            "mlp.gate_up": draw(2 * INNER, HIDDEN),
            "mlp.down": draw(HIDDEN, INNER),
            "mlp.gate_up_a": draw(SLOTS, 2 * RANK, HIDDEN),
            "mlp.gate_up_b": draw(SLOTS, 2 * INNER, RANK),
            "mlp.down_a": draw(SLOTS, RANK, INNER),
            "mlp.down_b": draw(SLOTS, HIDDEN, RANK),
            "experts.gate_up_a": draw(SLOTS, EXPERTS, 2 * RANK, HIDDEN),
            "experts.gate_up_b": draw(SLOTS, EXPERTS, 2 * INNER, RANK),
            "experts.down_a": draw(SLOTS, EXPERTS, RANK, INNER),
            "experts.down_b": draw(SLOTS, EXPERTS, HIDDEN, RANK),
        }
        for layer in range(2):
            tensors |= {
                f"{layer}.qkv": draw(qkv, HIDDEN),
                f"{layer}.out": draw(HIDDEN, HEADS * SIZE),
                f"{layer}.qkv_a": draw(SLOTS, 3 * RANK, HIDDEN),
                f"{layer}.qkv_b": draw(SLOTS, qkv, RANK),
                f"{layer}.out_a": draw(SLOTS, RANK, HEADS * SIZE),
                f"{layer}.out_b": draw(SLOTS, HIDDEN, RANK),
                f"{layer}.qkv_bias": draw(qkv),
                f"{layer}.out_bias": draw(HIDDEN),
                f"{layer}.sinks": draw(HEADS, scale=1).float(),
                f"{layer}.query_norm": 1 + draw(HEADS * SIZE),
                f"{layer}.key_norm": 1 + draw(HEADS * SIZE),
                f"{layer}.compress": draw(QUERY_RANK + LATENT + SIZE, HIDDEN),
                f"{layer}.query": draw(HEADS * (NOPE + SIZE), QUERY_RANK),
                f"{layer}.key_heads": draw(HEADS, LATENT, NOPE),
                f"{layer}.value_heads": draw(HEADS, VALUE, LATENT),
                f"{layer}.values_out": draw(HIDDEN, HEADS * VALUE),
                f"{layer}.compress_a": draw(SLOTS, 2 * RANK, HIDDEN),
                f"{layer}.compress_b": draw(SLOTS, QUERY_RANK + LATENT + SIZE, RANK),
                f"{layer}.query_a": draw(SLOTS, RANK, QUERY_RANK),
                f"{layer}.query_b": draw(SLOTS, HEADS * (NOPE + SIZE), RANK),
                f"{layer}.kv_b_a": draw(SLOTS, RANK, LATENT),
                f"{layer}.kv_b_b": draw(SLOTS, HEADS * (NOPE + VALUE), RANK),
                f"{layer}.values_out_a": draw(SLOTS, RANK, HEADS * VALUE),
            }
        tensors |= {
            "inputs": draw(sum(CHANNELS) + CHANNELS[2], HIDDEN),
            "gates": draw(4 * HEADS, HIDDEN),
            "filter": draw(sum(CHANNELS), TAPS, scale=1),
            "log_rate": draw(2 * HEADS),
            "bias": draw(2 * HEADS),
            "delta_norm": 1 + draw(VALUE_SIZE),
            "delta_out": draw(HIDDEN, CHANNELS[2]),
            "inputs_a": draw(SLOTS, 2 * RANK, HIDDEN),
            "inputs_b": draw(SLOTS, sum(CHANNELS) + CHANNELS[2], RANK),
            "gates_a": draw(SLOTS, 2 * RANK, HIDDEN),
            "gates_b": draw(SLOTS, 4 * HEADS, RANK),
            "delta_out_a": draw(SLOTS, RANK, CHANNELS[2]),
        }
        return cls(tensors, moe.random_experts(EXPERTS, HIDDEN, INNER, 5), dtype, kind)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class Part:
    """A rank's step, or that of one process, with its keys and values."""

    def __init__(self, model: Model, share: Share, directory: str, exchange: Exchange | None = None) -> None:
        self._model, self._share = model, share
        heads = share.of(HEADS, "heads")
        kept = (1, KV_SLOTS, 1, LATENT + SIZE) if model.kind == "latent" else (2, KV_SLOTS, len(heads), SIZE)
        self.kv = [torch.zeros(kept, dtype=model.dtype) for _ in range(2)]
        own_channels = sum(CHANNELS) // share.num_ranks
        self.inputs = torch.zeros(2, own_channels, TAPS - 1, dtype=model.dtype)
        self.states = torch.zeros(2, 2 * len(heads), KEY_SIZE, VALUE_SIZE)
        layers = [self._layer(layer, None) for layer in range(1)] + [self._layer(1, self._experts(directory))]
        lora = LoraPool(slots=SLOTS, rank=RANK, layers=[self._lora(0), self._lora(1)])
        ids = IDS_PER_RANK[share.num_ranks]
        of_ranks = None if exchange is None else StepShare(exchange.native, share.rank, share.num_ranks, ids)
        scalars = {
            "heads": len(heads),
            "top_k": TOP_K,
            "normalises": True,
            "epsilon": 1e-6,
            "scaling": SIZE**-0.5,
            "interleaved": False,
            "groups": None,
            "vocabulary": VOCABULARY,
        }
        angles = torch.outer(torch.arange(POSITIONS), 0.5 ** torch.arange(SIZE // 2))
        whole = {
            "embedding": model["embedding"][share.rank * ids : (share.rank + 1) * ids].contiguous(),
            "final_norm": torch.ones(HIDDEN, dtype=model.dtype),
            "angles": torch.cat([angles.cos(), angles.sin()], dim=1).to(model.dtype),
        }
        self.step = Step(scalars, whole, layers, lora, share=of_ranks, num_threads=1)

    def rows(self, tensor: Tensor, parts: int = 1, dim: int = 0) -> Tensor:
        """The rank's rows of each of so many equal parts."""
        size = tensor.shape[dim] // parts
        own = [part * size + row for part in range(parts) for row in self._share.of(size, "rows")]
        return tensor.index_select(dim, torch.tensor(own)).contiguous()

    def pieces(self, tensor: Tensor, *sizes: int, dim: int = 0) -> Tensor:
        """The rank's rows of each part of that size."""
        return Pieces(self._share, sizes).own(tensor, dim).contiguous()

    def _experts(self, directory: str) -> ExpertLayer:
        share = self._share.of(EXPERTS, "experts")
        shape = ExpertShape(EXPERTS, HIDDEN, INNER)
        return ExpertStore.load(Path(directory), {0: KEY}, shape, num_threads=1, share=share).layers[0]

    def _layer(self, layer: int, experts: ExpertLayer | None) -> StepLayer:
        model, ones = self._model, torch.ones(HIDDEN, dtype=self._model.dtype)
        return StepLayer(
            input_norm=ones,
            attention=self._attention(layer),
            post_norm=ones,
            mlp=None
            if experts is not None and model.kind == "plain"
            else GatedMlp(gate_up=self.rows(model["mlp.gate_up"], 2), down=self.rows(model["mlp.down"])),
            routed=None if experts is None else RoutedExperts(gate=model["gate"], bias=None, experts=experts),
        )

    def _attention(self, layer: int) -> GroupedQuery | Latent | GatedDelta:
        if self._model.kind == "latent":
            return self._latent(layer)
        return self._delta() if self._model.kind == "delta" and layer == 0 else self._grouped(layer)

    def _delta(self) -> GatedDelta:
        model = self._model
        return GatedDelta(
            inputs=self.pieces(model["inputs"], *CHANNELS, CHANNELS[2]),
            gates=self.rows(model["gates"], 2),
            filter=self.pieces(model["filter"], *CHANNELS),
            log_rate=self.rows(model["log_rate"]),
            bias=self.rows(model["bias"]),
            norm=model["delta_norm"],
            out=self.rows(model["delta_out"]),
            kept_inputs=self.inputs,
            states=self.states,
            key_heads=len(self._share.of(HEADS, "heads")),
            by_key_head=False,
        )

    def _grouped(self, layer: int) -> GroupedQuery:
        model, rich = self._model, self._model.is_rich
        head_ones = torch.ones(SIZE, dtype=model.dtype)
        keys, values = self.kv[layer]
        return GroupedQuery(
            qkv=self.rows(model[f"{layer}.qkv"], 3),
            qkv_bias=self.rows(model[f"{layer}.qkv_bias"], 3) if rich else None,
            query_norm=model[f"{layer}.query_norm"] if rich else head_ones,
            key_norm=model[f"{layer}.key_norm"] if rich else head_ones,
            keys=keys,
            values=values,
            out=self.rows(model[f"{layer}.out"]),
            out_bias=self.rows(model[f"{layer}.out_bias"]) if rich else None,
            sinks=self.rows(model[f"{layer}.sinks"]) if rich else None,
            window=7 if rich and layer else 0,
        )

    def _latent(self, layer: int) -> Latent:
        model = self._model
        return Latent(
            compress=model[f"{layer}.compress"],
            query_norm=torch.ones(QUERY_RANK, dtype=model.dtype),
            query=self.rows(model[f"{layer}.query"]),
            latent_norm=torch.ones(LATENT, dtype=model.dtype),
            key_heads=self.rows(model[f"{layer}.key_heads"]),
            value_heads=self.rows(model[f"{layer}.value_heads"]),
            keys=self.kv[layer][0],
            out=self.rows(model[f"{layer}.values_out"]),
        )

    def _lora(self, layer: int) -> LayerLora:
        model = self._model
        if model.kind == "latent":
            own = self._latent_lora(layer)
        elif model.kind == "delta" and layer == 0:
            own = self._delta_lora()
        else:
            own = {
                "qkv_a": model[f"{layer}.qkv_a"],
                "qkv_b": self.rows(model[f"{layer}.qkv_b"], 3, 1),
                "out_a": model[f"{layer}.out_a"],
                "out_b": self.rows(model[f"{layer}.out_b"], 1, 1),
            }
        if layer == 0 or model.kind != "plain":
            own |= {
                "mlp_gate_up_a": model["mlp.gate_up_a"],
                "mlp_gate_up_b": self.rows(model["mlp.gate_up_b"], 2, 1),
                "mlp_down_a": model["mlp.down_a"],
                "mlp_down_b": self.rows(model["mlp.down_b"], 1, 1),
            }
        if layer:
            names = ("gate_up_a", "gate_up_b", "down_a", "down_b")
            own |= {name: self.rows(model[f"experts.{name}"], 1, 1) for name in names}
        return LayerLora(**own)

    def _latent_lora(self, layer: int) -> dict[str, Tensor]:
        model = self._model
        return {
            "compress_a": model[f"{layer}.compress_a"],
            "compress_b": model[f"{layer}.compress_b"],
            "query_a": model[f"{layer}.query_a"],
            "query_b": self.rows(model[f"{layer}.query_b"], 1, 1),
            "kv_b_a": model[f"{layer}.kv_b_a"],
            "kv_b_b": self.rows(model[f"{layer}.kv_b_b"], 1, 1),
            "out_a": model[f"{layer}.values_out_a"],
            "out_b": self.rows(model[f"{layer}.out_b"], 1, 1),
        }

    def _delta_lora(self) -> dict[str, Tensor]:
        model = self._model
        return {
            "inputs_a": model["inputs_a"],
            "inputs_b": self.pieces(model["inputs_b"], *CHANNELS, CHANNELS[2], dim=1),
            "gates_a": model["gates_a"],
            "gates_b": self.rows(model["gates_b"], 2, 1),
            "out_a": model["delta_out_a"],
            "out_b": self.rows(model["0.out_b"], 1, 1),
        }

    def run(self, spoiled: bool = False) -> list[Tensor]:
        """A prompt of MANY tokens and one of FEW, in two batches; then a token of each, in one. Tokens of the second
        prompt have adapters. Hidden states of all, keys and values, the tokens that were refused."""
        table = torch.arange(2 * POSITIONS, dtype=torch.int32).view(2, POSITIONS) % KV_SLOTS
        table[1] = torch.arange(MANY + 1, MANY + 1 + POSITIONS, dtype=torch.int32) % KV_SLOTS
        ids = torch.arange(MANY + FEW + 2) * 7 % VOCABULARY
        first = self._run(ids[:MANY], [0, MANY, 0, 0], table, BatchLora())
        lora = BatchLora(
            [AdapterRows(1, 2, 1, 3, 0.5)],
            [ExpertAdapter(1, 3, 0.5), ExpertAdapter(0, 4, 2.0)],
            torch.tensor([-1, 0, 0, 1, 1], dtype=torch.int32),
        )
        if spoiled:
            lora = BatchLora([AdapterRows(1, 2, 1, 3, 1e38)], lora.experts, lora.token_slots)
        second = self._run(ids[MANY : MANY + FEW], [0, FEW, 0, 1], table, lora)
        both = [[0, 1, MANY, 0], [1, 1, FEW, 1]]
        third = self._run(ids[-2:], both, table, BatchLora())
        return [*first, *second, *third, *self.kv]

    def _run(self, ids: Tensor, sequences: Sequence[object], table: Tensor, lora: BatchLora) -> list[Tensor]:
        rows = torch.tensor(sequences).view(-1, 4)
        positions = torch.cat([torch.arange(prefix, prefix + new) for _, new, prefix, _ in rows.tolist()])
        places = torch.cat([torch.full((new,), place) for _, new, _, place in rows.tolist()])
        slots = table[places, positions].long()
        states = rows[:, 3].contiguous() if self._model.kind == "delta" else None
        hidden, refused = self.step.run(ids, positions, slots, Sequences(rows, table), lora, states=states)
        return [hidden, torch.tensor(sorted(refused))]


def checkpoint_of(model: Model, directory: str) -> None:
    save_file(per_expert_tensors(model.experts, KEY), f"{directory}/model.safetensors")


def same(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(
        found.view(torch.uint8) if found.dim() else found, expected.view(torch.uint8)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("of", ["plain", "rich", "latent", "delta"])
def test_the_step_over_ranks_has_the_bits_of_one_process(
    num_ranks: int, dtype: torch.dtype, kind: str, of: Kind
) -> None:
    model = Model.drawn(dtype, of)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint_of(model, directory)
        expected = Part(model, ONE, directory).run()
        found = run_ranks(num_ranks, lambda exchange: Part(model, exchange.share, directory, exchange).run(), kind)
    assert all(bool(torch.isfinite(each.float()).all()) for each in expected)
    for rank, results in enumerate(found):
        for own, whole in zip(results[:6], expected[:6], strict=True):
            assert same(own, whole)
        heads = Share(rank, num_ranks).of(HEADS, "heads")
        for own, whole in zip(results[6:], expected[6:], strict=True):
            assert same(own, whole if of == "latent" else whole[:, :, heads.start : heads.stop].contiguous())


def test_partial_results_would_have_other_bits() -> None:
    """What is compared is not blind: with one weight of a rank's other, the results differ."""
    model = Model.drawn(torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint_of(model, directory)
        expected = Part(model, ONE, directory).run()

        def work(exchange: Exchange) -> list[Tensor]:
            if exchange.share.rank == 1:
                model["1.out"][-1, -1] += 1e-3
            return Part(model, exchange.share, directory, exchange).run()

        for results in run_ranks(2, work, "memory"):
            assert not same(results[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_not_finite_are_refused_and_the_ranks_go_on(kind: str) -> None:
    model = Model.drawn(torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint_of(model, directory)
        expected = Part(model, ONE, directory).run(spoiled=True)
        found = run_ranks(2, lambda exchange: Part(model, exchange.share, directory, exchange).run(True), kind)
    refused = set(expected[3].tolist())
    assert refused
    by_any = set().union(*(set(results[3].tolist()) for results in found))
    assert by_any == refused
    for results in found:
        assert same(results[0], expected[0])  # the batch before
        kept = [token for token in range(FEW) if token not in refused]
        assert same(results[2][kept], expected[2][kept])
