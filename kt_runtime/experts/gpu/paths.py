"""Chooses how a call with tensors on a device is computed.

streamed   many tokens: the layer's experts stream through the ring, the device computes
hot        experts that lie on the device compute there, the others on the CPU
staged     the CPU computes: rows go to the host and back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from kt_runtime.experts.gpu import staging, streamed
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.ring import ExpertRing
from kt_runtime.experts.gpu.streamed import StreamedActivations
from kt_runtime.experts.values import ExpertGradients, LoraSlot, Retained


class HotLayer(Protocol):
    """Experts of one layer that lie on the device. `takes`: whether `forward` computes this call."""

    def takes(self, call: ExpertCall) -> bool: ...

    def forward(self, layer: Any, call: ExpertCall, out: Tensor | None) -> Tensor: ...


@dataclass
class StreamingRule:
    """`threshold_tokens`: calls of at least so many tokens stream; None: no call does. `is_paused`: none does now."""

    threshold_tokens: int | None
    is_paused: bool = False


@dataclass
class StreamedTokens:
    """Tokens of calls that streamed, forward and backward."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class DevicePaths:
    """Ways other than staging to compute a layer's calls. All layers share `ring` and `rule`; without them none stream.

    `counts`: counts this layer's streamed tokens.
    """

    ring: ExpertRing | None = None
    rule: StreamingRule | None = None
    hot: HotLayer | None = None
    counts: StreamedTokens | None = None

    def streams(self, tokens: int) -> bool:
        if self.ring is None or self.rule is None or self.rule.is_paused:
            return False
        return self.rule.threshold_tokens is not None and tokens >= self.rule.threshold_tokens


class PathedLayer(staging.HostLayer, Protocol):
    """An `ExpertLayer`."""

    device_paths: DevicePaths | None

    def unpack_range(self, first: int, count: int, w13: Tensor, w2: Tensor) -> None: ...


def forward(
    layer: PathedLayer, call: ExpertCall, out: Tensor | None, *, retain: bool
) -> tuple[Tensor, Retained | StreamedActivations | None]:
    """ExpertLayer.forward for an x on a device; the result is there, ready in the order of the current stream."""
    paths = layer.device_paths
    if paths is not None and paths.ring is not None and paths.streams(call.x.shape[0]):
        done = streamed.forward(paths.ring, layer, call, out, retain=retain)
        if paths.counts is not None:
            paths.counts.forward += call.x.shape[0]
        return done
    hot = None if paths is None or retain else paths.hot
    if hot is not None and hot.takes(call):
        return hot.forward(layer, call, out), None
    return staging.forward(layer, call, out, retain=retain)


def backward(
    layer: PathedLayer,
    grad_out: Tensor,
    call: ExpertCall,
    into: Sequence[LoraSlot | None] | None,
    retained: Retained | StreamedActivations | None,
) -> ExpertGradients:
    """ExpertLayer.backward for an x on a device. The retained activations tell how forward was computed."""
    paths = layer.device_paths
    kept = retained if isinstance(retained, StreamedActivations) else None
    ring = None if paths is None else paths.ring
    if ring is not None and paths is not None and (kept or (retained is None and paths.streams(call.x.shape[0]))):
        gradients = streamed.backward(ring, layer, grad_out, call, into, kept)
        if paths.counts is not None:
            paths.counts.backward += call.x.shape[0]
        return gradients
    of_host = None if isinstance(retained, StreamedActivations) else retained
    return staging.backward(layer, grad_out, call, into, of_host)


def attach_ring(layers: Sequence[PathedLayer], ring: ExpertRing, rule: StreamingRule) -> StreamedTokens:
    """From now on calls of these layers may stream. Returns the tokens that do, counted at the first layer."""
    counts = StreamedTokens()
    for index, layer in enumerate(layers):
        known = layer.device_paths or DevicePaths()
        layer.device_paths = replace(known, ring=ring, rule=rule, counts=None if index else counts)
    return counts
