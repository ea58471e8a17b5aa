from __future__ import annotations

import math

import pytest

from kt_runtime.resident.pacing.estimates import Estimates


def test_an_estimate_is_of_one_kind_and_about_one_size() -> None:
    estimate = Estimates()
    estimate.learn("layer", 1000, 0.1)
    assert estimate("layer", 900) == pytest.approx(0.09, rel=1e-15, abs=0)
    assert estimate.knows("layer", 900) and not estimate.knows("layer", 2000)
    assert estimate("loss", 1000) == math.inf


def test_a_smaller_size_tells_what_a_larger_one_takes_at_most_and_a_larger_one_nothing() -> None:
    """Few tokens cost more each: an estimate from them is on the safe side."""
    estimate = Estimates()
    estimate.learn("layer", 1000, 0.1)
    assert estimate("layer", 100) == math.inf
    assert estimate("layer", 4000) == 0.4
    estimate.learn("layer", 4000, 0.2)
    assert estimate("layer", 4000) == 0.2 and estimate("layer", 1000) == 0.1


def test_a_size_that_was_slow_once_is_tried_again_where_smaller_ones_are_fast() -> None:
    estimate = Estimates()
    estimate.learn("layer", 1000, 9.0)
    estimate.learn("layer", 100, 0.02)
    assert estimate("layer", 1000) == 0.2 and estimate("layer", 100) == 0.02


def test_an_estimate_follows_by_a_quarter_of_the_difference() -> None:
    estimate = Estimates()
    estimate.learn("layer", 1, 0.1)
    estimate.learn("layer", 1, 0.5)
    assert estimate("layer", 1) == 0.2
    estimate.learn("layer", 1, 0.1)
    assert estimate("layer", 1) == pytest.approx(0.175, rel=1e-15, abs=0)
