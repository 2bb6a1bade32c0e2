"""Main: `python -m celery5` is `celery5`."""

import os
import sys
from contextlib import suppress

from celery5.cli.main import main


def drop_folder_of_interpreter() -> None:
    """Take the current folder off the front of the import path, where `python -m` has put it, ahead of PYTHONPATH."""
    with suppress(FileNotFoundError):  # the folder is gone
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]


if __name__ == "__main__":
    drop_folder_of_interpreter()
    main()
