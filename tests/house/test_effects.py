"""The effects of operations: each declares what the functions of the API do that it calls.

A call is found in the source: `app.streams.aseek` is `streams.aseek`, and a function that is imported is its name. The
functions of this package that an operation calls are looked at, too.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, get_args

import pytest

from celery5.operations.operation import Effect, Operation
from celery5.operations.processes import EFFECTS
from celery5.operations.table import OPERATIONS
from celery5.protocol.bulk import BulkVerb
from celery5.protocol.commands.definitions import COMMAND_DEFINITIONS
from tests.house.sources import files

CHANGES: Mapping[str, Effect] = {
    "alerts.asilence": Effect.ADJUST,
    "alerts.aunsilence": Effect.ADJUST,
    "alerts.atest": Effect.NOTIFY,
    "bulk.astop": Effect.ADJUST,
    "control.arun": Effect.SEND_JOBS,
    "dead_records.apurge": Effect.DELETE,
    "dead_records.areplay": Effect.SEND_RECORDS | Effect.AT_ONCE,
    "dlq.apurge": Effect.DELETE,
    "dlq.areplay": Effect.SEND_JOBS,
    "events.aresubscribe": Effect.ADJUST,
    "events.asend": Effect.SEND_EVENTS,
    "events.aunsubscribe": Effect.DELETE,
    "keys.adiscard": Effect.AT_ONCE,
    "keys.arelease": Effect.AT_ONCE,
    "limits.alift": Effect.ADJUST,
    "limits.alift_kind_rate": Effect.ADJUST,
    "limits.aresume": Effect.ADJUST,
    "limits.aset": Effect.ADJUST,
    "limits.aset_kind_rate": Effect.ADJUST,
    "limits.asuspend": Effect.ADJUST,
    "app.aempty": Effect.REVOKE_SELECTED,
    "arevoke": Effect.STOP_NAMED,
    "run.acancel": Effect.STOP_NAMED,
    "run.aretry": Effect.SEND_JOBS,
    "run.asignal": Effect.SIGNAL,
    "schedule.aadd": Effect.SEND_JOBS | Effect.ADJUST,
    "schedule.achange": Effect.ADJUST,
    "schedule.apause": Effect.ADJUST,
    "schedule.aremove": Effect.DELETE,
    "schedule.aresume": Effect.ADJUST,
    "schedule.atrigger": Effect.SEND_JOBS,
    "sender.adelay": Effect.SEND_JOBS,
    "stream.asend": Effect.SEND_RECORDS,
    "streams.aforget": Effect.MOVE_GROUPS | Effect.DELETE,
    "streams.areset": Effect.MOVE_GROUPS,
    "streams.areshard": Effect.MOVE_GROUPS,
    "streams.aseek": Effect.MOVE_GROUPS,
    "streams.aset_quarantine": Effect.QUARANTINE,
    # A bulk action does what the verb of its request names.
    "bulk task:revoke": Effect.REVOKE_SELECTED,
    "bulk dlq:purge": Effect.DELETE,
    "bulk dlq:replay": Effect.SEND_JOBS | Effect.AT_ONCE,
    "bulk workflow:retry": Effect.SEND_JOBS | Effect.AT_ONCE,
}
"""What each call does that changes something."""
READS = frozenset(
    {
        *(
            "alerts.alist",
            "alerts.ahistory",
            "app.afind",
            "app.ainfo",
            "audit.alist",
            "bulk.acount",
            "bulk.aget",
            "handle.astatus",
        ),
        *("bulk.alist", "dead_records.aread", "dlq.acount", "dlq.agroups", "dlq.aread", "events.astate"),
        *("jobs.asearch", "jobs.astory", "metrics.ahistory", "metrics.aoverview"),
        *(
            "metrics.astorage",
            "metrics.asummary",
            "parked_keys.aread",
            "run.agraph",
            "run.astatus",
            "handle.astatus",
        ),
        *("schedule.alist", "schedule.ashow", "streams.ainfo", "streams.aread", "workflows.afind"),
        *(
            "workflows.alist_runs",
            "perform list_live_processes",
            "perform list_paused_queues",
            "perform get_scaling",
        ),
        # It writes the entry of what another call has done.
        "audit.arecord_sending",
        # What a command does is told by its definition: see the last test.
        "control.asend",
    }
)
"""The calls that change nothing by themselves."""


def list_calls(function: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
    """Yield what a function calls of the API, itself and by the functions of operations that it names."""
    seen.add(function)
    variables = inspect.getclosurevars(function)
    names: dict[str, Any] = {**variables.globals, **variables.nonlocals}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Call(func=ast.Attribute(attr="aperform"), args=[ast.Call(func=called), *_]):
                yield f"perform {called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)}"
            case ast.Attribute(value=receiver, attr=name) if name in COROUTINES - {"aperform"}:
                yield f"{get_name(receiver)}.{name}"
            case ast.Constant(value=str(verb)) if verb in get_args(BulkVerb):
                yield f"bulk {verb}"
            case ast.ImportFrom(names=imported):
                yield from (alias.name for alias in imported if alias.name in COROUTINES)
            case ast.Name(id=name) if isinstance(helper := names.get(name), FunctionType):
                if helper not in seen and helper.__module__.startswith("celery5.operations."):
                    yield from list_calls(helper, seen)
            case _:
                pass


def get_name(receiver: ast.expr) -> str:
    """Return the last name of what has a method; a run of a workflow is mostly looked up where it is used."""
    match receiver:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return "run"


DEFINED = frozenset(
    name
    for path in files("celery5")
    for name in re.findall(r"(?:@blocking\(|\bdef )([a-z_]+)\b", path.read_text())
)
COROUTINES = frozenset(name for name in DEFINED if name[0] == "a" and name[1:] in DEFINED)
"""The names of the functions of the API that are awaited: those that have a blocking twin without the `a`."""
CALLS = {
    operation.name: frozenset(list_calls(operation.function, set())) for operation in OPERATIONS.values()
}


def test_each_call_of_the_api_that_operations_make_is_known_here() -> None:
    made = {call for calls in CALLS.values() for call in calls}
    assert made - CHANGES.keys() - READS == set(), "say in this module what it does"
    assert (CHANGES.keys() | READS) - made == set(), "no operation does this any more"


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_an_operation_declares_all_effects_of_what_it_calls(operation: Operation) -> None:
    undeclared = [
        effect
        for call in CALLS[operation.name]
        for effect in CHANGES.get(call, ())
        if effect not in operation.effect
    ]
    assert undeclared == []


def test_commands_to_processes_declare_what_their_definitions_say() -> None:
    for operation in OPERATIONS.values():
        definition = inspect.getclosurevars(operation.function).nonlocals.get("definition")
        if definition is not None:
            assert operation.is_change == (definition.permission != "read"), operation.name
    assert EFFECTS.keys() <= COMMAND_DEFINITIONS.keys()
