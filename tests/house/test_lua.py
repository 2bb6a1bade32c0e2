"""Lua: every script has a legend, and the legend is what the calls really send.

The legend, as the first comment of a script:

    -- What it does.
    -- KEYS  1 what
    --       2.. what, any number of them
    -- ARGV  1 what
    -- Returns what.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from celery5.broker.call import VIRTUAL, make_virtual
from celery5.broker.full_memory import FIRST_WRITES
from celery5.broker.keys import VIRTUAL_TIME
from celery5.broker.lua_commands import find_lua_commands, keep_reachable
from celery5.protocol.job.states import Place
from tests.house.lua import SCRIPTS, body, loaded_scripts, strip_comments
from tests.house.sources import HERE, files, name, tree

CALLS = [path for path in files("celery5/broker") if " = Script.load(" in path.read_text()]


@dataclass(frozen=True)
class WordCount:
    """How many words of one kind a script takes: so many, and any number more when `more`."""

    fixed: int = 0
    more: bool = False


@dataclass(frozen=True)
class Legend:
    """What a script says about itself."""

    keys: WordCount
    argv: WordCount
    what: str
    gives: str


def numbered(lines: list[str], script: str) -> WordCount:
    """Read `1 what`, `2 what`, `3.. what`. Text that goes on is indented deeper than a number."""
    fixed, more = 0, False
    for line in lines:
        found = re.match(r" {1,2}(\d+)(\.\.)? \S", line)
        if not found:
            continue
        number = int(found[1])
        assert not more, f"{script}: nothing can follow `..`: {line}"
        assert number == fixed + 1, f"{script}: expected number {fixed + 1}: {line}"
        more = bool(found[2])
        fixed = fixed if more else number
    return WordCount(fixed, more)


def legend(path: Path) -> Legend:
    """Read the legend of a script."""
    comment = []
    for line in path.read_text().splitlines():
        if not line.startswith("--"):
            break
        comment.append(line[2:])
    sections: dict[str, list[str]] = {"what": []}
    at = "what"
    for line in comment:
        if found := re.match(r" (KEYS|ARGV|Returns)( .*)", line):
            at = found[1]
            line = found[2]
            assert at not in sections, f"{name(path)}: {at} twice"
            sections[at] = [line]
        else:
            sections[at].append(re.sub(r"^ {6}", "", line) if at in ("KEYS", "ARGV") else line)
    return Legend(
        keys=numbered(sections.get("KEYS", []), name(path)),
        argv=numbered(sections.get("ARGV", []), name(path)),
        what=" ".join(sections["what"]).strip(),
        gives=" ".join(sections.get("Returns", [])).strip(),
    )


@cache
def sent() -> dict[str, list[tuple[WordCount, WordCount]]]:
    """For each script, the KEYS and ARGV of every call that is made of it. Not to be changed."""
    calls: dict[str, list[tuple[WordCount, WordCount]]] = {}
    for path in CALLS:
        scripts = dict(loaded(path))
        for function in (node for node in tree(path).body if isinstance(node, ast.FunctionDef)):
            local = {
                node.targets[0].id: node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "script_call":
                    script, keys, argv = node.args[:3]
                    counted = (count(keys, local), count(argv, local))
                    calls.setdefault(scripts[ast.unparse(script)], []).append(counted)
    return calls


def loaded(path: Path) -> list[tuple[str, str]]:
    """`NAME = Script.load("name")` in a module of calls: the constant and the script."""
    return [
        (ast.unparse(node.targets[0]), ast.literal_eval(node.value.args[0]).rpartition("/")[2])
        for node in tree(path).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "Script.load"
    ]


def count(given: ast.expr, local: dict[str, ast.expr]) -> WordCount:
    """How many words an expression stands for: a tuple, or the name of one, or something of unknown length."""
    if isinstance(given, ast.Name) and given.id in local:
        given = local[given.id]
    if not isinstance(given, ast.Tuple):
        return WordCount(0, more=True)
    plain = [element for element in given.elts if not isinstance(element, ast.Starred)]
    return WordCount(len(plain), more=len(plain) < len(given.elts))


def test_there_are_scripts() -> None:
    assert SCRIPTS


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_script_trims_a_queue(path: Path) -> None:
    trims = re.findall(r"MAXLEN|MINID|XTRIM", body(path).upper())
    allowed = {
        "finish_events": ["MAXLEN", "XTRIM", "MINID"],  # events that nobody wants
        "append": [
            *("XTRIM", "MINID"),  # records that were moved to those that wait for the archive
            *(
                "XTRIM",
                "MAXLEN",
                "XTRIM",
                "MINID",
            ),  # records that every group has read, in a log that is no queue
        ],
        "send_report": ["MAXLEN"],  # reports on metrics
        "add_history": ["MAXLEN", "MAXLEN"],  # the history of ended jobs
        "save_alerts": ["MAXLEN", "MAXLEN"],  # the history of alerts, and notifications
        "save_rollup": ["MINID"],  # minutes and hours of metrics
        "settle": ["XTRIM", "MINID"],  # entries before the first pending one: all of them are settled
        "settle_archived": ["XTRIM", "MINID"],  # records that are archived
        "probe_permissions": ["XTRIM", "MAXLEN"],  # of a key that is no stream
    }
    assert trims == allowed.get(path.stem, [])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_does_what_it_takes_and_what_it_gives(path: Path) -> None:
    said = legend(path)
    assert said.what.endswith(".")
    assert said.gives.endswith(".")
    assert said.keys != WordCount()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_uses_no_word_that_its_legend_leaves_out(path: Path) -> None:
    said = legend(path)
    for kind, words in (("KEYS", said.keys), ("ARGV", said.argv)):
        used = {int(number) for number in re.findall(rf"{kind}\[(\d+)\]", body(path))}
        assert words.more or max(used, default=0) <= words.fixed, f"{kind}[{max(used)}] is not in the legend"
        assert re.search(rf"\b{kind}\b", body(path)) or words == WordCount(), (
            f"{kind} is in the legend and is not used"
        )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_sent_what_its_legend_says(path: Path) -> None:
    said = legend(path)
    made = sent().get(path.stem, [])
    assert made, "no call is made of this script"
    assert set(made) == {(said.keys, said.argv)}


def test_every_script_that_is_loaded_exists() -> None:
    wanted = {script for path in CALLS for _, script in loaded(path)}
    assert wanted == {path.stem for path in SCRIPTS}


PLACE_CHECK = re.compile(r"(?:kind|string\.sub\([\w\[\] ']+(?: or '')?, 1, 1\)) [~=]= '(\w)'")
PLACE_WRITTEN = re.compile(r"'(\w) ?' \.\.|HSET', jobs, \w+, '(\w)'\)")


@pytest.mark.parametrize("path", files("celery5/broker/lua", suffix=".lua"), ids=lambda path: path.stem)
def test_a_script_knows_no_place_of_a_job_that_the_table_does_not_have(path: Path) -> None:
    written = {letter for pair in PLACE_WRITTEN.findall(body(path)) for letter in pair if letter}
    assert written | set(PLACE_CHECK.findall(body(path))) <= set(Place)


def test_the_scripts_write_and_read_every_place_of_the_table() -> None:
    text = "".join(map(body, files("celery5/broker/lua", suffix=".lua")))
    assert {letter for pair in PLACE_WRITTEN.findall(text) for letter in pair if letter} == set(Place)


NO_KEY = {"TIME", "PUBLISH", "XREADGROUP"}
"""Commands without a key, and one whose keys stand elsewhere: it is checked in another way."""
DECLARED = re.compile(r"KEYS\[|[a-z_]+(?:\.[a-z]+|\[\w+\])?")


@pytest.mark.parametrize("path", files("celery5/broker/lua", suffix=".lua"), ids=lambda path: path.stem)
def test_no_script_makes_up_a_key(path: Path) -> None:
    """A key is one of KEYS, or begins with one: it is no text of the script's own and no word of ARGV."""
    text = body(path)
    assert "celery5:" not in text
    called = re.findall(r"redis\.p?call\('(\w+)',\s*('\w+',\s*)?([^,)]+)", text)
    for command, subcommand, key in called:
        if command in NO_KEY or (subcommand and command not in ("XGROUP", "XINFO")):
            continue
        assert DECLARED.match(key), f"{command} {key}"
        assert "ARGV" not in key, f"{command} {key}"
    for keys in re.findall(r"'STREAMS', ([^,)]+)", text):
        assert DECLARED.match(keys)
        assert "ARGV" not in keys


REAL_TIME = {"recover": "it judges leases", "find_code": "it judges the code of live workers by their leases"}
"""Scripts of jobs, runs and schedules that look at the clock and go by real time in tests of applications."""


def test_virtual_time_reaches_every_script_that_keeps_jobs_until_their_time() -> None:
    found = {script.name: script for script in loaded_scripts()}
    for script_name in VIRTUAL:
        assert VIRTUAL_TIME in make_virtual(found[script_name]).body
    for path in SCRIPTS:
        if path.parent.name in ("job", "workflows", "scheduling") and "now_ms()" in body(path):
            assert (path.stem in VIRTUAL) != (path.stem in REAL_TIME), path.stem


LOOP = re.compile(r"\b(for\b.*\bdo\b|while\b.*\bdo\b|repeat\b)")
BOUND = re.compile(r"-- bound: \S.*")


@pytest.mark.parametrize("path", files("celery5/broker/lua", suffix=".lua"), ids=lambda path: path.stem)
def test_a_loop_says_what_bounds_it(path: Path) -> None:
    """Redis serves nobody else while a script runs. The first line of a loop ends with `-- bound: ` and what it is."""
    loops = [line for line in path.read_text().splitlines() if LOOP.search(line.split("--")[0])]
    without = [line for line in loops if not BOUND.search(line)]
    assert not without
    assert len(loops) == len(re.findall(r"\b(?:for|while|repeat)\b", body(path)))


NO_MEMBERS = {"finish_events"}
"""Scripts that end what is no job of a task: events."""


@pytest.mark.parametrize("path", files("celery5/broker/lua", suffix=".lua"), ids=lambda path: path.stem)
def test_a_script_that_ends_jobs_counts_those_of_workflows(path: Path) -> None:
    """A job has ended when its place is gone, or is that of a dead letter: its run must hear of it."""
    text = body(path)
    ends = re.search(r"HDEL', jobs\b", text) or re.search(r"XADD', dead, '\*', 'job'", text)
    if ends and path.stem not in NO_MEMBERS:
        assert "note_end(jobs" in text


READS = {
    "cjson.decode",
    "GET",
    "HGET",
    "HGETALL",
    "HKEYS",
    "HMGET",
    "XINFO",
    "XPENDING",
    "XRANGE",
    "ZRANGE",
    "ZSCORE",
}
SWALLOWED = {
    ("cluster/join.lua", "XGROUP"): "all errors but that the group is there are returned",
    ("cluster/leave.lua", "XGROUP"): "the lease is changed behind it, which is refused then",
    ("cluster/renew_presence.lua", "ZREM"): "the lease is written before",
    **dict.fromkeys(
        [("cluster/renew_lease.lua", command) for command in ("XGROUP", "ZADD", "ZREM", "ZREMRANGEBYSCORE")],
        "the lease is written before",
    ),
    ("diagnosis/probe_permissions.lua", "..."): "it is asked what is refused",
    ("job/direct.lua", "XGROUP"): "the job is written behind it, which is refused then",
    ("job/recover.lua", "XGROUP"): "the lease is changed behind it, which is refused then",
    ("job/revoke.lua", "XDEL"): "where the job is is written behind it, which is refused then",
    ("job/take_foreign.lua", "XGROUP"): "the jobs are written before",
    ("lib/admission.lua", "XGROUP"): "the jobs are written before",
    ("lib/admission.lua", "XREADGROUP"): "the jobs are written before",
    ("streams/append.lua", "XADD"): "the records are written behind it, which is refused then",
    ("workflows/advance.lua", "handler"): "a refusal is raised again: tests/redis/workflows/test_refused.py",
}
"""Calls whose errors are caught, and why no refusal is lost: Redis refuses the first write of a script, or none."""


def test_no_caught_error_hides_that_redis_refuses_to_write() -> None:
    root = HERE / "celery5/broker/lua"
    found = {
        (str(path.relative_to(root)), command)
        for path in files("celery5/broker/lua", suffix=".lua")
        for command in re.findall(r"\bpcall\('?([\w.]*)", body(path))
        if command not in READS
    }
    assert found == SWALLOWED.keys()


LIBRARIES = files("celery5/broker/lua/lib", suffix=".lua")
OF_LUA = (
    "and break do else elseif end false for function if in local nil not or repeat return then true until while "
    "cjson cmsgpack error ipairs math next pairs pcall redis select string table tonumber tostring type unpack"
)
SET_IN_FRONT = {"virtual_clock": {"virtual_time"}}
"""What `make_virtual` writes in front of a library."""


def strip_strings(text: str) -> str:
    """Return Lua source without its comments and what is in its strings."""
    return re.sub(r"'(?:[^'\\\n]|\\.)*'", "''", strip_comments(re.sub(r"'--'", "''", text)))


def declared(code: str) -> set[str]:
    """Return all names that Lua source declares anywhere: variables, functions and their parameters, loops."""
    lists = (r"\blocal ([\w, ]+)", r"\bfor ([\w, ]+) in\b", r"\bfor (\w+) =", r"\bfunction[ \w.]*\(([^)]*)\)")
    found = [names for pattern in (*lists, r"\blocal function (\w+)") for names in re.findall(pattern, code)]
    return {name for names in found for name in re.findall(r"\w+", names)}


def used(code: str) -> set[str]:
    """Return the names that Lua source uses: no fields, no keys of tables."""
    without_keys = re.sub(r"([{,]\s*)\w+ = ", r"\1", code)
    return set(re.findall(r"(?<![\w.:])[A-Za-z_]\w*", without_keys)) - set(OF_LUA.split())


@pytest.mark.parametrize("path", LIBRARIES, ids=name)
def test_a_library_uses_no_variable_of_a_script(path: Path) -> None:
    functions = {
        found
        for other in LIBRARIES
        for found in re.findall(r"(?m)^local (?:function )?(\w+)", other.read_text())
    }
    code = strip_strings(path.read_text())
    assert used(code) - declared(code) - functions - SET_IN_FRONT.get(path.stem, set()) == set()


TAKES_MEMORY = frozenset(
    {
        "append",
        "bitfield",
        "copy",
        "getset",
        "hincrby",
        "hincrbyfloat",
        "hset",
        "hsetnx",
        "incr",
        "incrby",
        "linsert",
        "lmove",
        "lpush",
        "lset",
        "psetex",
        "restore",
        "rpush",
        "sadd",
        "set",
        "setex",
        "setnx",
        "setrange",
        "sort",
        "xadd",
        "xgroup|create",
        "xgroup|createconsumer",
        "zadd",
        "zincrby",
        "zunionstore",
    }
)
"""Commands that Redis refuses when its memory is full: those with the flag DENYOOM."""
REFUSED_WHEN_FULL = frozenset(
    {
        "add_history",
        "add_to_waiting_list",
        "advance_rollup",
        "announce_class",
        "append",
        "begin_trial",
        "claim_action",
        "claim_home",
        "claim_rollup",
        "claim_scaling_turn",
        "commit",
        "define",
        "direct",
        "fire_schedule",
        "hand_over",
        "impose",
        "note_delivery",
        "probe_permissions",
        "publish",
        "publish_unique",
        "redeliver_documents",
        "reduce_ttls",
        "replay",
        "reshard",
        "save_action",
        "save_alerts",
        "save_rollup",
        "save_scaling",
        "schedule",
        "seek",
        "send_report",
        "set_condition",
        "set_override",
        "set_parked",
        "set_silence",
        "stage",
        "stage_arguments",
        "stop_action",
        "unsubscribe",
        "watch",
    }
)
"""Scripts that may be refused then: they add work or notes on it, or change what an application is to do."""


def test_every_script_is_listed_as_running_or_refused_when_memory_is_full() -> None:
    taking = {
        script.name
        for script in loaded_scripts()
        if find_lua_commands(keep_reachable(strip_comments(script.body))) & TAKES_MEMORY
    }
    assert not FIRST_WRITES.keys() & REFUSED_WHEN_FULL
    assert FIRST_WRITES.keys() | REFUSED_WHEN_FULL == taking


def test_a_script_that_runs_when_memory_is_full_begins_with_a_write_that_takes_none() -> None:
    scripts = {script.name: script.body for script in loaded_scripts()}
    assert [name for name, line in FIRST_WRITES.items() if not scripts[name].startswith(line)] == []


def test_nothing_is_written_before_jobs_are_acknowledged_where_they_are_settled() -> None:
    """So this script, which runs most, needs no other first write."""
    text = body(next(path for path in SCRIPTS if path.stem == "settle"))
    assert re.findall(r"redis\.call\('([A-Z]+)", text[text.index("if settled[1]") :])[0] == "XACK"
