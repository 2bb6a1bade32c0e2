"""Store: the application, its folder, and its two sinks."""

import json
import os
from pathlib import Path
from typing import Any

from celery5 import App
from celery5.results import FileSink, SQLSink

FOLDER = Path(os.environ.get("SHOP_FOLDER", "."))
app = App("corner-shop", timezone="Europe/Berlin", prioritise="shortest")

journal = FileSink(FOLDER / "journal.jsonl", name="journal", on=("SUCCESS", "DEAD"))
"""All that was paid, and all that could not be: a line for each."""
ledger = SQLSink(f"sqlite:///{FOLDER / 'ledger.db'}", table="payments", name="ledger")
"""All that was paid: a row for each, and no more than one."""


def note(file: str, **fields: Any) -> None:
    """Write a line for people, and for tests, to look at."""
    with (FOLDER / file).open("a") as out:
        out.write(json.dumps(fields) + "\n")
