"""Night: what takes long has a short form by day, and is whole in `nox -s nemesis`, which is nightly."""

import os

import pytest

NIGHTLY = "CELERY5_NIGHTLY" in os.environ
"""Whether the tests run in full."""


def examples(count: int) -> int:
    """Return how many examples Hypothesis is to try: `count` at night, a third of them by day."""
    return count if NIGHTLY else count // 3


def with_clusters(duration: str) -> pytest.MarkDecorator:
    """Return the mark of a test that takes so long: it runs in `nox -s cluster`, and at night."""
    is_wanted = NIGHTLY or "CELERY5_TEST_CLUSTER" in os.environ
    return pytest.mark.skipif(not is_wanted, reason=f"takes {duration}: nox -s cluster")
