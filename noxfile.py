"""Nox: every check of this house, as one command each; a bare `nox` runs all of them but the benchmarks."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "imports", "tests", "package", "docs"]

HERE = Path(__file__).parent
GROUPS = nox.project.load_toml(HERE / "pyproject.toml")
SUPPORTED = ("3.11", "3.12", "3.13")

# Interpreters are looked for, never fetched, by nox and by uv alike.
os.environ["UV_PYTHON_DOWNLOADS"] = "never"
# Behind a proxy with an authority of its own uv is to get through wherever pip does.
os.environ.setdefault("UV_SYSTEM_CERTS", "true")


def _says_its_version(python: str | Path, version: str) -> bool:
    """Whether `python` runs and is of that version: a pyenv shim exists for every version and works for one."""
    try:
        said = subprocess.run([python, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0 and said.stdout.startswith(f"Python {version}.")


def _others() -> list[str]:
    """Return the supported versions beside the running one that have a working interpreter, which is put on PATH.

    They are looked for beside the running Python, on PATH, and among pyenv's.
    """
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: list[str] = []
    for version in SUPPORTED:
        if version == running:
            continue
        name = f"python{version}"
        candidates = [Path(sys.executable).with_name(name), *map(Path, filter(None, [shutil.which(name)]))]
        for python in [*candidates, *sorted(pyenv.glob(f"{version}.*/bin/{name}"))]:
            if _says_its_version(python, version):
                os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
                found.append(version)
                break
    return found


OTHERS = _others()


def _install(session: nox.Session, *groups: str, project: bool = False) -> None:
    """Install dependency groups and, when asked, the project itself, editable, with its embedded server."""
    wanted = nox.project.dependency_groups(GROUPS, *groups)
    session.install(*(["-e", ".[demo]"] if project else []), *wanted)


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint."""
    _install(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Both type checkers, strict, and the completeness of the public types."""
    _install(session, "types", project=True)
    # What the checkers tell a user, and whether the injector gives every part the type that it asks for. The session
    # `tests` skips those, as it has no checkers.
    told = ("tests/typing", "tests/pure/process/test_wiring.py")
    # The longest first, two at a time: each of them keeps one processor busy.
    checks = [
        partial(_passes, session, "basedpyright", "--pythonpath", _python_of(session)),
        partial(_passes, session, "mypy"),
        partial(_public_types, session),
        partial(_passes, session, "python", "-m", "pytest", "-q", *told),
    ]
    with ThreadPoolExecutor(2) as pool:
        passed = list(pool.map(lambda check: check(), checks))
    if not all(passed):  # each has had its say, even after another had found faults
        session.error("see above")


def _python_of(session: nox.Session) -> str:
    """The session's interpreter. Left to itself basedpyright takes a `.venv` beside it, where nothing is installed."""
    return str(Path(session.bin) / "python")


def _passes(session: nox.Session, *command: str) -> bool:
    """Run a command, show what it says when it has ended, and return whether it succeeds."""
    try:
        output = session.run(*command, silent=True)
    except CommandFailed:  # nox has shown what it said
        return False
    session.log(output)
    return True


# What an application imports. The layers below it are for the two checkers above.
PUBLIC = (
    "app",
    "application",
    "boot_step",
    "commands",
    "config",
    "connections",
    "dead_letters",
    "errors",
    "events",
    "health",
    "limits",
    "results",
    "scaling",
    "scheduling",
    "sending",
    "tasks",
    "testing",
)


def _public_types(session: nox.Session) -> bool:
    """Every type that an application can see is complete, and the same for all checkers."""
    # An editable install is an import hook, which a static checker cannot follow: show it the checkout.
    said = session.run(
        *("basedpyright", "--verifytypes", "celery5", "--ignoreexternal", "--outputjson"),
        env={"PYTHONPATH": str(HERE)},
        silent=True,
        stderr=None,
        success_codes=[0, 1],
    )
    symbols = json.loads(str(said))["typeCompleteness"]["symbols"]
    public = [
        each
        for each in symbols
        if re.fullmatch(rf"celery5\.({'|'.join(PUBLIC)}|[A-Za-z_]+$)(\..*)?", each["name"])
    ]
    faults = [
        f"{each['name']}: {fault['message']}"
        for each in public
        if not each["isTypeKnown"] or each["isTypeAmbiguous"]
        for fault in each["diagnostics"]
    ]
    session.log(f"{len(public)} public names")
    for fault in faults:
        session.warn(fault)
    return bool(public) and not faults


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom."""
    _install(session, "imports", project=True)
    session.run("lint-imports")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests, on a real server of their own. Further arguments go to pytest: `nox -s tests -- -k story`."""
    _test(session, *session.posargs)


@nox.session(python=OTHERS)
def compatibility(session: nox.Session) -> None:
    """The tests on another Python: all that need no server, and of the others each version has a share of the files.

    What looks at the source, or at whole processes from outside, is the same on every Python.
    """
    files = sorted(str(each.relative_to(HERE)) for each in (HERE / "tests").glob("*/**/test_*.py"))
    served = [each for each in files if each.startswith(("tests/redis/", "tests/faults/"))]
    share = served[OTHERS.index(str(session.python)) :: len(OTHERS)]
    _test(session, *(session.posargs or ("-m", "not nemesis", "tests/pure", "tests/trio", *share)))


def _test(session: nox.Session, *arguments: str) -> None:
    """Run pytest in this session's environment."""
    session.env["UV_COMPILE_BYTECODE"] = "1"  # as pip does by itself: see `_compile`
    _install(session, "test", project=True)
    paths = [each for each in arguments if Path(each.partition("::")[0]).exists()]
    _compile(session, *(paths or ["tests"]))
    # Most tests wait for something, so four processes on two cores take a third of the time. Each has its own server.
    # No `create_tmp`: it moves the tests' own folders into the checkout, and a socket's path has 107 bytes.
    cache = Path(session.virtualenv.location).resolve() / "pytest"
    options = ("-n", "4", "--dist", "worksteal", "--durations", "25")
    # What a test writes as a module and replaces within the same second must be read anew: no bytecode of that.
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    session.run("python", "tests/house/twice.py", str(cache), *options, *arguments, env=environ)


def _compile(session: nox.Session, *paths: str) -> None:
    """Keep the bytecode of all that the tests import, and of the tests as pytest rewrites them.

    The tests start thousands of processes, and where no bytecode is kept each of those compiles hundreds of modules:
    1.5 s of CPU instead of 0.5 s for one worker. That happens wherever PYTHONDONTWRITEBYTECODE is set, as it is in many
    containers. compileall follows no links, so the linked folders are named.
    """
    folders = ("celery5", "celery5/services", "celery5/bootsteps", "celery5/examples", "tests")
    session.run("python", "-m", "compileall", "-q", *folders)
    collect = ("--collect-only", "-q", "-p", "no:cacheprovider")
    environ = {"PYTHONDONTWRITEBYTECODE": None}
    session.run("python", "-m", "pytest", *collect, *paths, silent=True, env=environ)


@nox.session
def package(session: nox.Session) -> None:
    """sdist, the wheel made from it, a fresh environment, and a job in it, away from the checkout."""
    room = Path(session.create_tmp()).resolve()
    source = room / "source"
    shutil.rmtree(room)
    ignored = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__")
    shutil.copytree(HERE, source, symlinks=True, ignore=ignored)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(room), str(source), silent=True)
    (wheel,) = room.glob("*.whl")
    session.install(f"celery5[demo,testing] @ {wheel.as_uri()}")
    shutil.copy(HERE / "tests" / "house" / "installed.py", room / "installed.py")
    session.chdir(room)
    session.run("python", "installed.py", str(source))
    session.run("celery5", "--version")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, with every warning an error."""
    _install(session, "docs")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "true"})


@nox.session
def bench(session: nox.Session) -> None:
    """The measurements behind every number in the README; peers get environments of their own."""
    _install(session, project=True)
    session.run("python", "benchmarks/run.py", *session.posargs)
