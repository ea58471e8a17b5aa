"""A trainer's process never outlives its server's, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

LAUNCHER = [sys.executable, "-P", "-m", "kt_runtime.serve.finetuning.launcher"]
SERVER = f"""
import os, subprocess, time
program = "print('begun', flush=True); import time; time.sleep(600)"
trainer = subprocess.Popen([*{LAUNCHER!r}, str(os.getpid()), "-c", program])
print(trainer.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_servers_trainer_ends() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    trainer = psutil.Process(int(server.stdout.readline()))
    assert server.stdout.readline() == "begun\n"
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 60
    while trainer.is_running() and trainer.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the trainer still runs"
        time.sleep(0.05)


def test_a_trainer_of_a_server_that_has_ended_does_not_begin() -> None:
    run = subprocess.run([*LAUNCHER, "1", "-c", "print('begun')"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
