"""Write the manifests of a cluster description to stdout."""

import argparse
import json
import sys
from pathlib import Path

from celery5.errors import Misconfigured
from celery5.examples.kubernetes.manifests import Wishes, left_out, manifests
from celery5.protocol.cluster.description import parse_cluster


def main() -> int:
    """Write the manifests, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m celery5.examples.kubernetes",
        description="Kubernetes manifests of a cluster description.",
    )
    parser.add_argument("cluster", type=Path, help="the cluster description")
    parser.add_argument("--app", required=True, help="the application, as celery5 -A has it")
    parser.add_argument("--name", default="", help="what App(...) is called; default: the module")
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
    options["name"] = options["name"] or options["app"].partition(":")[0].rpartition(".")[2]
    wishes = Wishes(**options)
    for line in left_out(cluster, wishes):
        sys.stderr.write(f"Warning: {line}\n")
    sys.stdout.write(json.dumps(manifests(cluster, wishes), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
