"""Applications whose alerts fire within a second, and what can be seen of them."""

import base64
import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from celery5 import App
from celery5.examples.webhooks.signature import Unsigned, key_of, verified
from celery5.observability import AlertCondition, AlertTransition
from celery5.observability.alerts import AlertState

QUICK: dict[str, Any] = {
    "metrics_interval": 0.1,
    "alert_oldest": 0,
    "alert_failures": 0,
    "alert_no_workers": 0,
    "alert_dead": 0,
    "alert_worker_deaths": 0,
    "alert_worker_lost": 0,
    "alert_member_missing": 0,
    "alert_undo": 0,
    "alert_stream_lag": 0,
    "alert_loop_lag": 0,
}
"""Settings by which rules are evaluated ten times a second, and none is built in."""


def declare(app: App, condition: AlertCondition, *, name: str = "tested", for_: float = 0.2) -> None:
    """Declare a rule that fires and resolves soon."""
    app.alert(name, condition, for_=for_, keep_firing_for=0.2)


async def get_statuses(app: App) -> dict[tuple[str, str], str]:
    """Return the status of each alert that is not inactive, by rule and subject."""
    states: list[AlertState] = await app.alerts.alist()
    return {(state.name, state.subject): state.status for state in states if state.status != "inactive"}


async def get_changes(app: App) -> list[tuple[str, str]]:
    """Return what has fired and resolved, the oldest first: the change and the subject."""
    history: list[AlertTransition] = await app.alerts.ahistory()
    return [(transition.change, transition.subject) for transition in reversed(history)]


SECRET = "whsec_" + base64.b64encode(b"a key of the tests, 32 bytes long").decode()
"""The secret of the webhook."""


@dataclass(frozen=True)
class Received:
    """A notification whose signature is right."""

    id: str
    body: dict[str, Any]

    @property
    def change(self) -> tuple[str, str]:
        """What has changed, and of which subject."""
        return self.body["type"], self.body["data"]["subject"]


class Receiver:
    """An HTTP server that verifies and keeps notifications, or misbehaves.

    Attributes:
        status: What it answers; 0: nothing, until `hung` is set.
        statuses: What it answers to notifications of a subject instead.
        attempts: How many notifications have come; `tried`: the subjects of all of them.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.attempts = 0
        self.forged = 0
        self.status = 200
        self.statuses: dict[str, int] = {}
        self.tried: list[str] = []
        self.hung = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.attempts += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                subject = json.loads(body)["data"]["subject"]
                receiver.tried.append(subject)
                status = receiver.statuses.get(subject, receiver.status)
                if status == 0:
                    receiver.hung.wait(30)
                    return
                if status == 200:
                    receiver.take({name.lower(): value for name, value in self.headers.items()}, body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the library
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def settings(self) -> dict[str, str]:
        """The settings of whoever sends notifications here."""
        url = f"http://127.0.0.1:{self._server.server_port}/alerts"
        return {"alert_webhook": url, "alert_webhook_secret": SECRET}

    def take(self, headers: dict[str, str], body: bytes) -> None:
        """Keep a notification whose signature is right."""
        try:
            name = verified(headers, body, [key_of(SECRET)], now=time.time())
        except Unsigned:
            self.forged += 1
        else:
            self.received.append(Received(name, json.loads(body)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hung.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
