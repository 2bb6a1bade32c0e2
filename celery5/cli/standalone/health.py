"""Report by an exit code whether workers are healthy (`health`), for containers, scripts and people.

With a port this imports neither Trio nor a Redis client nor the application, since a probe runs every few seconds.
"""

import json
import re
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.output import echo, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured
from celery5.protocol.masking import collapse_whitespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery5.cli.terminal.errors import ReachedBrokers
    from celery5.protocol.health.server_memory import ServerMemory
    from celery5.results.job_details import AppState

MAX_RESPONSE_BYTES = 1024 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")


class ProbeResponse(NamedTuple):
    """The answer of a status port."""

    # Of HTTP; 0 without an answer.
    status: int
    body: bytes = b""
    # Why there is no answer.
    why: str = ""

    @property
    def ok(self) -> bool:
        """Return whether all is well."""
        return self.status == 200


def send_probe(host: str, port: int, path: str, *, timeout: float = 5.0) -> ProbeResponse:
    """Send a GET request to a status port, with plain sockets. Errors are part of the response, never raised."""
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            name = f"[{host}]" if ":" in host else host
            request = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode("ascii"))
            return _parse_response(_receive_all(connection, deadline))
    except TimeoutError:
        return ProbeResponse(0, why=f"{host}:{port} did not answer within {timeout:g} s")
    except (OSError, ValueError) as error:
        return ProbeResponse(0, why=f"{host}:{port}: {getattr(error, 'strerror', None) or error}")


def _receive_all(connection: socket.socket, deadline: float) -> bytes:
    """Receive until the server closes the connection. Raises TimeoutError at the deadline, ValueError for too much."""
    data = bytearray()
    while len(data) <= MAX_RESPONSE_BYTES:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        chunk = connection.recv(65536)
        if not chunk:
            return bytes(data)
        data += chunk
    raise ValueError(f"the answer is larger than {MAX_RESPONSE_BYTES} bytes")


def _parse_response(data: bytes) -> ProbeResponse:
    head, _, body = data.partition(b"\r\n\r\n")
    match = _STATUS.fullmatch(head.split(b"\r\n")[0])
    if match is None:
        return ProbeResponse(0, why="what answers there does not speak HTTP")
    return ProbeResponse(int(match[1]), body)


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    envvar="CELERY5_STATUS_PORT",
    show_envvar=True,
    metavar="N",
    help="The worker's --status-port.",
)
@click.option(
    "--host",
    envvar="CELERY5_STATUS_HOST",
    show_envvar=True,
    default="127.0.0.1",
    show_default=True,
    help="Where it listens.",
)
@click.option("--url", help="The same in one: http://127.0.0.1:9500.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Ask this many worker processes, at this port and those after it: all must do well.",
)
@click.option("--live", is_flag=True, help="Ask whether it lives, not whether it is ready for work.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.01, 3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an answer may take.",
)
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def health(
    target: Target,
    port: int | None,
    host: str,
    url: str | None,
    *,
    processes: int,
    live: bool,
    timeout: float,
    wants_json: bool,
) -> int:
    """Say whether workers do well; exit with 0 if they do, with 1 if not.

    With a port this probes the worker itself. Without one it reads from Redis which workers of the application live.
    """
    if url is not None:
        host, port = _parse_url(url)
    if port is None:
        return _check_by_redis(target, wants_json=wants_json)
    path = "/livez" if live else "/readyz"
    last_port = port + processes - 1
    if last_port > 65535:
        raise Misconfigured(
            f"--processes {processes}: there are no so many ports from {port} on; 65535 is the last"
        )
    answers = {
        number: send_probe(host, number, path, timeout=timeout) for number in range(port, last_port + 1)
    }
    if wants_json:
        reports = [_to_json_fields(f"{host}:{number}", answer) for number, answer in answers.items()]
        echo(json.dumps({"ok": all(answer.ok for answer in answers.values()), "processes": reports}))
    else:
        for number, answer in answers.items():
            echo(f"{host}:{number} {to_one_line(_describe(answer, live=live))}")
    return 0 if all(answer.ok for answer in answers.values()) else EXIT_FAILED


def _parse_url(url: str) -> tuple[str, int]:
    """Return host and port of a URL. Raises Misconfigured."""
    # Not needed for `--port`: a probe imports as little as possible.
    from celery5.protocol.text_values import HOST_AND_PORT

    try:
        host, port = HOST_AND_PORT.parse(url.removeprefix("http://").rstrip("/"))
    except Misconfigured:
        raise Misconfigured(f"--url {url!r}: give http://HOST:PORT") from None
    if not url.startswith("http://") or not port or "/" in host:
        raise Misconfigured(f"--url {url!r}: give http://HOST:PORT; --live chooses what is asked")
    return host, port


def _read_report(answer: ProbeResponse) -> dict[str, Any]:
    try:
        report: object = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", report) if isinstance(report, dict) else {}


def _to_json_fields(where: str, answer: ProbeResponse) -> dict[str, Any]:
    why = {"why": answer.why} if answer.why else {}
    return {"where": where, "status": answer.status, **_read_report(answer), "ok": answer.ok, **why}


def _describe(answer: ProbeResponse, *, live: bool) -> str:
    """Return in one line that the worker is well, or what is wrong."""
    condition = "alive" if live else "ready"
    report = _read_report(answer)
    if answer.ok:
        return f"{report.get('worker') or 'the worker'} is {condition}"
    raw_conditions = report.get("conditions")
    conditions = cast("dict[str, Any]", raw_conditions) if isinstance(raw_conditions, dict) else {}
    problems = [f"{name}: {why}" for name, why in conditions.items() if why]
    reasons = "; ".join(problems) or answer.why or report.get("error") or f"it answers with {answer.status}"
    return collapse_whitespace(f"is not {condition}: {reasons}")


def _check_by_redis(target: Target, *, wants_json: bool) -> int:
    if not (target.name or target.app_name):
        raise Misconfigured(
            "whose health? write celery5 health --port N for a worker with a --status-port, "
            "or celery5 -A module[:app] health for all that Redis knows of"
        )
    from celery5.cli.terminal.errors import skip_unreachable

    app = target.load()
    with skip_unreachable(app, wants_json=wants_json) as reached:
        full = [memory for memory in app.metrics.memory() if memory.is_full]
        return _report_workers(app.info(), reached, full, wants_json=wants_json)


def _report_workers(
    state: "AppState", reached: "ReachedBrokers", full: "Sequence[ServerMemory]", *, wants_json: bool
) -> int:
    # Not needed by a probe with a port, which imports as little as possible.
    from celery5.cli.terminal.output import as_called, to_json
    from celery5.protocol.process.missing import list_missing_lines

    workers = {worker.name: worker.alive for queue in state.queues.values() for worker in queue.workers}
    other_processes = {"routers": state.routers, "schedulers": state.schedulers}
    ok = any(workers.values()) and not (reached.errors or state.missing or full)
    if wants_json:
        problems = {
            "missing": state.missing,
            "unreachable": reached.unreachable(),
            "full": {memory.broker: memory.describe() for memory in full},
        }
        echo(to_json({"ok": ok, "workers": workers, **other_processes, **problems}))
    else:
        for memory in full:
            echo(f"broker {to_one_line(memory.broker)} refuses writes: its memory is {memory.describe()}")
        for name, alive in sorted(workers.items()):
            echo(f"{to_one_line(name)} {'is alive' if alive else 'is gone: its lease has lapsed'}")
        for line in list_missing_lines(state.missing, state.further_missing, time.time()):
            echo(as_called(to_one_line(line)))
        if not any(workers.values()):
            others = "; ".join(
                f"{kind}: {', '.join(names)}" for kind, names in other_processes.items() if names
            )
            echo(
                f"no worker of {state.app} is alive"
                + (f"; others are: {to_one_line(others)}" if others else "")
            )
    return 0 if ok else EXIT_FAILED
