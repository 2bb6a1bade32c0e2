"""Fennel names: what Fennel calls its functions, options, settings and commands, as of its own documentation and code.

Floor: tests. Reads: nothing. Writes: nothing.

Each of them has its line on the guide's page "From Fennel", in the section that it stands under here.
"""

from collections.abc import Mapping

BY_SECTION: Mapping[str, list[str]] = {
    "Application and tasks": [
        "App(name=",
        "@app.task",
        "name=",
        "retries=",
        "retries=n",
        "task.delay(",
        "task(*args)",
        "repr(task)",
        "repr(result)",
        "repr(app)",
        "autodiscover=",
        "interface=",
        "fennel.client",
        "fennel.client.aio",
    ],
    "Results": [
        "result.status()",
        "result.get(timeout=10)",
        "gather(results, task_timeout=10, return_exceptions=True)",
        "wait(results, timeout, return_when=",
        "result.uuid",
    ],
    "Dead letters": ["read_dead(", "batchsize=", "replay_dead(", "purge_dead(", "filter="],
    "Errors": [
        "FennelException",
        "TaskFailed(original_type, original_args)",
        "Timeout",
        "ResultsDisabled",
        "UnknownTask",
        "JobNotFound",
        "Chaos",
        "Completed",
    ],
    "Settings": [
        "redis_url",
        "interface",
        "processes",
        "concurrency",
        "default_retries",
        "retry_backoff",
        "read_timeout",
        "prefetch_count",
        "heartbeat_timeout",
        "heartbeat_interval",
        "schedule_interval",
        "maintenance_interval",
        "task_timeout",
        "grace_period",
        "results_enabled",
        "results_ttl",
        "log_format",
        "log_level",
        "autodiscover",
    ],
    "Command line": [
        "fennel worker -a",
        "-p 2",
        "-c 8",
        "fennel dlq -a shop:app read",
        "fennel dlq -a shop:app replay",
        "fennel dlq -a shop:app purge",
        "fennel info -a",
        "fennel task -a",
        "-u ID",
    ],
    "Workers": [
        "a parent and its executors",
        "on asyncio",
        "in a new thread",
        "an attempt is",
        "SIGTERM",
        "grace_period",
        "EXIT_COMPLETE",
        "heartbeats by the worker's clock",
        "jobs of a dead worker",
        "a worker taken for dead",
        "an unknown task",
        "an odd result",
        "a lost Redis",
    ],
    "Guarantees": [
        "at least once",
        "no order",
        "no job is lost by trimming",
        "results expire, dead jobs never",
        "a live worker that is taken for dead",
        "as durable as Redis",
    ],
    "In Redis": [
        "get_status",
        "get_job",
        "get_result",
        "count_jobs",
        "count_results",
        "get_messages",
        "get_stream",
        "get_groups",
        "get_info",
        "get_heartbeats",
        "get_schedule",
        "get_state",
        "Job(task, args, kwargs, tries, max_retries, exception, uuid)",
    ],
}
STATES = ["UNKNOWN", "SENT", "EXECUTING", "SUCCESS", "RETRY", "DEAD"]
"""Fennel's, in the section on states, which has no table."""
LOG = ["event", "timestamp", "level", "pid", "extra", "exception"]
"""The fields of its log lines, in the section on the log."""
