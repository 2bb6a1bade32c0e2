"""An API server of Kubernetes for tests, on real connections, with what runs behind it: Deployments and one node.

It is written after the API's documentation, since no real node can run where these tests do. It keeps objects with
versions, and refuses stale ones; it watches, forgets old changes, checks each object against the schemas of Kubernetes,
each token, and each request against a Role; and it can be slow, fail, or be cut off.
"""

import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import h11
import trio
from jsonschema import ValidationError

from tests.pure.cluster.kubernetes_schemas import check_manifest

Manifest = dict[str, Any]
KINDS = {"deployments": "Deployment", "pods": "Pod", "podtemplates": "PodTemplate"}
NAMESPACE = "shop"


class Refused(Exception):
    """A request that is answered with a Status."""

    def __init__(
        self, code: int, reason: str, message: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(code, reason)
        self.code, self.headers = code, dict(headers or {})
        self.body = {"kind": "Status", "code": code, "reason": reason, "message": message or reason}


class Kubernetes:
    """One namespace: its objects, the controller of Deployments, and a node."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.version = 100
        self.objects: dict[tuple[str, str], Manifest] = {}
        # The template of each pod.
        self.made_from: dict[str, Manifest] = {}
        # The changes that a watch can still be given: version, type, resource, object.
        self.history: list[tuple[int, str, str, Manifest]] = []
        self.forgotten = 0
        self.changed = trio.Event()
        self.token = "token-1"
        self.rules: Iterable[Manifest] | None = None
        # What is answered to the next requests instead: a Refused, or None to cut the connection.
        self.faults: deque[Refused | None] = deque()
        self.requests: list[tuple[str, str]] = []
        self.watches: set[trio.CancelScope] = set()
        # What a node does with a new pod.
        self.run_pod: Callable[[str], None] = lambda _name: None
        self.before_put: Callable[[str], None] = lambda _name: None
        self.port = 0
        self.is_up = True

    # objects

    def store(self, kind: str, resource: str, item: Manifest) -> None:
        """Keep an object in its next version, and tell the watches."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        key = (resource, item["metadata"]["name"])
        if kind == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = item
        self.history.append((self.version, kind, resource, deepcopy(item)))
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def create(self, resource: str, item: Manifest) -> Manifest:
        """Keep a new object."""
        name = item["metadata"]["name"]
        if (resource, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
        item = deepcopy(item)
        item["metadata"] |= {
            "namespace": NAMESPACE,
            "uid": f"uid-{self.version}",
            "creationTimestamp": f"2026-01-01T00:00:{self.version:06}Z",
        }
        self.store("ADDED", resource, item)
        return item

    def forget(self) -> None:
        """Forget old changes, as etcd does when it is compacted."""
        self.history.clear()
        self.forgotten = self.version

    def cut(self) -> None:
        """Break all watches."""
        for scope in tuple(self.watches):
            scope.cancel()

    def pods(self) -> list[Manifest]:
        return [item for (resource, _), item in self.objects.items() if resource == "pods"]

    def deployment(self, name: str) -> Manifest:
        return self.objects["deployments", name]

    # the controller of Deployments

    def reconcile(self, name: str) -> None:
        """Make the pods of a Deployment those that it asks for, by the strategy Recreate."""
        deployment = self.objects.get(("deployments", name))
        pods = [pod for pod in self.pods() if pod["metadata"]["labels"]["app.kubernetes.io/instance"] == name]
        template = deployment["spec"]["template"] if deployment else None
        wanted = deployment["spec"]["replicas"] if deployment else 0
        for pod in pods:
            if not wanted or self.made_from[pod["metadata"]["name"]] != template:
                self.remove_pod(pod["metadata"]["name"])
        active = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        old = [pod for pod in pods if self.made_from[pod["metadata"]["name"]] != template]
        if wanted and not active and not old and template is not None:
            created: Manifest = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**deepcopy(template["metadata"]), "name": f"{name}-{self.version:x}"},
                "spec": deepcopy(template["spec"]),
                "status": {"phase": "Pending"},
            }
            self.made_from[created["metadata"]["name"]] = deepcopy(template)
            self.create("pods", created)
            self.run_pod(created["metadata"]["name"])

    def remove_pod(self, name: str, grace: int | None = None) -> None:
        """Begin to remove a pod in order: its node sends SIGTERM, and SIGKILL after the grace period."""
        pod = self.objects["pods", name]
        if "deletionTimestamp" not in pod["metadata"] or grace is not None:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
            default = pod["spec"]["terminationGracePeriodSeconds"]
            pod["metadata"]["deletionGracePeriodSeconds"] = default if grace is None else grace
            self.store("MODIFIED", "pods", pod)

    # what a node reports

    def report(self, name: str, **status: Any) -> None:
        """Change the status of a pod."""
        pod = self.objects["pods", name]
        pod["status"] = {**pod["status"], **status}
        self.store("MODIFIED", "pods", pod)

    def report_ready(self, name: str, *, restarts: int = 0, ready: bool = True) -> None:
        """Report that the container of a pod runs."""
        status: Manifest = {"name": "celery5", "state": {"running": {}}, "restartCount": restarts}
        ready_condition = {"type": "Ready", "status": str(ready)}
        self.report(name, phase="Running", conditions=[ready_condition], containerStatuses=[status])

    def report_restart(self, name: str, code: int, restarts: int = 1) -> None:
        """Report that the process of a pod has ended by itself, and was started again."""
        ended = {"exitCode": code, "reason": "Error"}
        state = {"waiting": {"reason": "CrashLoopBackOff"}}
        status = {
            "name": "celery5",
            "restartCount": restarts,
            "lastState": {"terminated": ended},
            "state": state,
        }
        not_ready = {"type": "Ready", "status": "False"}
        self.report(name, conditions=[not_ready], containerStatuses=[status])

    def report_gone(self, name: str, code: int = 0) -> None:
        """Report that a pod has ended, and remove it."""
        ended = {"terminated": {"exitCode": code, "reason": "Completed"}}
        status = {"name": "celery5", "restartCount": 0, "state": ended}
        pod = self.objects["pods", name]
        phase = "Failed" if code else "Succeeded"
        pod["status"] = {**pod["status"], "phase": phase, "conditions": [], "containerStatuses": [status]}
        self.store("DELETED", "pods", pod)
        self.reconcile(pod["metadata"]["labels"]["app.kubernetes.io/instance"])

    # requests

    def answer(
        self, method: str, resource: str, name: str, query: Mapping[str, str], body: Manifest
    ) -> Manifest:
        """Return the object with which a request is answered. Raises Refused."""
        if method == "GET" and not name:
            wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
            items = [
                item
                for (kind, _), item in self.objects.items()
                if kind == resource and wanted.items() <= item["metadata"].get("labels", {}).items()
            ]
            return {"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items}
        if method == "POST":
            check_schema(body, KINDS[resource])
            item = self.create(resource, body)
            self.reconcile(item["metadata"]["name"])
            return item
        if (resource, name) not in self.objects:
            raise Refused(404, "NotFound", f'{resource} "{name}" not found')
        item = self.objects[resource, name]
        if method == "PUT":
            self.before_put(name)
            check_schema(body, KINDS[resource])
            self._check_version(item, body["metadata"].get("resourceVersion"))
            if body["spec"]["selector"] != item["spec"]["selector"]:
                raise Refused(422, "Invalid", "spec.selector: field is immutable")
            item = {**deepcopy(body), "metadata": {**item["metadata"], **body["metadata"]}}
            self.store("MODIFIED", resource, item)
            self.reconcile(name)
        elif method == "PATCH":
            item = merge(item, body)
            check_schema(item, KINDS[resource])
            self.store("MODIFIED", resource, item)
            self.reconcile(name)
        elif method == "DELETE":
            preconditions = body.get("preconditions", {})
            self._check_version(item, preconditions.get("resourceVersion"))
            if preconditions.get("uid", item["metadata"]["uid"]) != item["metadata"]["uid"]:
                raise Refused(409, "Conflict", "the uid differs")
            if resource == "pods":
                self.remove_pod(name, body.get("gracePeriodSeconds"))
            else:
                self.store("DELETED", resource, item)
                self.reconcile(name)
        return item

    @staticmethod
    def _check_version(item: Manifest, version: str | None) -> None:
        if version not in (None, item["metadata"]["resourceVersion"]):
            raise Refused(
                409,
                "Conflict",
                "the object has been modified; please apply your changes to the latest version",
            )

    def check_allowed(self, method: str, resource: str, name: str, query: Mapping[str, str]) -> None:
        """Raise Refused if the Role does not allow a request."""
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method)
        verb = verb or ("get" if name else "watch" if "watch" in query else "list")
        if self.rules is not None and not any(
            resource in rule["resources"] and verb in rule["verbs"] for rule in self.rules
        ):
            raise Refused(403, "Forbidden", f"cannot {verb} resource {resource}")

    # connections

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection."""
        connection = h11.Connection(h11.SERVER)
        with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
            async with stream:
                while True:
                    request, body = await read_request(stream, connection)
                    if request is None or not await self._respond(stream, connection, request, body):
                        return
                    connection.start_next_cycle()

    async def _respond(
        self, stream: trio.SocketStream, connection: h11.Connection, request: h11.Request, body: bytes
    ) -> bool:
        url = urlsplit(request.target.decode())
        method, query = request.method.decode(), dict(parse_qsl(url.query))
        before, _, rest = url.path.partition(f"/namespaces/{NAMESPACE}/")
        resource, _, name = rest.partition("/")
        assert before in ("/api/v1", "/apis/apps/v1"), url.path
        assert (before == "/apis/apps/v1") == (resource == "deployments"), url.path
        self.requests.append((method, rest + ("?watch" if "watch" in query else "")))
        try:
            if self.faults:
                fault = self.faults.popleft()
                if fault is None:
                    return False
                raise fault
            if not self.is_up:
                return False
            if dict(request.headers).get(b"authorization") != f"Bearer {self.token}".encode():
                raise Refused(401, "Unauthorized")
            self.check_allowed(method, resource, name, query)
            if "watch" in query:
                await self._watch(stream, connection, resource, query)
                return False
            answered = self.answer(method, resource, name, query, json.loads(body or b"{}"))
            status, headers = 201 if method == "POST" else 200, dict[str, str]()
        except Refused as refused:
            answered, status, headers = refused.body, refused.code, refused.headers
        data = json.dumps(answered).encode()
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(data))), *headers.items()]
        await send(stream, connection, h11.Response(status_code=status, headers=fields))
        await send(stream, connection, h11.Data(data=data), h11.EndOfMessage())
        return True

    async def _watch(
        self, stream: trio.SocketStream, connection: h11.Connection, resource: str, query: Mapping[str, str]
    ) -> None:
        version = int(query["resourceVersion"])
        headers = [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        await send(stream, connection, h11.Response(status_code=200, headers=headers))

        async def tell(kind: str, item: Manifest) -> None:
            line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
            await send(stream, connection, h11.Data(data=line))

        with trio.CancelScope() as scope, trio.move_on_after(int(query["timeoutSeconds"])):
            self.watches.add(scope)
            try:
                while True:
                    changed = self.changed
                    if version < self.forgotten:
                        await tell(
                            "ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"}
                        )
                        break
                    for at, kind, changed_resource, item in tuple(self.history):
                        if at > version and changed_resource == resource:
                            await tell(kind, item)
                            version = at
                    await changed.wait()
            finally:
                self.watches.discard(scope)
        if not scope.cancelled_caught:
            await send(stream, connection, h11.EndOfMessage())


async def read_request(
    stream: trio.SocketStream, connection: h11.Connection
) -> tuple[h11.Request | None, bytes]:
    """Return the next request and its body; None when there is none."""
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65536))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            return request, body


async def send(stream: trio.SocketStream, connection: h11.Connection, *events: Any) -> None:
    """Send these parts of an answer."""
    for event in events:
        data = cast("bytes | None", connection.send(event))
        if data:
            await stream.send_all(data)


def merge(item: Any, patch: Any) -> Any:
    """Return an object with a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    merged: Manifest = {**item} if isinstance(item, dict) else {}
    for key, value in cast("Manifest", patch).items():
        merged[key] = merge(merged.get(key), value)
    return {key: value for key, value in merged.items() if value is not None}


def check_schema(item: Manifest, kind: str) -> None:
    """Raise Refused unless the schemas of Kubernetes take an object, without any field that they do not know."""
    try:
        check_manifest(item)
    except ValidationError as error:
        raise Refused(422, "Invalid", error.message) from None
    if item["kind"] != kind:
        raise Refused(400, "BadRequest", f"{item['kind']} is no {kind}")


@asynccontextmanager
async def kubernetes() -> AsyncGenerator[Kubernetes]:
    """Run the API server."""
    async with trio.open_nursery() as nursery:
        cluster = Kubernetes(nursery)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        cluster.port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, cluster.serve, listeners)
        try:
            yield cluster
        finally:
            nursery.cancel_scope.cancel()


class Node:
    """Runs the containers of pods as processes of this machine.

    Args:
        environment: what each process has besides the variables of its container.
    """

    def __init__(self, cluster: Kubernetes, environment: Mapping[str, str], *, poll: float = 0.05) -> None:
        self.cluster, self.environment, self.poll = cluster, environment, poll
        self.processes: dict[str, trio.Process] = {}
        self.exits: dict[str, int] = {}
        cluster.run_pod = lambda name: cluster.nursery.start_soon(self.run, name)

    async def run(self, name: str) -> None:
        """Run one pod until it is gone: start its container again whenever that ends by itself."""
        restarts = 0
        while True:
            code = await self._run_container(name, restarts)
            if "deletionTimestamp" in self.cluster.objects["pods", name]["metadata"]:
                self.exits[name] = code
                self.cluster.report_gone(name, code)
                return
            restarts += 1
            self.cluster.report_restart(name, code, restarts)
            await trio.sleep(0.2)

    async def _run_container(self, name: str, restarts: int) -> int:
        (container,) = self.cluster.objects["pods", name]["spec"]["containers"]
        variables = {
            variable["name"]: variable["value"].replace("$$(", "$(")
            if "value" in variable
            else self.environment[variable["name"]]
            for variable in container["env"]
        }
        program, *words = container["command"]
        assert program == "celery5"
        command = [sys.executable, "-m", program, *(word.replace("$$", "$") for word in words)]
        with socket.create_server(("127.0.0.1", 0)) as free:  # here all pods have the same network
            port = str(free.getsockname()[1])
        command[command.index("--status-port") + 1] = port
        command[command.index("--status-host") + 1] = "127.0.0.1"
        self.cluster.report(name, podIP="127.0.0.1")
        self.cluster.objects["pods", name]["spec"]["containers"][0]["ports"] = [
            {"name": "status", "containerPort": int(port)}
        ]
        environment = {**os.environ, **self.environment, **variables}
        process = self.processes[name] = await trio.lowlevel.open_process(command, env=environment)
        try:
            await self._attend(name, process, int(port), restarts)
        finally:
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
        assert process.returncode is not None
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    async def _attend(self, name: str, process: trio.Process, port: int, restarts: int) -> None:
        """Probe a container, and end it when its pod is removed, until it has ended."""
        is_ready, kill_at = False, None
        while process.returncode is None:
            metadata = self.cluster.objects["pods", name]["metadata"]
            if "deletionTimestamp" in metadata:
                grace = metadata["deletionGracePeriodSeconds"]
                if kill_at is None:
                    process.send_signal(signal.SIGTERM)
                    kill_at = trio.current_time() + grace
                if trio.current_time() >= kill_at or grace == 1:
                    process.kill()
            ready = await _probe(port)
            if ready is not is_ready and process.returncode is None:
                is_ready = ready
                self.cluster.report_ready(name, restarts=restarts, ready=ready)
            with trio.move_on_after(self.poll):
                await process.wait()


async def _probe(port: int) -> bool:
    """Return whether /readyz answers with 200."""
    with suppress(OSError, trio.BrokenResourceError), trio.move_on_after(5):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return b" 200 " in await stream.receive_some(64)
    return False
