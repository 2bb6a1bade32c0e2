"""Frames of boxes: which of those that are too long end a job."""

from typing import get_args

import pytest

from celery5.protocol.boxes import frames
from celery5.protocol.boxes.frames import FromBox, make_too_long

TYPES: list[str] = [kind.__struct_config__.tag for kind in get_args(FromBox)]
OBSERVING = {"log", "eliot", "progress"}
"""The types of frames that only tell of a job."""


@pytest.mark.parametrize("name", TYPES)
def test_a_frame_that_is_too_long_ends_a_job_unless_it_only_tells_of_it(name: str) -> None:
    found = make_too_long(b'{"type":"%s","text":"aaaa' % name.encode(), 10)
    assert (found is None) == (name in OBSERVING)
    assert (name in frames._TAGS) == (name not in OBSERVING)


def test_every_frame_that_only_tells_of_a_job_is_one_of_a_box() -> None:
    assert set(TYPES) >= OBSERVING
