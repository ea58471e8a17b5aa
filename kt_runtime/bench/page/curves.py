"""The plots of a measurement as SVG: panels one below the other, over one horizontal axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

from kt_runtime.bench.page.measurement import Curve, Panel, Plot
from kt_runtime.bench.page.svg import BLUE, FAINT, GREY, GRID, MARGIN, ORANGE, WIDTH, opening, text_at

TOP, PANEL_HEIGHT, PANEL_STEP, LEFT = 84, 132, 178, 76
COLORS = (BLUE, ORANGE, GREY)
MOST_TICKS = 10


def picture(plot: Plot) -> str:
    """Every panel begins at 0."""
    lines = opening(TOP + len(plot.panels) * PANEL_STEP + 6, plot.title)
    lines.append(text_at(MARGIN, 32, plot.title, size=17))
    lines += _legend([curve.name for curve in plot.panels[0].curves])
    points = max(len(curve.values) for panel in plot.panels for curve in panel.curves)
    for index, panel in enumerate(plot.panels):
        top = TOP + index * PANEL_STEP
        lines += _axes(panel, plot.x, points, top)
        for color, curve in zip(COLORS, panel.curves, strict=False):
            lines.append(_line(curve, _most(panel), points, top, color))
    return "\n".join([*lines, "</svg>\n"])


def _legend(names: Sequence[str]) -> list[str]:
    lines, x = [], float(MARGIN)
    for color, name in zip(COLORS, names, strict=False):
        lines.append(f'<rect x="{x:.1f}" y="48" width="22" height="4" fill="{color}"/>')
        lines.append(text_at(x + 30, 54, name, FAINT))
        x += 54 + 7 * len(name)
    return lines


def _axes(panel: Panel, x_name: str, points: int, top: int) -> list[str]:
    most, bottom = _most(panel), top + PANEL_HEIGHT
    lines = [text_at(LEFT, top - 8, f"{panel.name} [{panel.unit}]")]
    for part in range(5):
        value, y = most * part / 4, bottom - PANEL_HEIGHT * part / 4
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" stroke="{GRID}"/>')
        lines.append(text_at(LEFT - 8, round(y) + 4, f"{value:.3g}", FAINT, anchor="end"))
    step = _rounded_up(points / MOST_TICKS)
    for tick in range(step, points + 1, step):
        lines.append(text_at(_x(tick - 1, points), bottom + 16, str(tick), FAINT, anchor="middle"))
    lines.append(text_at(LEFT, bottom + 16, x_name, FAINT))
    return lines


def _line(curve: Curve, most: float, points: int, top: int, color: str) -> str:
    shown = (
        f"{_x(index, points):.1f},{top + PANEL_HEIGHT * (1 - float(value) / most):.1f}"
        for index, value in enumerate(curve.values)
    )
    return f'<polyline points="{" ".join(shown)}" fill="none" stroke="{color}" stroke-width="1.6"/>'


def _most(panel: Panel) -> float:
    """The value at the panel's top: two digits, at least the largest one."""
    largest = max(float(value) for curve in panel.curves for value in curve.values)
    if largest <= 0:
        return 1.0
    unit = 10.0 ** (floor(log10(largest)) - 1)
    return ceil(largest / unit - 1e-9) * unit


def _x(index: int, points: int) -> float:
    return LEFT + index * (WIDTH - LEFT - MARGIN) / max(points - 1, 1)


def _rounded_up(value: float) -> int:
    """1, 2 or 5 times a power of ten, at least `value`."""
    power = 10 ** max(floor(log10(max(value, 1))), 0)
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value))
