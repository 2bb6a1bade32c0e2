"""Find the modules that an application includes.

The first word of a pattern is always a package, and a module has only the name by which Python imports it. A glob such
as `**/tasks.py` below the working directory would import virtualenvs, and one module under two names.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pkgutil import iter_modules

from celery5.errors import Misconfigured
from celery5.protocol.masking import describe_error
from celery5.similar_names import did_you_mean


def check_includes(include: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names in `include`, one or several, as a tuple. Raises Misconfigured for invalid names."""
    includes = (include,) if isinstance(include, str) else tuple(include)
    for name in includes:
        if not (name and type(name) is str):  # may be anything where no type checker ran
            raise Misconfigured(
                f"include {name!r}: give the names of modules, such as shop.mail or shop.**.tasks"
            )
        if "/" in name or name.endswith(".py"):
            suggestion = name.removesuffix(".py").strip("./").replace("/", ".")
            suggestion = f"shop.{suggestion}" if suggestion.startswith("*") else suggestion
            raise Misconfigured(f"include {name!r}: it takes modules, not files, such as {suggestion}")
        if "*" in name.partition(".")[0]:
            raise Misconfigured(f"include {name!r}: a pattern begins with a package, such as shop.**.tasks")
    return includes


def find_modules(includes: Sequence[str], may_be_empty: Collection[str] = ()) -> list[str]:
    """Return the names of the modules that `includes` select, without duplicates, in order.

    `shop.mail` is that module. In a pattern `*` stands for a word or a part of one, and `**` for any number of words,
    also none: `shop.**.tasks` is every module named `tasks` in the package shop, and `shop.*` every direct submodule.

    Raises:
        Misconfigured: The package of a pattern does not exist; or no module matches one that is not in `may_be_empty`.
    """
    modules: list[str] = []
    for include in includes:
        matching = _find_matching(include) if "*" in include else [include]
        if not (matching or include in may_be_empty):
            raise Misconfigured(
                f"include {include!r}: no module of package {_get_package(include)!r} fits; "
                "a folder with modules needs an __init__.py"
            )
        modules += matching
    return list(dict.fromkeys(modules))


def is_included(includes: Iterable[str], module: str) -> bool:
    """Return whether `module` is one that `includes` select. Compares names only."""
    return any(_matches(include, module) for include in includes)


def _matches(include: str, module: str) -> bool:
    """Return whether a module matches a pattern, word by word.

    `reached` holds the numbers of words of the name that the pattern up to here can match. A single regular expression
    would try every way to share the words between several `**`.
    """
    names, reached = module.split("."), {0}
    for word in include.split("."):
        if word == "**":
            first = min(reached)
            last = next((n for n in range(first, len(names)) if not _WORD.fullmatch(names[n])), len(names))
            reached = set(range(first, last + 1)) | reached
        else:
            pattern = re.compile(re.sub(r"(?:\\\*)+", r"\\w*", re.escape(word)))
            reached = {n + 1 for n in reached if n < len(names) and pattern.fullmatch(names[n])}
        if not reached:
            return False
    return len(names) in reached


_WORD = re.compile(r"\w+")


def _get_package(pattern: str) -> str:
    """Return the words of a pattern before the first `*`."""
    return ".".join(takewhile(lambda word: "*" not in word, pattern.split(".")))


def _find_matching(include: str) -> list[str]:
    root = _get_package(include)
    parent = root.rpartition(".")[0]
    import_modules([parent] if parent else [])  # find_spec imports it anyway
    places = getattr(sys.modules[parent], "__path__", ()) if parent else None
    spec = None if places == () else find_spec(root)
    if spec is None:
        packages = [f"{parent}.{module.name}".strip(".") for module in iter_modules(places) if module.ispkg]
        suggestion = did_you_mean(root, packages)
        raise Misconfigured(
            f"include {include!r}: there is no package {root!r}{suggestion and f'; {suggestion}'}"
        )
    if spec.submodule_search_locations is None:
        raise Misconfigured(
            f"include {include!r}: there is no package {root!r}, but a module: include={root!r} includes that"
        )
    folders = [*spec.submodule_search_locations]
    parents = {
        os.path.realpath(os.path.join(folder, *[".."] * n))
        for folder in folders
        for n in range(root.count(".") + 1)
    }
    names = [root, *_iterate_submodules(root, folders, parents)]
    return [name for name in names if _matches(include, name) and not name.endswith(".__main__")]


def _iterate_submodules(package: str, folders: Sequence[str], seen: set[str]) -> Iterator[str]:
    """Yield the names of all modules inside a package, without importing any.

    Folders in `seen` are left out: a symbolic link could show one under two names, or inside itself.
    """
    for module in iter_modules(folders):
        name = f"{package}.{module.name}"
        spec = module.module_finder.find_spec(name, None) if module.ispkg else None
        subfolders = spec.submodule_search_locations if spec else None
        if subfolders is None:
            yield name
        elif new_folders := [folder for folder in subfolders if os.path.realpath(folder) not in seen]:
            seen.update(map(os.path.realpath, new_folders))
            yield name
            yield from _iterate_submodules(name, new_folders, seen)


def import_modules(names: Iterable[str]) -> None:
    """Import modules. Raises Misconfigured for one that fails, with the module's own error as its cause."""
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            if _is_missing(name, error):
                raise Misconfigured(f"there is no module {name!r} to include") from None
            reason = explain_import_error(name, error)
            raise Misconfigured(f"included module {name!r} fails while it is imported: {reason}") from error


def explain_import_error(name: str, error: BaseException) -> str:
    """Return why the import of a module failed, in one line: the error, and where the user's code raised it.

    A module that is missing itself was imported by celery5 or Django, so its error has no place to look at.
    """
    place = "" if _is_missing(name, error) else locate_error(error)
    return f"{describe_error(error)} {place}".rstrip()


def explain_load_error(error: BaseException) -> str:
    """Return why an application could not load its tasks: the error, and where its cause was raised."""
    place = locate_error(error.__cause__) if error.__cause__ else ""
    return str(error) if place in str(error) else f"{error} {place}"


def _is_missing(name: str, error: BaseException) -> bool:
    """Return whether an error says that there is no module of this name, or no package that it is in."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return bool(missing) and f"{name}.".startswith(f"{missing}.")


def locate_error(error: BaseException) -> str:
    """Return where an error was raised: the innermost frame of the user's code, else of any code."""
    if isinstance(error, SyntaxError):
        return f"({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    package = os.path.dirname(os.path.dirname(__file__))
    user_frames = [
        frame
        for frame in frames
        if not os.path.abspath(frame.filename).startswith((package, *_list_library_folders()))
    ]
    frames = (user_frames or frames)[-1:]
    return f"({frames[0].filename}:{frames[0].lineno})" if frames else ""


def _list_library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    return tuple(
        {os.path.dirname(os.__file__), *(path for path in sys.path if path.endswith("site-packages"))}
    )
