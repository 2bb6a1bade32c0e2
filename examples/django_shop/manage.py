"""The commands of the project: Django's own, and `celery5 ...`."""

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    """Run the command that the arguments of this process name."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "celery5.examples.django_shop.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
