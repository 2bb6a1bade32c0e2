"""Count the log lines of several hosts by the minute, and raise alerts, on ordered streams.

Begin with `processors.py`, which is what runs on workers, and go on to `folder.py`, which reads the files. All of it in
one process: `celery5 demo --streams`. By hand, on a Redis of your own, with as many workers as you like:

    python -m celery5.examples.log_lines make /tmp/logs
    celery5 -A celery5.examples.log_lines worker start --log-format console
    python -m celery5.examples.log_lines send /tmp/logs
    python -m celery5.examples.log_lines check /tmp/logs

Kill any of these processes at any time, and start it again: the last command still finds each line counted once.
"""

from celery5 import App
from celery5.examples.log_lines.processors import declare

app = App("log-lines")
streams = declare(app)
