"""The whole run: the server first, and after its end the peer, on the same checkpoint and tokens."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.train import server_side
from kt_runtime.bench.train.model import checkpoint, faster_dtype, vocabulary
from kt_runtime.bench.train.peer import Peer
from kt_runtime.bench.train.plan import Plan, sequences_of
from kt_runtime.bench.train.rows import Measured, Row
from kt_runtime.cli.interrupts import uninterrupted
from kt_runtime.cli.machine import cpu_facts


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the JSON that docs/bench.md describes."""
    with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
        directory = Path(root)
        say(f"the checkpoint of {plan.model}")
        model = checkpoint(plan, directory)
        sequences = sequences_of(plan, vocabulary(model))
        dtype = plan.dtype or faster_dtype()
        ours = server_side.measure(plan, model, dtype, sequences, directory, say)
        peer = Peer(plan, model, sequences, say) if plan.with_peer else None
        theirs: dict[tuple[str, str], Measured] = {}
        if peer is not None:
            peer.choose_dtype()
            theirs = {case: peer.measure(*case) for case in itertools.product(plan.targets, plan.activations)}
    cpu = cpu_facts()
    return {
        "machine": {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__},
        "training": plan.facts(plan.model) | {"dtype": dtype},
        "peers": {"hf_peft": None if peer is None else peer.as_json()},
        "rows": [row.as_json() for row in _rows(plan, ours, theirs)],
    }


def _rows(plan: Plan, ours: dict[tuple[str, str], Measured], theirs: dict[tuple[str, str], Measured]) -> list[Row]:
    rows = []
    for (targets, activations), measured in ours.items():
        alone = ours.get(("attention", activations)) if targets != "attention" else None
        rate = None if alone is None else alone.tokens_per_s(plan.step_tokens)
        rows.append(Row(targets, activations, plan.step_tokens, measured, theirs.get((targets, activations)), rate))
    return rows
