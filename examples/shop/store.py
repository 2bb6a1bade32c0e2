"""Declare the application, its folder, and its two sinks."""

import json
import os
from pathlib import Path
from typing import Any

from celery5 import App
from celery5.results import FileSink, SQLSink

FOLDER = Path(os.environ.get("SHOP_FOLDER", "."))
app = App("corner-shop", timezone="Europe/Berlin", prioritise="shortest")

journal = FileSink(FOLDER / "journal.jsonl", name="journal", on=("SUCCESS", "DEAD"))
"""A line for each payment, and for each that failed."""
ledger = SQLSink(f"sqlite:///{FOLDER / 'ledger.db'}", table="payments", name="ledger")
"""Exactly one row for each payment."""


def note(file: str, **fields: Any) -> None:
    """Write a line for people, and for tests, to read."""
    with (FOLDER / file).open("a") as out:
        out.write(json.dumps(fields) + "\n")
