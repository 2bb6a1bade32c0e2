"""Call the API of Kubernetes: by its service account in a pod, or by a kubeconfig outside of the cluster.

Every request has a time limit and is tried again, as the API asks for it: all that a Controller sends may be repeated.
"""

import base64
import json
import os
import random
import ssl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio
import yaml

from celery5.errors import PlatformError
from celery5.protocol.job.retry_policy import full_jitter

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, the namespace and the authority of the API's certificate."""
REQUEST_TIMEOUT = 10.0
"""Seconds that one attempt may take."""
STATUS_TIMEOUT = 2.0
"""Seconds in which a process must report its status."""
ATTEMPTS = 5
"""Attempts of one request."""
MAX_DELAY = 5.0
"""The most seconds between two attempts, also when the API asks for more."""
WATCH_SECONDS = 50
"""Seconds after which the API ends a watch, which then goes on from where it was."""
WATCH_MARGIN = 10.0
"""Seconds without a byte, beyond those of the watch, after which the connection counts as broken."""
RETRIED = frozenset({429, 500, 502, 503, 504})
"""Statuses that pass."""
MERGE_PATCH = "application/merge-patch+json"


class KubernetesRefused(PlatformError):
    """The API of Kubernetes refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesUnreachable(PlatformError):
    """The API of Kubernetes does not answer, or cannot at present."""


class WatchExpired(Exception):
    """The API has forgotten the changes since the version that a watch began with: everything is to be listed again."""


class ClusterAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How the API is reached, and as who."""

    server: str
    namespace: str = "default"
    token: str = ""
    # Read at each request: Kubernetes replaces it every hour.
    token_file: str = ""
    # PEM; "" for the authorities of the system.
    authority: str = ""
    # A client certificate and its key, PEM.
    certificate: str = ""

    def make_tls(self) -> ssl.SSLContext:
        """Return the context for connections. Raises PlatformError."""
        try:
            context = ssl.create_default_context(cadata=self.authority or None)
            if self.certificate:
                with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads files only
                    file.write(self.certificate)
                    file.flush()
                    context.load_cert_chain(file.name)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise PlatformError(f"Kubernetes: a certificate of the access cannot be read: {error}") from None
        return context

    def read_token(self) -> str:
        """Return the token to use now. Raises PlatformError."""
        if not self.token_file:
            return self.token
        try:
            return Path(self.token_file).read_text().strip()
        except OSError as error:
            raise KubernetesUnreachable(
                f"Kubernetes: the token {self.token_file}: {error.strerror}"
            ) from None


def find_access(environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """Return the access of this process. Raises PlatformError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        if host and not environ.get("KUBECONFIG"):
            return ClusterAccess(
                server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
                namespace=(account / "namespace").read_text().strip(),
                token_file=str(account / "token"),
                authority=(account / "ca.crt").read_text(),
            )
        home = Path(environ.get("HOME", "/"))
        file = Path(environ.get("KUBECONFIG", "").partition(os.pathsep)[0] or home / ".kube" / "config")
        return read_kubeconfig(file)
    except OSError as error:
        raise PlatformError(
            f"Kubernetes: no access: {error.filename}: {error.strerror}; run the Controller in a pod with a service "
            "account, or set KUBECONFIG"
        ) from None


def read_kubeconfig(file: Path) -> ClusterAccess:
    """Return the access of a kubeconfig's current context. Raises PlatformError, OSError."""
    try:
        config = yaml.safe_load(file.read_text())
        named = {
            section: {entry["name"]: entry[section.removesuffix("s")] for entry in config.get(section) or ()}
            for section in ("contexts", "clusters", "users")
        }
        context = named["contexts"][config["current-context"]]
        cluster, user = named["clusters"][context["cluster"]], named["users"].get(context.get("user"), {})
        if "exec" in user or "auth-provider" in user:
            raise PlatformError(
                f"Kubernetes: {file}: its user signs in by a program, which is not supported: use a service account's "
                "token"
            )

        def read_pem(entry: Mapping[str, str], key: str) -> str:
            if data := entry.get(f"{key}-data"):
                return base64.b64decode(data).decode()
            return (file.parent / entry[key]).read_text() if entry.get(key) else ""

        return ClusterAccess(
            server=cluster["server"].rstrip("/"),
            namespace=context.get("namespace", "default"),
            token=user.get("token", ""),
            token_file=str(file.parent / user["tokenFile"]) if user.get("tokenFile") else "",
            authority=read_pem(cluster, "certificate-authority"),
            certificate="\n".join(
                filter(None, (read_pem(user, "client-certificate"), read_pem(user, "client-key")))
            ),
        )
    except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise PlatformError(f"Kubernetes: {file} is no kubeconfig: {why}") from None


class KubernetesApi:
    """Calls the API with one pool of connections, within one namespace."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._client = httpx.AsyncClient(
            base_url=access.server,
            verify=access.make_tls() if access.server.startswith("https:") else False,
            timeout=REQUEST_TIMEOUT,
            trust_env=False,  # the API is asked directly, never by a proxy
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def call(
        self,
        method: str,
        resource: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Return the answer to a request about a `resource` of the namespace, such as `apps/v1/deployments/NAME`.

        Raises:
            KubernetesRefused: the API refuses it.
            KubernetesUnreachable: all attempts have failed.
        """
        content = None if body is None else json.dumps(body).encode()
        problem = ""
        for attempt in range(1, ATTEMPTS + 1):
            delay = full_jitter(attempt, start=0.1, cap=MAX_DELAY, random=random.random)
            try:
                response = await self._client.request(
                    method,
                    self._get_path(resource),
                    params=dict(query or {}),
                    content=content,
                    headers=self._make_headers({"Content-Type": content_type} if content else {}),
                )
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if response.is_success:
                    return _decode(response)
                problem = _read_message(response)
                # A token that has just been replaced is read again at the next attempt.
                if response.status_code not in RETRIED and (response.status_code != 401 or attempt > 1):
                    raise KubernetesRefused(response.status_code, f"Kubernetes refuses: {problem}")
                delay = min(max(delay, _read_retry_after(response)), MAX_DELAY)
            if attempt < ATTEMPTS:
                await trio.sleep(delay)
        raise KubernetesUnreachable(f"Kubernetes at {self._access.server} does not answer: {problem}")

    async def read_status(self, url: str) -> str:
        """Return the status that a process reports of itself at its readiness probe; "" if it does not answer."""
        try:
            response = await self._client.get(url, timeout=STATUS_TIMEOUT)
            return str(dict(response.json()).get("status", ""))
        except (httpx.HTTPError, ValueError, TypeError):
            return ""

    async def watch(
        self, resource: str, *, selector: str, version: str, on_event: Callable[[str, dict[str, Any]], None]
    ) -> str:
        """Call `on_event` with each change since `version`, until the API ends this watch; return the last version.

        Raises:
            WatchExpired: the changes since then are forgotten.
            KubernetesRefused: the API refuses it.
            KubernetesUnreachable: the connection was lost.
        """
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = httpx.Timeout(REQUEST_TIMEOUT, read=WATCH_SECONDS + WATCH_MARGIN)
        request = self._client.build_request(
            "GET", self._get_path(resource), params=query, headers=self._make_headers({}), timeout=timeout
        )
        failure: Exception | None = None
        try:
            response = await self._client.send(request, stream=True)
            try:
                if not response.is_success:
                    await response.aread()
                    raise _make_watch_error(response.status_code, _read_message(response))
                with trio.CancelScope() as scope:
                    async for line in response.aiter_lines():
                        try:
                            version = _handle_line(line, on_event)
                        except Exception as error:
                            # Only what is cancelled while it reads leaves none of httpx's generators open.
                            failure = error
                            scope.cancel()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await response.aclose()
            if failure is not None:
                raise failure
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise KubernetesUnreachable(
                f"Kubernetes at {self._access.server}: a watch was cut off: {type(error).__name__}: {error}".rstrip(
                    ": "
                )
            ) from None
        return version

    def _get_path(self, resource: str) -> str:
        group, size = ("/api", 1) if resource.startswith("v1/") else ("/apis", 2)
        words = resource.split("/")
        return "/".join((group, *words[:size], "namespaces", self._access.namespace, *words[size:]))

    def _make_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        token = self._access.read_token()
        return {
            **headers,
            "Accept": "application/json",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }


def _handle_line(line: str, on_event: Callable[[str, dict[str, Any]], None]) -> str:
    """Pass on one event of a watch, and return the version of its object. Raises an error of `watch`."""
    event = json.loads(line)
    change = event["object"]
    if event["type"] == "ERROR":
        raise _make_watch_error(change.get("code", 500), change.get("message", "the watch has failed"))
    on_event(event["type"], change)
    return str(change["metadata"]["resourceVersion"])


def _make_watch_error(status: int, message: str) -> Exception:
    if status == 410:
        return WatchExpired(message)
    if status in RETRIED or status == 401:
        return KubernetesUnreachable(f"Kubernetes cannot watch: {message}")
    return KubernetesRefused(status, f"Kubernetes refuses to watch: {message}")


def _decode(response: httpx.Response) -> dict[str, Any]:
    try:
        return dict(response.json())
    except (ValueError, TypeError) as error:
        raise KubernetesUnreachable(f"Kubernetes answers no JSON: {error}") from None


def _read_message(response: httpx.Response) -> str:
    try:
        message = str(response.json()["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text
    return " ".join(f"{response.status_code} {message}".split())[:300]


def _read_retry_after(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() and len(value) < 6 else 0.0
