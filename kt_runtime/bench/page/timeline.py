"""The README's picture of live streams while an adapter is trained and published: an SVG from `demo --timeline`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated

import msgspec

from kt_runtime.bench.page.svg import BLUE, FAINT, GREY, GRID, MARGIN, ORANGE, WIDTH, opening, text_at
from kt_runtime.errors import InvalidValueError
from kt_runtime.files import errors_of_path, read_regular

MAX_FILE_BYTES = 4 << 20

LEFT = 92
LOSS_TOP, LOSS_HEIGHT = 78, 84
LANES_TOP, LANE_HEIGHT, LANE_STEP = 204, 12, 18
GAP = 0.7
LEAD_SECONDS = 8.0
"""The picture begins this long before the first step that was logged; earlier streams are not drawn."""
LABEL_WIDTH = 36
TICK_SECONDS = (1, 2, 5, 10, 20, 60, 120)
MOST_TICKS = 12

BASE, ADAPTER, TRAINING = GREY, ORANGE, BLUE

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `kt_runtime.cli.demo.streams` writes it; `steps`: (time, step, loss), `streams`: (client, began, ended, is
    it the adapter's)."""

    model: str
    before: str
    after: str
    optim_finished_s: Seconds
    first_token_s: Seconds
    steps: list[tuple[float, int, float]]
    streams: Annotated[list[tuple[int, float, float, bool]], msgspec.Meta(min_length=1)]


def read_timeline(path: Path) -> Timeline:
    """Raises InvalidValueError with file and field."""
    with errors_of_path(path, "read"):
        try:
            return msgspec.json.decode(read_regular(path, MAX_FILE_BYTES), type=Timeline)
        except ValueError as error:
            raise InvalidValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Axis:
    """The part of the demo that is drawn, in seconds since its first stream."""

    begin_s: float
    end_s: float

    def x(self, moment_s: float) -> float:
        return LEFT + (max(moment_s, self.begin_s) - self.begin_s) * (WIDTH - LEFT - MARGIN) / (
            self.end_s - self.begin_s
        )


def picture(timeline: Timeline) -> str:
    """An SVG."""
    num_clients = 1 + max(client for client, *_ in timeline.streams)
    lanes_end = LANES_TOP + num_clients * LANE_STEP
    height = lanes_end + 112
    begin_s = max(min((moment for moment, *_ in timeline.steps), default=0.0) - LEAD_SECONDS, 0.0)
    end_s = max(ended for _, _, ended, _ in timeline.streams)
    axis = Axis(begin_s, end_s)
    return "\n".join(
        [
            *opening(height, f"{num_clients} live streams while an adapter is trained and published"),
            text_at(
                MARGIN, 32, f"{num_clients} live streams, one process that serves and trains {timeline.model}", size=17
            ),
            text_at(MARGIN, 54, "Each bar is one streamed answer.", FAINT),
            _legend(264, 54),
            *_axis(axis, lanes_end),
            *_losses(timeline, axis),
            *_lanes(timeline, axis, num_clients),
            *_publication(timeline, axis, lanes_end),
            *_answers(timeline, lanes_end + 62),
            "</svg>\n",
        ]
    )


def _legend(x: int, y: int) -> str:
    entries = ((BASE, "by the base", 0), (ADAPTER, "by the trained adapter", 120))
    return "".join(
        f'<rect x="{x + offset}" y="{y - 10}" width="22" height="{LANE_HEIGHT}" fill="{color}"/>'
        + text_at(x + offset + 30, y, label, FAINT)
        for color, label, offset in entries
    )


def _axis(axis: Axis, lanes_end: int) -> list[str]:
    drawn_s = axis.end_s - axis.begin_s
    step = next((step for step in TICK_SECONDS if drawn_s / step <= MOST_TICKS), TICK_SECONDS[-1])
    lines = []
    for tick in range(ceil(axis.begin_s / step) * step, int(axis.end_s) + 1, step):
        x = axis.x(tick)
        lines.append(f'<line x1="{x:.1f}" y1="{LOSS_TOP}" x2="{x:.1f}" y2="{lanes_end}" stroke="{GRID}"/>')
        lines.append(text_at(x, lanes_end + 18, f"{tick} s", FAINT, anchor="middle"))
    return lines


def _losses(timeline: Timeline, axis: Axis) -> list[str]:
    if not timeline.steps:
        return []
    most = max(loss for *_, loss in timeline.steps)
    bottom = LOSS_TOP + LOSS_HEIGHT
    points = [(axis.x(moment), bottom - loss / most * (LOSS_HEIGHT - 22)) for moment, _, loss in timeline.steps]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{TRAINING}"/>' for x, y in points]
    labels, free_x = [], 0.0
    for (x, y), (_, _, loss) in zip(points, timeline.steps, strict=True):
        if x >= free_x:
            labels.append(text_at(x, y - 8, f"{loss:.2f}", TRAINING, anchor="middle"))
            free_x = x + LABEL_WIDTH
    floor = f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - MARGIN}" y2="{bottom}" stroke="{GRID}"/>'
    caption = text_at(MARGIN, bottom - 24, "training", TRAINING) + text_at(MARGIN, bottom - 8, "loss", TRAINING)
    return [
        floor,
        f'<polyline points="{line}" fill="none" stroke="{TRAINING}" stroke-width="2"/>',
        *marks,
        *labels,
        caption,
    ]


def _lanes(timeline: Timeline, axis: Axis, num_clients: int) -> list[str]:
    lines = [
        text_at(LEFT - 10, LANES_TOP + client * LANE_STEP + 10, f"stream {client + 1}", FAINT, anchor="end")
        for client in range(num_clients)
    ]
    for color, wanted in ((BASE, False), (ADAPTER, True)):
        bars = "".join(
            _bar(axis.x(began), LANES_TOP + client * LANE_STEP, axis.x(ended))
            for client, began, ended, by_adapter in timeline.streams
            if by_adapter is wanted and ended > axis.begin_s
        )
        lines.append(f'<path d="{bars}" fill="{color}"/>')
    return lines


def _bar(x: float, y: int, end_x: float) -> str:
    """The path of a bar that leaves a gap to the next one."""
    return f"M{x:.1f} {y}h{max(end_x - x - GAP, GAP):.1f}v{LANE_HEIGHT}H{x:.1f}z"


def _publication(timeline: Timeline, axis: Axis, lanes_end: int) -> list[str]:
    x = axis.x(timeline.first_token_s)
    wait_ms = (timeline.first_token_s - timeline.optim_finished_s) * 1e3
    on_the_left = x > WIDTH / 2
    anchor, label_x = ("end", x - 8) if on_the_left else ("start", x + 8)
    label = f"published: its first token {wait_ms:.0f} ms after the last optimizer step"
    return [
        f'<line x1="{x:.1f}" y1="{LOSS_TOP}" x2="{x:.1f}" y2="{lanes_end}" stroke="{ADAPTER}" stroke-width="2"/>',
        text_at(label_x, LANES_TOP - 14, label, ADAPTER, anchor=anchor),
    ]


def _answers(timeline: Timeline, y: int) -> list[str]:
    return [
        text_at(
            MARGIN,
            y,
            f"“What is your name?” The base answers: {json.dumps(timeline.before, ensure_ascii=False)}",
            FAINT,
        ),
        text_at(MARGIN, y + 22, f"The adapter answers: {json.dumps(timeline.after, ensure_ascii=False)}", ADAPTER),
    ]
