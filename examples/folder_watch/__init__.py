"""Folder watch: counts the words of each file that is put into a folder, once.

Floor: on top of everything, as an application is. Reads: INBOX (a folder; `inbox`). Writes: nothing.

`watcher.py` is the Data Source. By hand:

    celery5 -A celery5.examples.folder_watch controller start --development
    cp README.md inbox/
"""

import os
from pathlib import Path

from celery5 import App, FileSink, SourceDocument, source
from celery5.examples.folder_watch.watcher import FolderWatcher

INBOX = Path(os.environ.get("INBOX", "inbox"))

app = App("folder-watch")
inbox = source(FolderWatcher(INBOX, every=float(os.environ.get("EVERY", "1.0"))), name="inbox", single=True)


@app.task(source=inbox, sinks=[FileSink(INBOX / "done" / "words.jsonl", name="words")])
def count_words(document: SourceDocument) -> dict[str, object]:
    """Count."""
    return {"name": document.attributes["name"], "words": len(document.body.split())}
