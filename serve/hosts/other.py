"""`kt-runtime serve` on a host other than host 0: what it prints, how it ends. Implements `other_host.OtherHost`."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

from kt_runtime.errors import KtError
from kt_runtime.ranks.failures import CUT_OFF, Failure
from kt_runtime.serve.console.console import Console
from kt_runtime.serve.hosts.gathering import Gathered
from kt_runtime.serve.hosts.loop import END_SECONDS
from kt_runtime.sglang_patch.faults import refused_model
from kt_runtime.sglang_patch.ranks.watch import CAUSE_SECONDS, RankWatch
from kt_runtime.wire.address import private_directory


class ServingHost:
    """`number`: this host's. `scratch`: a directory for SGLang's temporary files, removed at the end. `wire_address`:
    a rank that refuses the model leaves the reason in a file next to this socket."""

    def __init__(self, gathered: Gathered, number: int, scratch: Path, wire_address: str, console: Console) -> None:
        assert gathered.follower is not None and gathered.watch is not None
        self._follower, self._number, self._console = gathered.follower, number, console
        self.watch: RankWatch = gathered.watch
        self._wire_address, self._scratch = wire_address, scratch
        self._failure: Failure | None = None
        refused_model.forget(wire_address)
        shutil.rmtree(scratch, ignore_errors=True)
        tempfile.tempdir = str(private_directory(scratch))

    @property
    def ended(self) -> threading.Event:
        return self._follower.shared.ended

    def loaded(self) -> None:
        self._console.say(
            f"host {self._number} is ready after {self._console.seconds:.0f} s; {self._follower.leader} has the HTTP "
            "server"
        )

    def leave(self) -> None:
        self._console.say(f"stopping: {self._follower.leader} is asked to end the server")
        self._follower.leave()

    def failed(self, failure: Failure) -> None:
        self._failure = failure
        if failure.kind != CUT_OFF:  # otherwise host 0 does not hear it
            self._follower.report(failure)
            self.ended.wait(CAUSE_SECONDS + END_SECONDS)

    def refusal(self) -> KtError | None:
        return refused_model.refusal(self._wire_address)

    def finish(self) -> int:
        """Host 0's word counts: it has heard of all failures."""
        shared = self._follower.shared
        lines, status = ([], 1) if self._failure is None else ([self._failure.why], self._failure.status)
        if shared.ended.is_set():
            lines, status = shared.lines, shared.status
        if status:
            self._console.show_tail()
            for line in lines:
                self._console.say(f"kt-runtime: {line}")
        self._console.say(f"host {self._number} ends: {'the server has ended' if status == 0 else 'see above'}")
        self._follower.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._console.end()
        return status
