from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.reliability.durations import LONGEST_S, DurationError, parse_duration, render_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("20min", 1200),
        ("20 min", 1200),
        ("7d", 604800),
        ("1h30min", 5400),
        ("1 h 30 min", 5400),
        ("1.5h", 5400),
        ("500ms", 0.5),
        (12, 12),
        (0.25, 0.25),
    ],
)
def test_durations_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("5m", "did you mean 5min?"),
        ("300", "did you mean 300s?"),
        ("7-00:00:00", "did you mean 7d?"),
        ("12:00:00", "did you mean 12h?"),
        ("1-12:30", "did you mean 1d12h30min?"),
        ("30:00", "did you mean 30min?"),
        ("soon", "expected a duration such as 90s"),
        ("", "expected a duration"),
        ("-5s", "expected a duration"),
        (-1, "from 0 to ten years"),
        ("99999d", "from 0 to ten years"),
        (float("nan"), "from 0 to ten years"),
        (float("inf"), "from 0 to ten years"),
    ],
)
def test_what_is_no_duration_says_what_was_meant(text: str | float, meant: str) -> None:
    with pytest.raises(DurationError) as caught:
        parse_duration(text)
    assert meant in str(caught.value)


@given(st.integers(0, int(LONGEST_S)) | st.floats(0.001, 1e6))
def test_what_is_rendered_reads_back(seconds: float) -> None:
    assert parse_duration(render_duration(seconds)) == pytest.approx(seconds, rel=1e-12)


@given(st.text(max_size=40))
def test_any_text_is_a_duration_or_a_duration_error(text: str) -> None:
    try:
        assert 0 <= parse_duration(text) <= LONGEST_S
    except DurationError as error:
        assert "expected" in str(error)
