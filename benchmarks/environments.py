"""Make a virtual environment for each peer when it is first needed, and keep it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from contestants import CHECKOUT, Contestant

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0
"""Seconds that one step of making an environment may take."""
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "site", "htmlcov")

_with_checkout: set[Path] = set()
"""Environments that have this checkout as it is now."""


class CannotPrepare(Exception):
    """An environment could not be made. The message is the end of the output of the tool that failed."""


def cache() -> Path:
    """Return the folder of the environments."""
    folder = os.environ.get("CELERY5_BENCH_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "celery5-bench"


def prepare(contestant: Contestant) -> Path:
    """Return the Python of a contestant's environment, made or updated if necessary. Raises CannotPrepare."""
    folder = cache() / contestant.environment
    python = folder / "bin" / "python"
    interpreter = find_python(contestant.python)
    wanted = f"{interpreter}\n{contestant.packages}\n"
    ready = folder / "ready.txt"
    if not (ready.exists() and ready.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _make(folder, interpreter)
        _install(python, [package for package in contestant.packages if package != CHECKOUT])
        ready.write_text(wanted)
    if CHECKOUT in contestant.packages and folder not in _with_checkout:
        _install_checkout(python)
        _with_checkout.add(folder)
    return python


def _install_checkout(python: Path) -> None:
    """Install a copy of the working tree as a user would; the tree itself does not change."""
    with tempfile.TemporaryDirectory(prefix="celery5-bench-") as folder:
        copy = Path(folder) / "celery5"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
        _install(python, [str(copy)], again=True)


def _uv() -> str | None:
    neighbour = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(neighbour) if neighbour.exists() else None)


def find_python(version: str) -> str:
    """Return an interpreter of a version: the running one, one on PATH or one of pyenv's. Raises CannotPrepare."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *sorted(pyenv.glob(f"{version}.*/bin/{name}"))]
    for python in filter(None, candidates):
        # A shim of pyenv exists for versions that are not installed.
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(python)
    raise CannotPrepare(f"there is no {name} on PATH or among pyenv's; install one")


def _make(folder: Path, interpreter: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if uv := _uv():
        _run([uv, "venv", "--quiet", "--python", interpreter, str(folder)])
    else:
        _run([interpreter, "-m", "venv", str(folder)])


def _install(python: Path, packages: list[str], *, again: bool = False) -> None:
    if not packages:
        return
    if uv := _uv():
        fresh = ["--reinstall-package", "celery5"] if again else []
        # Otherwise each start would compile all modules, which also takes memory, unlike in production.
        compiled = ["--compile-bytecode", *fresh]
        _run([uv, "pip", "install", "--quiet", "--python", str(python), *compiled, *packages])
    else:
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        if again:
            _run(
                [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", *packages]
            )


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or error.stdout).splitlines() if line.strip()]
        raise CannotPrepare(" / ".join(lines[-3:]) if lines else f"exit code {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise CannotPrepare(f"{command[0]} took longer than {LIMIT:.0f} s") from None
