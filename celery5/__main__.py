"""Main: `python -m celery5` is `celery5`."""

from celery5.cli.main import main
from celery5.config.import_path import drop_folder_of_interpreter

if __name__ == "__main__":
    drop_folder_of_interpreter()
    main()
