"""Print the rules and the dashboard for Prometheus and Grafana (`metrics`)."""

from importlib.resources import files

import click

from celery5.cli.terminal.output import echo


@click.group(no_args_is_help=False)
def metrics() -> None:
    """Rules for Prometheus and a dashboard for Grafana."""


@metrics.command()
def rules() -> None:
    """Print recording rules and alerts for Prometheus, as YAML."""
    echo(_read("celery5-rules.yml"), nl=False)


@metrics.command()
def dashboard() -> None:
    """Print a dashboard for Grafana, as JSON to import. It needs the rules."""
    echo(_read("celery5-dashboard.json"), nl=False)


def _read(name: str) -> str:
    return (files("celery5.observability") / "monitoring" / name).read_text(encoding="utf-8")
