"""SGLang without kt-runtime's native step as a peer: the same server, started again with `--no-step`.

The rest is the same: options, prompts, adapters, clients, and kt-runtime's experts and CPU kernels under SGLang's
modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kt_runtime.bench.serve.peers import Peer, one_line
from kt_runtime.bench.serve.server_side import ServerSide, Transcript
from kt_runtime.errors import KtError
from kt_runtime.wire.replies import STEP_RUNNING

SGLANG = "sglang_no_step"


class NoStep(Peer):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(SGLANG, say)

    def measure(self, first: ServerSide, model: Path, directory: Path) -> None:
        """Runs the cases of `first`, whose server has ended. `directory`: for the files of the server.

        A first server without the native step is the peer already: then no second one is started.
        """
        if first.result.step != STEP_RUNNING:
            self.fail(f"not measured: the server runs no native step either ({first.result.step})")
            return
        second = first.without_step(self.say)
        try:
            directory.mkdir()
            second.measure(model, directory)
        except (KtError, OSError) as error:
            self.fail(one_line(error))
        self._take(first, second)

    def _take(self, first: ServerSide, second: ServerSide) -> None:
        status = second.result.status
        self.facts = {name: status[name] for name in ("sglang_version", "dtype", "step") if name in status}
        for case, (measured, transcript) in second.result.measured.items():
            same = same_share(transcript, first.result.measured[case][1])
            self.measured[case] = replace(measured, same_tokens=same)
        if self.problem is None and second.result.problems:
            self.fail("; ".join(f"{case}: {problem}" for case, problem in second.result.problems.items()))


def same_share(ours: Transcript, theirs: Transcript) -> float:
    """Share of equal tokens, place by place. `ours` may have fewer runs."""
    pairs = [
        one == other
        for our_run, their_run in zip(ours.answers, theirs.answers, strict=False)
        for our_answer, their_answer in zip(our_run, their_run, strict=True)
        for one, other in zip(our_answer, their_answer, strict=True)
    ]
    return sum(pairs) / len(pairs)
