"""Night: what takes long has a short form by day, and is whole in `nox -s nemesis`, which is nightly."""

import os

NIGHTLY = "CELERY5_NIGHTLY" in os.environ
"""Whether the tests run in full."""


def examples(count: int) -> int:
    """Return how many examples Hypothesis is to try: `count` at night, a third of them by day."""
    return count if NIGHTLY else count // 3
