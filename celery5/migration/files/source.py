"""Find the files of a Celery project, and read them within bounds of size, number and depth."""

import ast
import io
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from celery5.errors import Misconfigured

MAX_FILE = 2 * 1024 * 1024
"""The largest file that is read, in bytes."""
MAX_FILES = 20_000
MAX_DEPTH = 32
"""How deep folders are searched."""
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"}
_READ_HIDDEN = {
    ".github",
    ".circleci",
    ".gitlab",
    ".buildkite",
    ".devcontainer",
    ".vscode",
    ".ebextensions",
    ".platform",
}
"""Hidden folders with files that start processes."""
_COMMAND_FILE = re.compile(
    r"(?i)(procfile.*|makefile|gnumakefile|justfile|pipfile|.*(dockerfile|containerfile).*|celery(d|beat)?(\.env)?"
    r"|.*\.(ya?ml|service|timer|sh|bash|conf|cfg|ini|toml|mk|tf|hcl|j2|tpl|bat|ps1|cron|md|rst)|\.env.*|.*\.env"
    r"|crontab.*|(package|launch|tasks|devcontainer|app|task-?def\w*).json|.*requirements.*\.(txt|in))"
)
"""Files that may hold command lines of Celery, or the packages that a project needs."""


@dataclass(frozen=True)
class SourceFile:
    """A file as it was read."""

    package: tuple[
        str, ...
    ]  # the package that the project's folder is, with those above it; () if it is none
    path: Path
    name: str  # the path below the project's folder, with `/`
    raw: bytes
    text: str
    encoding: str
    tree: ast.Module | None  # None for a file that is not Python

    @property
    def module(self) -> tuple[str, ...]:
        """The parts of the dotted name."""
        parts = self.name.removesuffix(".py").split("/")
        return (*self.package, *(parts[:-1] if parts[-1] == "__init__" else parts))

    def encode(self, text: str) -> bytes:
        """Return a text in the encoding of the file, with the mark at its beginning if it had one."""
        return text.encode(self.encoding)


@dataclass(frozen=True)
class Project:
    """The files of a project, and why others could not be read."""

    files: tuple[SourceFile, ...]
    unreadable: Mapping[str, str]  # the reason, by the name of the file


def read_project(source: Path) -> Project:
    """Read the Python files of a project, and those that may hold command lines.

    Raises:
        Misconfigured: There is no such file or folder, or it has more files than MAX_FILES.
    """
    if not source.exists():
        raise Misconfigured(f"{source}: there is no such file or folder")
    root = source if source.is_dir() else source.parent
    files: list[SourceFile] = []
    unreadable: dict[str, str] = {}
    package = _find_package(root.resolve())
    for number, path in enumerate(_find_paths(source, unreadable) if source.is_dir() else [source]):
        if number >= MAX_FILES:
            raise Misconfigured(f"{source} has more than {MAX_FILES} files: name a folder inside of it")
        name = path.relative_to(root).as_posix()
        try:
            files.append(_read_file(path, name, package))
        except OSError as error:
            unreadable[name] = error.strerror or "it cannot be read"
        except (SyntaxError, ValueError, LookupError) as error:
            unreadable[name] = _describe(error)
        except (RecursionError, MemoryError):
            unreadable[name] = "it is nested too deeply"
    return Project(tuple(files), unreadable)


def _find_package(folder: Path) -> tuple[str, ...]:
    """Return the dotted name of a folder that is a package of Python, in parts."""
    parts: list[str] = []
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return tuple(parts)


def _find_paths(folder: Path, unreadable: dict[str, str]) -> Iterator[Path]:
    """Yield the files of a folder, in order. Links, hidden folders and environments of Python are left out."""
    depth = len(folder.parts)
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        if "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if name in _READ_HIDDEN or not (name in _SKIPPED or name.startswith("."))
        )
        if len(here.parts) - depth >= MAX_DEPTH and folders:
            unreadable[here.relative_to(folder).as_posix()] = f"folders are searched {MAX_DEPTH} deep"
            folders.clear()
        for name in sorted(names):
            path = here / name
            is_required = here.name == "requirements" and name.endswith((".txt", ".in"))
            is_read = name.endswith(".py") or _COMMAND_FILE.fullmatch(name) or is_required
            if is_read and not path.is_symlink():
                yield path


def _read_file(path: Path, name: str, package: tuple[str, ...]) -> SourceFile:
    """Return a file. Raises OSError, and SyntaxError, ValueError or RecursionError for what is no Python source."""
    if not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
        raw = file.read(MAX_FILE + 1)
    if len(raw) > MAX_FILE:
        raise ValueError(f"it is larger than {MAX_FILE // 1024 // 1024} MiB")
    if path.suffix not in (".py", ".pyi"):
        return SourceFile(package, path, name, raw, raw.decode("utf-8", "replace"), "utf-8", None)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    text = raw.decode(encoding)
    return SourceFile(package, path, name, raw, text, encoding, parse(text))


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a text. Raises SyntaxError, ValueError, RecursionError, and no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def is_whole(text: str) -> bool:
    """Return whether a text is a program that Python takes, also beyond its grammar: `f(a=1, a=2)` is none."""
    return not find_fault(text)


def find_fault(text: str) -> str:
    """Return why Python does not take a text as a program; '' if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<changed>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _describe(error).partition(": ")[2] or _describe(error)
    return ""


def _describe(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    return str(error).partition("\n")[0] or "it is no Python source"
