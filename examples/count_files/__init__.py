"""Count the words of many files, a job for each file, and add the counts up when the last one is there.

Begin with `tasks.py`, which has the tasks, and go on to `__main__.py`, which starts the workflow. By hand, on a Redis
of your own, with as many workers as you like:

    python -m celery5.examples.count_files make /tmp/files
    celery5 -A celery5.examples.count_files worker start --log-format console
    python -m celery5.examples.count_files start /tmp/files
    python -m celery5.examples.count_files check /tmp/files

Kill any of these processes at any time, and start it again: the last command still finds each file counted once.
"""

from celery5 import App

app = App("count-files", include=["celery5.examples.count_files.tasks"])
