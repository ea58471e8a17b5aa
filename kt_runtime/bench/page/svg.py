"""Colours and text of the generated pictures. They have their own background, so that they read on light and dark
pages."""

from __future__ import annotations

from html import escape

WIDTH, MARGIN = 960, 24
INK, FAINT, PAPER, GRID = "#1f2328", "#59636e", "#ffffff", "#d0d7de"
GREY, ORANGE, BLUE = "#a8b3bf", "#e8590c", "#1971c2"


def opening(height: int, title: str) -> list[str]:
    """The first lines of a picture; `</svg>` ends it. `title`: what a screen reader says."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{GRID}"/>',
    ]


def text_at(x: float, y: float, text: str, color: str = INK, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
