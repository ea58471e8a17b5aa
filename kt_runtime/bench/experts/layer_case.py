"""One shape's weights, inputs and references, made once for all formats, thread counts and peers."""

from __future__ import annotations

from functools import cache, cached_property

from torch import Tensor

from kt_runtime.bench.experts import reference
from kt_runtime.bench.experts.inputs import Batch, make_batches, make_lora
from kt_runtime.bench.experts.reference import ReferenceGradients
from kt_runtime.bench.experts.shapes import BenchShape
from kt_runtime.bench.experts.weights import random_weights
from kt_runtime.experts import LoraSlot


class LayerCase:
    def __init__(self, shape: BenchShape) -> None:
        self.shape = shape
        self.weights = random_weights(shape)
        self.batches = cache(self._batches)
        self.expected = cache(self._expected)
        self.expected_gradients = cache(self._expected_gradients)

    @cached_property
    def lora(self) -> LoraSlot:
        return make_lora(self.shape)

    def few(self, tokens: int) -> Batch:
        """The first tokens of the first batch, on which errors are computed."""
        return self.batches(tokens)[0].first(reference.TOKENS)

    def _batches(self, tokens: int) -> list[Batch]:
        return make_batches(self.shape, tokens)

    def _expected(self, tokens: int) -> Tensor:
        return reference.forward(self.weights, self.few(tokens))

    def _expected_gradients(self, tokens: int) -> ReferenceGradients:
        return reference.gradients(self.weights, self.few(tokens), self.lora)
