from __future__ import annotations

from kt_runtime.resident.pacing.latencies import WINDOW_SECONDS, Latencies, Latest, ShareOfTime, quantile


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert [quantile(values, share) for share in (0.0, 0.1, 0.5, 0.91, 0.95, 1.0)] == [1, 1, 5, 10, 10, 10]
    assert quantile([], 0.5) == 0.0 and quantile([3.0], 0.01) == 3.0


def test_times_are_to_the_first_token_and_per_later_token() -> None:
    measured = Latencies()
    measured.add(arrived=10.0, first=10.5, last=11.5, num_tokens=5)
    measured.add(arrived=20.0, first=20.25, last=20.25, num_tokens=1)
    measured.add(arrived=0.0, first=30.0, last=31.0, num_tokens=9)  # its arrival is not known
    assert list(measured.first_token) == [0.5, 0.25]
    assert list(measured.per_token) == [0.25]


def test_the_latest_numbers_are_kept_in_memory_that_does_not_grow() -> None:
    latest = Latest(3)
    place = latest._values.buffer_info()
    assert len(latest) == 0 and list(latest) == [] and quantile(latest, 0.5) == 0.0
    latest.append(7.0)
    assert len(latest) == 1 and list(latest) == [7.0]
    for value in (1.0, 2.0, 5.0, 4.0):
        latest.append(value)
    assert len(latest) == 3 and sorted(latest) == [2.0, 4.0, 5.0] and quantile(latest, 0.5) == 4.0
    assert latest._values.buffer_info() == place


def test_the_share_of_time_is_of_the_latest_seconds() -> None:
    now = [0.0]
    share = ShareOfTime(lambda: now[0])
    for _ in range(60):
        now[0] += 1.0
        share.add(0.25)
    assert share() == 0.25
    for _ in range(2):
        now[0] += WINDOW_SECONDS
        share.add(0.0)
    now[0] += 1.0
    assert share() == 0.0
