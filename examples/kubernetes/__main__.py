"""Write the manifests of a cluster description to stdout."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from celery5 import App
from celery5.errors import Misconfigured
from celery5.examples.kubernetes.manifests import Wishes, left_out, manifests
from celery5.processes.worker import WorkerOptions, list_queues
from celery5.protocol.cluster.description import parse_cluster


def main() -> int:
    """Write the manifests, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m celery5.examples.kubernetes",
        description="Kubernetes manifests of a cluster description.",
    )
    parser.add_argument("cluster", type=Path, help="the cluster description")
    parser.add_argument("--app", required=True, help="the application, as celery5 -A has it")
    parser.add_argument(
        "--name", default="", help="what App(...) is called; default: what the application says"
    )
    parser.add_argument(
        "--queues",
        default="",
        help="A,B: those of workers without any; default: all that the application uses",
    )
    parser.add_argument("--image", required=True, help="the image with the application in it")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--broker", default="celery5-broker", help="the Secret with the broker's `url`")
    parser.add_argument("--keys", default="", help="a Secret with `mine.pem` and `trusted.pem`")
    parser.add_argument(
        "--most", type=int, default=0, help="workers of a group at most; default: as many as said"
    )
    parser.add_argument("--keda", default="", help="host:port of Redis, for KEDA to look at queues")
    options = vars(parser.parse_args())
    file: Path = options.pop("cluster")
    try:
        cluster = parse_cluster(file.read_bytes())
    except (OSError, Misconfigured) as error:
        sys.stderr.write(f"Error: cluster description {file}: {error}\n")
        return 1
    asked: str = options.pop("queues")
    try:
        name, queues = look_at_application(
            options["app"], options["name"], tuple(filter(None, asked.split(",")))
        )
    except Misconfigured as error:
        sys.stderr.write(f"Error: {error}; or give --name and --queues\n")
        return 1
    options["name"], options["queues"] = name, queues
    wishes = Wishes(**options)
    for line in left_out(cluster, wishes):
        sys.stderr.write(f"Warning: {line}\n")
    sys.stdout.write(json.dumps(manifests(cluster, wishes), indent=2) + "\n")
    return 0


def load_app(target: str) -> App:
    """Import the application `module` or `module:attribute` from this folder. Raises Misconfigured."""
    module_name, _, attribute = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise Misconfigured(f"application {target}: {error}") from error
    names = [attribute] if attribute else list(vars(module))
    found = [value for name in names if isinstance(value := getattr(module, name, None), App)]
    if not found:
        raise Misconfigured(f"application {target}: there is no App of this name")
    found[0].load()
    return found[0]


def look_at_application(target: str, name: str, queues: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the name of the application and the queues of its workers. It is imported unless both are given.

    Raises:
        Misconfigured: It cannot be imported here.
    """
    if name and queues:
        return name, queues
    app = load_app(target)
    return name or app.name, queues or list_queues(app, WorkerOptions())


if __name__ == "__main__":
    sys.exit(main())
