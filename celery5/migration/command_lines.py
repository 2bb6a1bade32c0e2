"""Find the command lines of Celery in files such as a Procfile or a unit of systemd, and write those of celery5."""

import re
import shlex
from collections.abc import Iterator

from celery5.hints import find_command_hint
from celery5.migration.files.findings import CeleryUse
from celery5.migration.project.index import ProjectIndex

MAX_LINE = 2000
_COMMAND = re.compile(r"(?<![\w./-])(?:[\w./${}-]+/)?celery(?=[\s\"',])(?P<rest>[^#;&|]*)")
_LIST = re.compile(r"[\[\]\"']|,(?=[\s\"']|$)")
"""What a list of YAML or of a Dockerfile puts around words."""
_WORDS = [
    "worker",
    "beat",
    "flower",
    "multi",
    "inspect",
    "control",
    "status",
    "purge",
    "call",
    "result",
    "shell",
    "events",
    "list",
    "report",
    "upgrade",
    "graph",
    "amqp",
    "logtool",
    "migrate",
]
_FLAGS = {
    "-l": "--log-level",
    "--loglevel": "--log-level",
    "-c": "--cpu-slots",
    "--concurrency": "--cpu-slots",
    "-Q": "--queues",
    "--queues": "--queues",
    "-n": "--name",
    "--hostname": "--name",
    "--max-tasks-per-child": "--max-jobs",
}
"""Flags of `celery worker`, and those of `celery5 worker start`."""
_OF_ALL = "where --max-jobs counts for the whole worker, not for each child: multiply it by the concurrency"
_ALONE = {
    *(
        "-B",
        "--beat",
        "-E",
        "--events",
        "--task-events",
        "--detach",
        "-D",
        "--purge",
        "--discard",
        "-q",
        "--quiet",
    ),
    *("--without-gossip", "--without-mingle", "--without-heartbeat", "--no-color"),
}
"""Flags without a value."""


def find_command_lines(text: str, index: ProjectIndex) -> Iterator[CeleryUse]:
    """Yield a finding for each command line of Celery."""
    for number, line in enumerate(text.split("\n"), 1):
        if "celery" not in line or len(line) > MAX_LINE or line.lstrip().startswith("#"):
            continue
        for match in _COMMAND.finditer(_LIST.sub(" ", line)):
            advice = _translate(_split(match["rest"]), index)
            if advice:
                yield CeleryUse(number, "by hand", f"celery {' '.join(match['rest'].split())}"[:200], advice)


_REQUIREMENT = re.compile(
    r"""(?:^[\s"']*|["'](?=celery\s*[\[<>=!~]))(celery(?:\[[\w,\s-]*\])?)(?=\s*(?:[<>=!~;"',#@]|$))"""
)
"""Celery among the packages that a project needs, in `requirements.txt` or a list of `pyproject.toml`."""


def find_requirements(text: str, index: ProjectIndex) -> Iterator[CeleryUse]:
    """Yield a finding for each line that requires Celery, with what celery5 has for its extras."""
    extras = ["testing"]
    extras += ["django"] if index.is_django else []
    extras += ["dashboard", "top"] if index.has_flower else []
    of_flower = ", dashboard and top for what replaces Flower" if index.has_flower else ""
    for number, line in enumerate(text.split("\n"), 1):
        match = _REQUIREMENT.search(line) if len(line) <= MAX_LINE else None
        if match:
            yield CeleryUse(
                number,
                "by hand",
                match[1],
                f"celery5[{','.join(sorted(extras))}], which needs no extra for Redis; testing is for tests (in_memory)"
                f"{of_flower}: celery5 docs install lists all extras",
            )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


_OTHER_COMMANDS = {
    "migrate": "leave it out: there are no other brokers; celery5 migrate reads a project",
}
"""Commands of Celery's of which celery5 has one that does something else."""


def _translate(words: list[str], index: ProjectIndex) -> str:
    """Return the command line to write; '' if the words are no command of Celery."""
    app, command = "", ""
    rest: list[str] = []
    position = 0
    while position < len(words):
        word, separator, value = words[position].partition("=")
        if word in ("-A", "--app"):
            app = value if separator else "".join(words[position + 1 : position + 2])
            position += 0 if separator else 1
        elif word in ("-b", "--broker", "--workdir", "--config") and not command:
            position += 0 if separator else 1
        elif not command and word in _WORDS:
            command = word
        else:
            rest.append(words[position])
        position += 1
    if not command:
        return ""
    begin = f"celery5 -A {index.find_celery_module(app)}" if app else "celery5"
    if index.is_django:
        begin = "python manage.py celery5"
    if command == "worker":
        return _translate_worker(begin, rest)
    if command == "beat":
        return f"{begin} scheduler start, twice or more"
    hint = find_command_hint([command, *rest[:1]])
    advice = hint.removeprefix("; ").partition(" there is ")[2].rpartition(" (see ")[0]
    if index.is_django:
        advice = re.sub(r"\bcelery5 (?=[a-z])", "python manage.py celery5 ", advice)
    return advice or _OTHER_COMMANDS.get(command, "see celery5 docs from-celery")


def _translate_worker(begin: str, words: list[str]) -> str:
    is_green = any(
        word in ("gevent", "eventlet") or word.endswith(("=gevent", "=eventlet")) for word in words
    )
    flags: list[str] = []
    notes: list[str] = []
    for flag, value in _read_flags(words):
        if flag in ("-Q", "--queues"):
            queues = ["default" if queue == "celery" else queue for queue in value.split(",")]
            flags.append(f"--queues {','.join(queues)}")
        elif flag in ("-c", "--concurrency") and is_green:
            flags.append(f"--concurrency {value}")
        elif flag in _FLAGS:
            flags.append(f"{_FLAGS[flag]} {value.lower() if 'level' in _FLAGS[flag] else value}")
            notes += [_OF_ALL] if _FLAGS[flag] == "--max-jobs" else []
        elif flag == "--max-memory-per-child":
            flags.append(f'--max-memory "{value} KiB"')
        else:
            notes += _note_flag(begin, flag, value, is_green=is_green)
    return ", ".join([" ".join([f"{begin} worker start", *flags]), *notes])


def _read_flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with its value: `-c 4`, `-c4`, `--concurrency=4`."""
    position = 0
    while position < len(words):
        flag, separator, value = words[position].partition("=")
        if not separator and len(flag) > 2 and flag[1] != "-" and flag[:2] in _FLAGS:
            flag, value, separator = flag[:2], flag[2:], "="
        position += 1
        if not flag.startswith("-"):
            continue
        if (
            not separator
            and flag not in _ALONE
            and not "".join(words[position : position + 1]).startswith("-")
        ):
            value = "".join(words[position : position + 1])
            position += 1
        yield flag, value


def _note_flag(begin: str, flag: str, value: str, *, is_green: bool) -> list[str]:
    """Return what is to be done beside the command because of a flag."""
    if flag in ("-B", "--beat"):
        return [f"and {begin} scheduler start"]
    if flag in ("-P", "--pool") and is_green:
        return ["with async def tasks"]
    if flag == "--autoscale":
        most, _, least = value.partition(",")
        return [f'with CELERY5_BUDGETS="thread={least or 1}..{most}"']
    if flag in ("--time-limit", "--soft-time-limit"):
        return [f"with CELERY5_{flag[2:].replace('-', '_').upper()}={value}"]
    return []
