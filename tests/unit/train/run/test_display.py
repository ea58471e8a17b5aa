"""Lines and a bar: both on a terminal, lines alone in a pipe."""

from __future__ import annotations

import io

from kt_runtime.train.run.display import PlainDisplay, TerminalDisplay, display_for


def test_a_pipe_gets_lines_at_once_and_no_bar() -> None:
    stream = io.StringIO()
    with display_for(stream) as display:
        assert isinstance(display, PlainDisplay)
        display.say("one [bold]")
        display.progress(1, 2, {"loss": "0.5"})
    assert stream.getvalue() == "one [bold]\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_bar_and_what_stands_beside_it() -> None:
    stream = Terminal()
    with display_for(stream) as display:
        assert isinstance(display, TerminalDisplay)
        display.say("a line with [brackets] as they are")
        display.progress(3, 8, {"loss": "0.5000", "left": "0:00:10"})
        display.say("another")
    shown = stream.getvalue()
    assert "a line with [brackets] as they are" in shown and "another" in shown
    assert "3/8" in shown and "loss 0.5000" in shown
