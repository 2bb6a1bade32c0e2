"""Find the command lines of Celery in files such as a Procfile or a unit of systemd, and write those of celery5."""

import ast
import re
import shlex
from collections.abc import Iterator

from celery5.hints import find_command_hint
from celery5.migration.files.findings import CeleryUse
from celery5.migration.files.source import SourceFile
from celery5.migration.project.index import ProjectIndex

MAX_LINE = 2000
_COMMAND = re.compile(
    r"(?<![\w./-])(?:[\w./${}-]+/)?(?:celery|\$\{?CELERY_BIN\}?)(?=[\s\"',])(?P<rest>[^#;&|]*)"
)
_LIST = re.compile(r"[\[\]\"'`]|,(?=[\s\"']|$)")
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
    "-n": "",
    "--hostname": "",
    "--max-tasks-per-child": "--max-jobs",
}
"""Flags of `celery worker`, and those of `celery5 worker start`."""
_OF_ALL = "where --max-jobs counts for the whole worker, not for each child: multiply it by the concurrency"
_OF_ONE_WORKER = "and {} where only one worker has that name: without it the name is the host and the process"
"""The advice for a name with `%h` and the like. celery5 has no such patterns. Workers of one name share an inbox."""
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


_OPEN_COMMAND = re.compile(r"(?i)^\s*(?:-\s+|command:\s*|entrypoint:?\s*)[\[\"']*[\w./${}-]*celery\b")
"""A line of YAML or of a Dockerfile with `celery` alone: the arguments may be in the lines below."""
_MORE_WORDS = re.compile(r"^\s*(?:-\s+[^\s:]+\s*$|args:|cmd:?\s*\[)", re.IGNORECASE)
_FLAG = re.compile(r"^\s+--?[A-Za-z]")
_ITEM = re.compile(r"(?i)^\s*(?:-\s+|args:|cmd:?\s)")
_ENDING = re.compile(r"\b(?:pkill|killall|pgrep|pidof)\b|\bps\s+\w+\s*\|")
_END = "{begin} worker shutdown stops workers, and {begin} worker list shows them: their processes are called celery5"
_OPTIONS = re.compile(
    r"^\s*(?:export\s+|ENV\s+|-\s+)?[\"']?(CELERY_BIN|CELERY_APP|CELERY_RESULT_BACKEND|CELERY(?:D|BEAT)_\w+)[\"']?\s*[=:]"
)
_OF_SCRIPTS = (
    "leave it out, and the script that reads it: celery5 docs systemd has units for systemd, and options are flags of "
    "celery5 worker start"
)
_OF_RESULTS = "leave it out when no code reads it any more: results are in Redis, beside the jobs"
_DOCUMENTS = re.compile(r"(?i)\.(md|rst|txt)$")
_PLAIN_TEXT = re.compile(r"(?:-A|--app)\b")
"""What marks a command line in a text for people. The words `celery worker` without it are prose."""


def find_command_lines(file: SourceFile, index: ProjectIndex) -> Iterator[CeleryUse]:
    """Yield the command lines of Celery in a file that is not Python, and the options of its scripts."""
    lines = file.text.split("\n")
    is_text = _DOCUMENTS.search(file.name) and not file.path.name.lower().startswith(("crontab", "procfile"))
    for number, line in enumerate(lines, 1):
        option = _OPTIONS.match(line)
        if option and len(line) <= MAX_LINE:
            yield CeleryUse(
                number, "by hand", option[1], _OF_RESULTS if "RESULT" in option[1] else _OF_SCRIPTS
            )
        elif _is_candidate(line) and not (is_text and not _PLAIN_TEXT.search(line)):
            yield from _find_in_line(number, _join(lines, number - 1), index)


def find_commands_in_code(tree: ast.Module, index: ProjectIndex) -> Iterator[CeleryUse]:
    """Yield the command lines in a Python file: texts, and lists of words, but no docstrings."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documents and "celery " in text:
                yield from _find_in_line(node.lineno, text.replace("\n", " "), index)
            case (
                ast.List(elts=[ast.Constant(value=str(first)), *others])
                | ast.Tuple(elts=[ast.Constant(value=str(first)), *others])
            ) if first.rpartition("/")[2] == "celery" and others:
                words = [str(word.value) if isinstance(word, ast.Constant) else "..." for word in others]
                yield from _find_in_line(node.lineno, f"celery {' '.join(words)}", index)
            case _:
                pass


def _is_candidate(line: str) -> bool:
    return (
        "celery" in line.lower() and len(line) <= MAX_LINE and not line.lstrip().startswith(("#", ";", "//"))
    )


def _find_in_line(number: int, line: str, index: ProjectIndex) -> Iterator[CeleryUse]:
    for match in _COMMAND.finditer(_LIST.sub(" ", line)[:MAX_LINE]):
        is_ending = _ENDING.search(line[: match.start()]) is not None
        words = _split(match["rest"])
        advice = _END.format(begin=_begin("", index)) if is_ending else _translate(words, index)
        if advice:
            yield CeleryUse(number, "by hand", f"celery {' '.join(match['rest'].split())}"[:200], advice)


def _join(lines: list[str], first: int) -> str:
    """Return a command line, with the lines below that continue it.

    They follow a backslash, begin with a flag and are indented, or are the items of a list of YAML; `CMD` of a
    Dockerfile and `args` of a container follow the list of the command.
    """
    whole = lines[first]
    is_list = _OPEN_COMMAND.match(whole) is not None and not _find_word(whole)
    for line in lines[first + 1 : first + MAX_JOINED]:
        if whole.rstrip().endswith("\\"):
            whole = f"{whole.rstrip()[:-1]} {line.strip()}"
        elif _FLAG.match(line) or (is_list and _MORE_WORDS.match(line)):
            whole = f"{whole} {_ITEM.sub('', line).strip()}"
        else:
            break
    return whole


MAX_JOINED = 40
"""The most lines of one command."""


def _find_word(line: str) -> str:
    """Return the command of Celery in a line; '' if it is not in this one."""
    words = _LIST.sub(" ", line).split()
    return next((word for word in words if word in _WORDS), "")


_REQUIREMENT = re.compile(
    r"""^[\s"'-]*(?P<name>[A-Za-z][\w.-]*)(?P<extras>\[[\w,\s-]*\])?(?=\s*(?:[<>=!~;"',#@]|$))"""
    r"""|["'](?P<inner>[A-Za-z][\w.-]*)(?P<more>\[[\w,\s-]*\])?(?=\s*[<>=!~;])"""
    r"""|["'](?P<only>[A-Za-z][\w.-]*)(?P<extra>\[[\w,\s-]*\])(?=["'])"""
    r"""|\b(?:install|add)\b[^#]*?\s["']?(?P<installed>celery)(?P<with>\[[\w,-]*\])?(?=[\s"'<>=~!]|$)"""
)
"""A requirement in `requirements.txt` or in a list of `pyproject.toml`, or a package that a command installs."""
_COMPANIONS = {
    "django-celery-beat": "leave it out: celery5 migrate --beat FILE.json writes its rows as schedules",
    "django-celery-results": "leave it out: results are in Redis, and celery5 migrate --results FILE.json stores "
    "those that are still wanted",
    "flower": "leave it out: celery5[dashboard,top] has celery5 dashboard start and celery5 top",
    "celery-once": "leave it out: options(key=...), or unique_for= of a task (celery5 docs idempotency)",
    "celery-singleton": "leave it out: options(key=...), or unique_for= of a task (celery5 docs idempotency)",
    "celery-redbeat": "leave it out: schedules are in Redis",
    "celery-progress": "leave it out: progress(done, total, note), and result.watch() (celery5 docs results)",
    "pytest-celery": "celery5[testing]: in_memory(app) and running_worker(app)",
    **dict.fromkeys(
        ("kombu", "billiard", "amqp", "vine"),
        "leave it out, unless something else needs it: celery5 does not",
    ),
}
"""Packages around Celery, and what to do with them."""


EXTRAS = ("dashboard", "testing", "top")
"""The extras of celery5 that a Celery project needs; one with Django also needs `django`."""
REDIS_PY = "redis>=8,<9"
"""The versions of redis-py that celery5 requires."""
_WITHOUT_REDIS = (
    "; while both are installed, write celery without [redis], which requires an older redis-py than celery5: Celery "
    "also runs with the newer one"
)


def find_requirements(text: str, index: ProjectIndex) -> Iterator[CeleryUse]:
    """Yield the lines that require Celery or a package around it, with what to require instead."""
    extras = ",".join(sorted({*EXTRAS, *(["django"] if index.is_django else [])}))
    for number, line in enumerate(text.split("\n"), 1):
        for match in _REQUIREMENT.finditer(line) if len(line) <= MAX_LINE else ():
            groups = match.groupdict()
            name = next(groups[key] for key in ("name", "inner", "only", "installed") if groups[key])
            key = name.lower().replace("_", "-")
            if key == "celery":
                shown = next((groups[key] for key in ("extras", "more", "extra", "with") if groups[key]), "")
                yield CeleryUse(
                    number,
                    "by hand",
                    f"celery{shown}",
                    f"celery5[{extras}]: dashboard and top take the place of Flower, testing is for "
                    f"tests{_WITHOUT_REDIS if 'redis' in shown else ''} (celery5 docs install: all extras, "
                    "and where to install it from)",
                )
            elif key == "redis" and _is_older_redis(line[match.end() :]):
                yield CeleryUse(number, "by hand", "redis", f"{REDIS_PY}, which celery5 requires")
            elif key in _COMPANIONS:
                yield CeleryUse(number, "by hand", key, _COMPANIONS[key])


def _is_older_redis(rest: str) -> bool:
    """Return whether a requirement of redis-py only allows versions that are too old for celery5."""
    bound = re.match(r"[^#;\"']*?(?P<kind>==|~=|<=|<)\s*(?P<major>\d+)", rest)
    least = int(REDIS_PY.partition(">=")[2].partition(",")[0])
    return bound is not None and int(bound["major"]) < least + (bound["kind"] == "<")


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
    begin = _begin(app, index)
    if command == "worker":
        return _translate_worker(begin, rest, index)
    if command == "beat":
        return f"{begin} scheduler start, twice or more"
    hint = find_command_hint([command, *rest[:1]])
    advice = hint.removeprefix("; ").partition(" there is ")[2].rpartition(" (see ")[0]
    advice = re.sub(r"\bcelery5 (?!docs|migrate)(?=[a-z])", f"{begin} ", advice)
    return advice or _OTHER_COMMANDS.get(command, "see celery5 docs from-celery")


def _begin(app: str, index: ProjectIndex) -> str:
    """Return the first words of a command line of celery5."""
    if index.is_django:
        return "python manage.py celery5"
    return f"celery5 -A {index.find_celery_module(app)}" if app else "celery5"


def _rename_queue(queue: str, index: ProjectIndex) -> str:
    return "default" if queue == "celery" and not index.names_default_queue else queue


def _translate_worker(begin: str, words: list[str], index: ProjectIndex) -> str:
    is_green = any(
        word in ("gevent", "eventlet") or word.endswith(("=gevent", "=eventlet")) for word in words
    )
    flags: list[str] = []
    notes: list[str] = []
    for flag, value in _read_flags(words):
        if flag in ("-Q", "--queues"):
            queues = [_rename_queue(queue, index) for queue in value.split(",")]
            flags.append(f"--queues {','.join(queues)}")
        elif flag in ("-c", "--concurrency") and is_green:
            flags.append(f"--concurrency {value}")
        elif flag in ("-n", "--hostname"):
            name = value.partition("@")[0]
            flags += [f"--name {name}"] if name and "%" not in value else []
            if name and "%" not in name and "%" in value:
                notes.append(_OF_ONE_WORKER.format(f"--name {name}"))
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
