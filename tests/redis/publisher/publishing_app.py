"""Publishing App: the application of the tests' Publisher daemons."""

import os
from pathlib import Path

from celery5 import App

app = App(os.environ.get("PUBLISHED_APP", "published"))
GATE = os.environ.get("PUBLISHED_GATE", "")

if GATE:

    @app.publisher_check(name="bank", period=0.2, timeout=30, allowed={"unhealthy": 0})
    def bank() -> bool:
        """Whether nobody has shut the gate."""
        return not Path(GATE).exists()
