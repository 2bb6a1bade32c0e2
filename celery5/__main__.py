"""Main: `python -m celery5` is `celery5`.

Floor: cli. Reads: what the command reads. Writes: what the command writes.
"""

from celery5.cli.main import main

if __name__ == "__main__":
    main()
