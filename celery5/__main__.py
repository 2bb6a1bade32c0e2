"""Main: `python -m celery5` is `celery5`."""

from celery5.cli.main import main

if __name__ == "__main__":
    main()
