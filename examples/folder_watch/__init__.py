"""Count the words of each file that is put into a folder, once.

`watcher.py` is the Data Source. By hand:

    celery5 -A celery5.examples.folder_watch controller start --development
    cp README.md inbox/
"""

import os
from pathlib import Path

from celery5 import App, source
from celery5.events import SourceDocument
from celery5.examples.folder_watch.watcher import FolderWatcher
from celery5.results import FileSink

INBOX = Path(os.environ.get("INBOX", "inbox"))

app = App("folder-watch")
inbox = source(FolderWatcher(INBOX, every=float(os.environ.get("EVERY", "1.0"))), name="inbox", single=True)


@app.task(source=inbox, sinks=[FileSink(INBOX / "done" / "words.jsonl", name="words")])
def count_words(document: SourceDocument) -> dict[str, object]:
    """Return the name and the number of words of a file."""
    return {"name": document.attributes["name"], "words": len(document.body.split())}
