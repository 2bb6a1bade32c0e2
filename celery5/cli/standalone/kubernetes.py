"""Print the manifests with which an application runs on Kubernetes (`kubernetes`)."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import celery5
from celery5.cli.terminal.output import CommandGroup, echo
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured
from celery5.extras import describe_installation

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.protocol.cluster.description import Cluster
    from celery5.protocol.cluster.manifests import KubernetesOptions, Scaler
    from celery5.protocol.cluster.pods import Manifest


@click.group(cls=CommandGroup, no_args_is_help=False)
def kubernetes() -> None:
    """Manifests for Kubernetes: to run the application's processes there."""


@kubernetes.command()
@click.option(
    "--image", metavar="NAME", required=True, help="The image with the application and celery5 in it."
)
@click.option(
    "--cluster",
    "file",
    metavar="FILE",
    default="",
    help="The cluster description; default: cluster.toml here, else one worker.",
)
@click.option(
    "--controller",
    is_flag=True,
    help="Run a Controller, which makes the members; else Kubernetes keeps them.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["yaml", "kustomize", "helm"]),
    default="yaml",
    show_default=True,
    help="One stream of YAML, a base for kustomize, or a chart.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where kustomize's or Helm's files are written.",
)
@click.option("--namespace", metavar="NAME", default="default", show_default=True)
@click.option(
    "--broker-secret",
    metavar="NAME",
    default="celery5-broker",
    show_default=True,
    help="A Secret with the broker's URL in `url`.",
)
@click.option("--keys-secret", metavar="NAME", default="", help="A Secret with `mine.pem` and `trusted.pem`.")
@click.option(
    "--scale",
    "scaler",
    type=click.Choice(["keda", "cpu"]),
    help="Scale workers by KEDA, as the setting autoscale says, or by their use of the CPU.",
)
@click.option(
    "--maximum",
    type=click.IntRange(1),
    metavar="N",
    help="The most workers; default: those of the setting autoscale.",
)
@click.option(
    "--dashboard-secret", metavar="NAME", default="", help="Run the dashboard, with `tokens` of this Secret."
)
@click.option("--monitoring", is_flag=True, help="Add a ServiceMonitor and rules for Prometheus' operator.")
@click.pass_obj
def manifests(
    target: Target,
    /,
    *,
    image: str,
    file: str,
    controller: bool,
    form: str,
    output: Path | None,
    namespace: str,
    broker_secret: str,
    keys_secret: str,
    scaler: "Scaler | None",
    maximum: int | None,
    dashboard_secret: str,
    monitoring: bool,
) -> None:
    """Print manifests for the application: names, queues and limits are its own.

    Pipe them into kubectl apply -f -, or write a kustomize base or a Helm chart to a folder. No broker is asked.
    """
    from celery5.processes.controller import ClusterOptions, load_cluster
    from celery5.processes.worker import WorkerOptions, list_queues
    from celery5.protocol.cluster.manifests import KubernetesOptions

    app = target.load(needs_code=True)
    cluster = load_cluster(app, ClusterOptions(target.name, file))
    if (form == "yaml") == (output is not None):
        raise Misconfigured(
            f"--as {form}: " + ("needs --output FOLDER" if output is None else "takes no --output")
        )
    minimum, most = _get_limits(app, scaler, maximum)
    options = KubernetesOptions(
        target=target.name,
        name=app.name,
        image=image,
        queues=list_queues(app, WorkerOptions()),
        namespace=namespace,
        broker=broker_secret,
        keys=keys_secret,
        scaler=scaler or "",
        minimum=minimum,
        maximum=most,
        dashboard=dashboard_secret,
        rules=_read_rules() if monitoring else (),
    )
    made = _make(cluster, _read_description(file) if controller else None, options)
    if output is None:
        echo(_to_yaml(made), nl=False)
    else:
        _write(output, form, made, options)


def _get_limits(app: "App", scaler: "Scaler | None", maximum: int | None) -> tuple[int, int]:
    """Return the fewest and the most workers. Raises Misconfigured."""
    from celery5.config.scaling import get_autoscale

    autoscale = get_autoscale(app.settings)
    if scaler == "keda" and autoscale is None:
        raise Misconfigured(
            "--scale keda needs the setting autoscale, by which a Scheduler decides: autoscale = "
            "'minimum=0 maximum=10'"
        )
    if scaler == "cpu" and maximum is None and autoscale is None:
        raise Misconfigured("--scale cpu: give --maximum N, or the setting autoscale")
    if scaler is None and maximum is not None:
        raise Misconfigured("--maximum: nothing is scaled without --scale")
    most = maximum if maximum is not None else autoscale.maximum if autoscale is not None else 1
    return min(autoscale.minimum if autoscale is not None else 1, most), most


def _read_description(file: str) -> str:
    """Return the text of the description for a Controller. Raises Misconfigured."""
    from celery5.processes.controller import DEFAULT_FILE

    path = Path(file or DEFAULT_FILE)
    if not path.exists():
        return 'platform = "kubernetes"\n[schedulers.default]\n[workers.default]\n'
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"cluster description {path}: {error}") from None
    return text


def _make(cluster: "Cluster", description: str | None, options: "KubernetesOptions") -> "list[Manifest]":
    """Return the manifests. Raises Misconfigured."""
    from celery5.protocol.cluster.description import Cluster
    from celery5.protocol.cluster.manifests import find_omissions, make_controller_manifests, make_manifests

    if description is not None:
        if options.scaler:
            raise Misconfigured(
                "--scale: a Controller scales its members itself, as the setting autoscale says"
            )
        if description and cluster.platform not in ("kubernetes", Cluster().platform):
            raise Misconfigured(
                f'platform is {cluster.platform!r} in the description: write platform = "kubernetes"'
            )
        if cluster.broker is not None or cluster.hosts:
            raise Misconfigured(
                "[broker] and [hosts] are for Controllers outside of Kubernetes: leave them out"
            )
        if not re.search(r"^\s*platform\s*=", description, re.MULTILINE):
            description = f'platform = "kubernetes"\n{description}'
        return make_controller_manifests(cluster, description, options)
    for line in find_omissions(cluster, options):
        echo(f"Warning: {line}", err=True)
    if options.scaler == "keda" and not any(group.kind == "scheduler" for group in cluster.groups):
        raise Misconfigured(
            "--scale keda: a Scheduler decides how many workers there are: add [schedulers.default]"
        )
    return make_manifests(cluster, options)


def _read_rules() -> "Sequence[Mapping[str, Any]]":
    try:
        import yaml
    except ImportError:
        raise _make_missing_error() from None
    text = (files("celery5.observability") / "monitoring" / "celery5-rules.yml").read_text(encoding="utf-8")
    return cast("Sequence[Mapping[str, Any]]", yaml.safe_load(text)["groups"])


def _write(folder: Path, form: str, made: "list[Manifest]", options: "KubernetesOptions") -> None:
    """Write the files of a kustomize base or a chart. Raises Misconfigured."""
    from celery5.protocol.cluster.manifests import make_chart, make_kustomize_base

    is_chart = form == "helm"
    by_name = (
        make_chart(made, options, celery5.__version__)
        if is_chart
        else make_kustomize_base(made, options.namespace)
    )
    try:
        for name, manifest in by_name.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(_to_yaml([manifest]), encoding="utf-8")
            echo(str(folder / name))
    except OSError as error:
        raise Misconfigured(f"{folder}: the manifests cannot be written there: {error.strerror}") from None


def _to_yaml(made: "Sequence[Manifest]") -> str:
    """Return manifests as YAML. Raises Misconfigured without the extra."""
    try:
        import yaml
    except ImportError:
        raise _make_missing_error() from None
    from celery5.protocol.cluster.manifests import Expression

    class Dumper(yaml.SafeDumper):
        """Writes expressions of Helm as they are, and no references to what stands twice."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    expressions: list[str] = []

    def represent(_: yaml.SafeDumper, expression: Expression) -> yaml.ScalarNode:
        expressions.append(expression)
        return yaml.ScalarNode("tag:yaml.org,2002:int", f"{_MARK}{len(expressions) - 1}_")

    Dumper.add_representer(Expression, represent)
    stream = io.StringIO()
    library: Any = yaml
    library.dump_all(made, stream, Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return re.sub(
        rf"!!int '{_MARK}(\d+)_'|{_MARK}(\d+)_",
        lambda found: expressions[int(found[1] or found[2])],
        stream.getvalue(),
    )


_MARK = "celery5_expression_"


def _make_missing_error() -> Misconfigured:
    return Misconfigured(f"manifests need more packages: {describe_installation('kubernetes')}")
