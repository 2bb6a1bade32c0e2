"""Include: from what an application includes to the modules that it means.

Fennel globbed `**/tasks.py` below the working directory, and so imported virtualenvs, and one module under two names.
Here the first word is always a package, and a module has the one name that Python imports it by.
"""

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pkgutil import iter_modules

from celery5.errors import Misconfigured
from celery5.protocol.masking import describe_error


def check_includes(include: str | Sequence[str]) -> tuple[str, ...]:
    """What an application is told to include, one name or several. Raises Misconfigured for what is no name."""
    includes = (include,) if isinstance(include, str) else tuple(include)
    for each in includes:
        if not (each and type(each) is str):  # what no checker has seen
            raise Misconfigured(
                f"include {each!r}: give the names of modules, such as shop.mail or shop.**.tasks"
            )
        if "/" in each or each.endswith(".py"):
            instead = each.removesuffix(".py").strip("./").replace("/", ".")
            instead = f"shop.{instead}" if instead.startswith("*") else instead
            raise Misconfigured(f"include {each!r}: it takes modules, not files, such as {instead}")
        if "*" in each.partition(".")[0]:
            raise Misconfigured(f"include {each!r}: a pattern begins with a package, such as shop.**.tasks")
    return includes


def find_modules(includes: Sequence[str]) -> list[str]:
    """The names of the modules that `includes` mean, each once, in order.

    `shop.mail` is that module. In a pattern `*` stands for one word, or a part of one, and `**` for any number of
    words, none too: `shop.**.tasks` is every module named `tasks` in the package shop, `shop.*` every module right in
    it. Raises Misconfigured for a pattern whose package is not there, or that no module fits.
    """
    found: list[str] = []
    for include in includes:
        found += _fitting(include) if "*" in include else [include]
    return list(dict.fromkeys(found))


def is_included(includes: Iterable[str], module: str) -> bool:
    """Whether `module` is one of those that `includes` mean. Looks at nothing but names."""
    return any(_fits(each, module) for each in includes)


def _fits(include: str, module: str) -> bool:
    """Return whether a module fits a pattern, word by word: which places of its name the pattern's words so far may
    have come to. One expression for all of it would try every way to share the words between several `**`."""
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


def _fitting(include: str) -> list[str]:
    words = include.split(".")
    root = ".".join(words[: next(n for n, word in enumerate(words) if "*" in word)])
    parent = root.rpartition(".")[0]
    import_modules([parent] if parent else [])  # finding a package does so anyway
    spec = find_spec(root)
    if spec is None or spec.submodule_search_locations is None:
        raise Misconfigured(f"include {include!r}: there is no package {root!r}")
    places = [*spec.submodule_search_locations]
    above = {
        os.path.realpath(os.path.join(place, *[".."] * n))
        for place in places
        for n in range(root.count(".") + 1)
    }
    below = [root, *_below(root, places, above)]
    found = [each for each in below if _fits(include, each) and not each.endswith(".__main__")]
    if not found:
        raise Misconfigured(
            f"include {include!r}: no module of package {root!r} fits; a folder with modules needs an __init__.py"
        )
    return found


def _below(package: str, folders: Sequence[str], seen: set[str]) -> Iterator[str]:
    """The names of all modules inside a package, found without importing any. A folder that was `seen` is left out:
    by a link it could be there under two names, or inside itself."""
    for each in iter_modules(folders):
        name = f"{package}.{each.name}"
        inner = each.module_finder.find_spec(name, None) if each.ispkg else None
        places = inner.submodule_search_locations if inner else None
        if places is None:
            yield name
        elif new := [place for place in places if os.path.realpath(place) not in seen]:
            seen.update(map(os.path.realpath, new))
            yield name
            yield from _below(name, new, seen)


def import_modules(names: Iterable[str]) -> None:
    """Import modules. Raises Misconfigured, with the module's own error as its cause, for one that cannot be."""
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            if (
                isinstance(error, ModuleNotFoundError)
                and error.name
                and f"{name}.".startswith(f"{error.name}.")
            ):
                raise Misconfigured(f"there is no module {name!r} to include") from None
            why = describe_error(error)
            raise Misconfigured(f"included module {name!r} fails while it is imported: {why}") from error
