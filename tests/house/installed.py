"""Installed: is the wheel whole? `nox -s package` asks with a fresh environment's Python, away from the checkout.

Floor: tests. Reads: the installed package, and the source tree named on the command line. Writes: nothing.
"""

import importlib
import pkgutil
import sys
from importlib.resources import files
from pathlib import Path

import celery5

ROOMS = ("services", "bootsteps", "examples")


def main(source: Path) -> None:
    """Compare what is installed with the source tree, and import every module of it."""
    home = Path(str(files("celery5")))
    if home.is_relative_to(source):
        raise SystemExit(f"celery5 was imported from the source tree, {home}, and not from the wheel")
    for room in ROOMS:
        if (home / room).is_symlink() or not (home / room).is_dir():
            raise SystemExit(f"celery5/{room} is no real folder in the wheel")
    there = {path.relative_to(source / "celery5") for path in _sources(source / "celery5")}
    missing = sorted(str(path) for path in there if not (home / path).is_file())
    if missing:
        raise SystemExit(f"not in the wheel: {', '.join(missing)}")
    names = [module.name for module in pkgutil.walk_packages(celery5.__path__, "celery5.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(f"{len(there)} files and {len(names)} modules are in the wheel, and import")


def _sources(folder: Path) -> list[Path]:
    """Every file that belongs in the wheel; the links to the top-level rooms are followed."""
    wanted = (".py", ".lua", ".json", ".typed")
    plain = [path for path in folder.rglob("*") if path.suffix in wanted or path.name == "py.typed"]
    linked = [path for room in ROOMS for path in (folder / room).rglob("*") if path.suffix in wanted]
    return [path for path in dict.fromkeys([*plain, *linked]) if path.is_file()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
