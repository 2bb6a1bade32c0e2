"""Read, hash and count every file of a folder; `celery5 demo` runs this application.

Begin with `tasks.py`, which is what runs on workers, and go on to `index.py`, which sends the jobs and waits for them.
By hand, on a Redis of your own:

    celery5 -A celery5.examples.index_files worker start --log-format console
    python -c "from celery5.examples.index_files.tasks import digest; print(digest.delay('README.md').get())"
"""

from celery5 import App

app = App("index-files", include=["celery5.examples.index_files.tasks"])
