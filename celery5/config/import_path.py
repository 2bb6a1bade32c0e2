"""Put the current folder on the import path: behind PYTHONPATH, before everything that is installed."""

import os
import sys


def add_current_folder() -> str:
    """Put the current folder on the import path, unless something ahead of the standard library names it; return it.

    PYTHONPATH goes first: it names a folder on purpose, and a Controller's description chooses the version of the code
    with it, while the current folder is only where somebody has started the command. An entry behind the standard
    library, such as that of an editable install, does not count: the project's own names go before installed ones.
    """
    folder = os.getcwd()
    library = os.path.dirname(os.__file__)
    own = sys.path[: sys.path.index(library)] if library in sys.path else sys.path
    if folder not in own:
        named = read_python_path()
        sys.path.insert(max((i for i, entry in enumerate(own, 1) if entry in named), default=0), folder)
    return folder


def describe_import_path(folder: str) -> str:
    """Return where modules are searched for, for an error about one that was not found."""
    return (
        f"looked in {', '.join(dict.fromkeys([*read_python_path(), folder]))} and where Python is installed"
    )


def read_python_path() -> list[str]:
    """Return the folders that PYTHONPATH names, as Python reads it: an empty entry is the current folder."""
    text = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    return [os.path.abspath(entry) for entry in text.split(os.pathsep)] if text else []
