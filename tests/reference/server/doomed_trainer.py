"""A trainer, a process of its own, that is killed (SIGKILL) once the server has got its call."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

SESSION = "doomed"
"""What the trainer calls for: a session that somebody else has opened."""
CALLS = (
    *("create_session", "forward", "forward_backward", "optim_step", "publish", "save", "load"),
    *("load_adapter", "close_session"),
)
"""Every message that a trainer sends to change something, and `forward`."""
CREATED, PUBLISHED, LOADED = "other", SESSION, "loaded"
"""The session that `create_session` opens, and the adapters of `publish` and `load_adapter`."""

TRAINER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from kt_runtime.wire import Batch, ResidentClient
    from kt_runtime.wire import messages

    print("ready", flush=True)
    address, call, path = (sys.stdin.readline().strip() for _ in range(3))
    client = ResidentClient(address)
    rows = np.random.default_rng(5).integers(3, 700, (8, 65)).tolist()
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    if call == "forward_backward":
        client.begin_forward_backward("doomed", batch)
    elif call == "optim_step":
        client.forward_backward("doomed", batch)
        client.submit(messages.OptimStep(request_id="step", session="doomed", learning_rate=0.01))
    elif call == "create_session":
        lora = messages.LoraSettings(rank=4, alpha=8, seed=2)
        client.submit(messages.CreateSession(request_id="create", session="other", lora=lora))
    elif call == "forward":
        client.begin_forward("doomed", batch)
    elif call == "publish":
        client.submit(messages.Publish(request_id="publish", session="doomed", name="doomed"))
    elif call == "load":
        client.submit(messages.Load(request_id="load", session="doomed", path=path))
    elif call == "load_adapter":
        client.submit(messages.LoadAdapter(request_id="adapter", name="loaded", path=path))
    elif call == "close_session":
        client.submit(messages.CloseSession(request_id="close", session="doomed"))
    else:
        client.submit(messages.Save(request_id="save", session="doomed", path=path))
    client.status(wait_s=0)  # what was sent before it has arrived
    print("sent", flush=True)
    sys.stdin.read()
    """
)


class DoomedTrainer:
    """In the block the process has imported what it needs, and waits for its call."""

    def __enter__(self) -> DoomedTrainer:
        command = [sys.executable, "-P", "-c", TRAINER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def killed_in(self, call: str, address: str, path: Path) -> None:
        """Returns once the trainer is dead. `path`: of `save`, `load` and `load_adapter`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address}\n{call}\n{path}\n")
        self._process.stdin.flush()
        said = self._read()
        self._process.send_signal(signal.SIGKILL)
        assert (said, self._process.wait()) == ("sent", -signal.SIGKILL)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def killed_in(call: str, address: str, path: Path) -> None:
    with DoomedTrainer() as trainer:
        trainer.killed_in(call, address, path)
