from __future__ import annotations

from typing import Any

import pytest

from paraflow.interval import Interval


@pytest.mark.parametrize(
    ("said", "amount", "unit"),
    [
        ("10ep", 10, "ep"),
        ("1 ep", 1, "ep"),
        ("500st", 500, "st"),
        (500, 500, "st"),
        (1, 1, "st"),
        ("30s", 30.0, "s"),
        ("0.5s", 0.5, "s"),
        ("30sec", 30.0, "s"),
        ("5min", 300.0, "s"),
        ("1h", 3600.0, "s"),
        ("1.5H", 5400.0, "s"),
        (" 2EP ", 2, "ep"),
        (Interval(3, "ep"), 3, "ep"),
    ],
)
def test_intervals_are_read(said: Any, amount: float, unit: str) -> None:
    interval = Interval.parse(said)
    assert (interval.amount, interval.unit) == (amount, unit)
    assert Interval.parse(str(interval)) == interval
    assert isinstance(interval.amount, float) is (unit == "s")


@pytest.mark.parametrize(
    "said",
    [0, -1, True, 2.5, None, "", "10", "ep", "0ep", "-1ep", "1.5ep", "0.5st", "0s", "3 days", "1h30min", "often"],
)
def test_what_is_no_interval_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match="is no interval") as caught:
        Interval.parse(said)
    assert repr(said) in str(caught.value)
    assert '"10ep"' in str(caught.value)
    assert '"500st"' in str(caught.value)
    assert '"1h"' in str(caught.value)
