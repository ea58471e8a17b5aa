"""Which part of an adapter's tensors a rank trains: B of dense modules by outputs, A and B of routed experts by expert.

All of these are split along their first dimension, evenly and in the ranks' order, or piece by piece. A of dense
modules is whole on every rank, and so are its gradient and moments, which are equal on all ranks; so is B of a module
that ranks do not split.

With one rank everything is whole. With several, all ranks call `whole`, `norm` and `largest`, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kt_runtime.families import LoraModule
from kt_runtime.ranks import Exchange, Pieces

OF_HEADS = "kv_b_proj.lora_B"


class AdapterParts:
    """Names are those of parameters (`twin.lora`); `modules`: those of which there may be some.

    `exchange`: None with one rank.
    """

    def __init__(self, modules: Iterable[LoraModule], exchange: Exchange | None) -> None:
        self._exchange = exchange
        self._modules = {module.name: module for module in modules}

    @property
    def num_ranks(self) -> int:
        return 1 if self._exchange is None else self._exchange.share.num_ranks

    def is_split(self, name: str) -> bool:
        parent, _, kind = name.rpartition(".")
        module = self._modules[parent]
        is_split = module.num_experts > 0 or (kind == "lora_B" and not module.is_whole)
        return self._exchange is not None and is_split

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter: a view, or `whole` itself."""
        if self._exchange is None or not self.is_split(name):
            return whole
        return self._rows(name, len(whole)).own(whole, 0)

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The parameter whose part each rank has; `own` itself where that is whole."""
        if self._exchange is None or not self.is_split(name):
            return own
        joined = self._exchange.all_columns(own.detach().reshape(1, -1).contiguous()).view(-1, *own.shape[1:])
        return self._rows(name, len(joined)).ordered(joined, 0)

    def whole_shape(self, name: str, own: torch.Tensor) -> tuple[int, ...]:
        factor = self.num_ranks if self.is_split(name) else 1
        return (factor * own.shape[0], *own.shape[1:])

    def norm(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The L2 norm of the whole gradient whose part this rank has, with the bits of one process.

        PyTorch adds up squares in the order of memory. That of B's gradient of a dense module is [R, O], B^T, where
        the rank R is not above the number of outputs O (`ops.matmul.served_product`), else [O, R]. It is [O, R] too
        where the outputs are multiplied head by head (`twin.attention.KvWeight`).
        """
        if self._exchange is None or not self.is_split(name):
            return torch.linalg.vector_norm(gradient)
        is_by_heads = name.endswith(OF_HEADS) and gradient.is_contiguous()
        if gradient.dim() == 2 and gradient.shape[1] <= self.num_ranks * gradient.shape[0] and not is_by_heads:
            columns = self._exchange.all_columns(gradient.T.contiguous())
            return torch.linalg.vector_norm(self._rows(name, columns.shape[1]).ordered(columns))
        return torch.linalg.vector_norm(self.whole(name, gradient))

    def _rows(self, name: str, total: int) -> Pieces:
        assert self._exchange is not None
        parent, _, kind = name.rpartition(".")
        pieces = self._modules[parent].pieces if kind == "lora_B" else ()
        return Pieces(self._exchange.share, pieces or (total,))

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest value on any rank for each of `values`, which are float32 numbers."""
        if self._exchange is None:
            return list(values)
        return self._exchange.all_columns(torch.tensor(values, dtype=torch.float32)[:, None]).amax(1).tolist()
