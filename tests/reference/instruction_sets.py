"""The instruction sets whose kernels the tests run: all that this processor has, or few of them."""

from __future__ import annotations

from reference.cases import choose

from kt_runtime.experts import available_isas


def instruction_sets() -> list[str]:
    """The best first. `TEST_CASES=few`: that one, which servers use, and the portable one."""
    found = list(available_isas())
    return choose(few=sorted({found[0], found[-1]}, key=found.index), usual=found, every=found)
