"""When each stream of the demo was answered: the JSON of `kt-runtime demo --timeline`, drawn in README."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kt_runtime.cli.demo.streams import Answered

STEP = re.compile(r"step (\d+)/\d+.*?loss ([\d.]+)")
MILLISECOND_DIGITS = 3


def timeline_of(
    answered: Sequence[Answered],
    lines: Sequence[tuple[float, str]],
    optim_finished_at: float,
    first_token_at: float,
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    """Times in seconds since the first stream began; a row of `streams` is [client, began, ended, by the adapter].

    `lines`: of `kt-runtime train`, with Unix times; `steps` are those that report a step: [time, step, loss].
    """
    begin = min((stream.began_at for stream in answered), default=first_token_at)

    def since(moment: float) -> float:
        return round(moment - begin, MILLISECOND_DIGITS)

    steps = [(moment, STEP.search(line)) for moment, line in lines]
    return {
        "model": figures["model"],
        "before": figures["before"],
        "after": figures["after"],
        "optim_finished_s": since(optim_finished_at),
        "first_token_s": since(first_token_at),
        "steps": [[since(moment), int(found[1]), float(found[2])] for moment, found in steps if found],
        "streams": [
            [stream.client, since(stream.began_at), since(stream.ended_at), stream.by_adapter]
            for stream in sorted(answered, key=lambda stream: stream.began_at)
        ],
    }
