"""Suggest celery5's names for those of Celery, Fennel and Runnel: attributes, options, settings, modules and commands.

A value that begins with `nothing` says that celery5 has no such thing; a test checks that. A value that is one word
is the new name of the same thing. The tables are read when a name is missing, and by `celery5 migrate`. The guide's
pages "From Celery", "From Fennel" and "From Runnel" explain all of them; a test checks that each name is on its page.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from celery5.similar_names import did_you_mean

NameKind = Literal[
    "module",
    "task",
    "signature",
    "workflow",
    "result",
    "app",
    "control",
    "inspect",
    "option",
    "setting",
    "command",
    "stream",
    "stream option",
    "send option",
    "processor option",
    "failure action",
    "events",
    "signal",
    "task class",
    "request",
    "result option",
]

RESOURCE = (
    "what it kept is a Resource, a parameter such as client: Annotated[Client, Resource(open_client)] "
    "(celery5 docs django, Signals and base classes)"
)
"""What becomes of the attributes of a base class of tasks."""
ONE_AT_A_TIME = (
    'options(key="order-7") of the call: one unfinished job of each key, and a handle of the first one for the others; '
    "unique_for=60 of the task for the same arguments (celery5 docs idempotency)"
)
"""What becomes of celery_once and celery_singleton."""
_HANDLER = "(celery5 docs django, Signals and base classes, also for handlers that use the ORM)"

_BASE_CLASS = (
    "task or app.task, which make a task of a function; what a base class did is middleware "
    f"(App(middleware=[...])), on_failure= or a decorator below @app.task; {RESOURCE}"
)

_RUN_OPTIONS = (
    "which takes id, deadline, on_error and on_failure; countdown and queue are options of the tasks in it: "
    "task.options(countdown=5).s(...)"
)
"""The options of a run of a workflow, and the options of the tasks in it."""

_OF_A_RUN = (
    '; for a run of a workflow, which start() and app.workflows.find(id) return: run.status().state == "{}"'
)
"""The condition for a run of a workflow, whose status is an object."""

CELERY: Mapping[NameKind, Mapping[str, str]] = {
    "module": {
        "Celery": "App",
        "shared_task": "task",
        "signature": "task.s(...), or app.signature(name, ...)",
        "states": "JobState",
        "current_task": "current_job()",
        "current_app": "task.app, or your App: from shop import app",
        "maybe_signature": "task.s(...), or app.signature(name, ...)",
        "chunks": "task.chunks(items, n)",
        "crontab": 'cron("0 3 * * *"), or the line alone: @app.task(schedule="0 3 * * *")',
        "Ignore": 'Reject("why")',
        **dict.fromkeys(
            ("ResultSet", "GroupResult"), "a list of results, with gather and wait, or the run of a workflow"
        ),
        "allow_join_result": "nothing: a job can wait for another one, but should not",
        "bootsteps": "App(bootsteps=[BootStep(name, start)], services=[...])",
        "schedules": "cron, every, calendar and at: from celery5.scheduling import cron, calendar",
        "beat": "celery5 scheduler start, and from celery5 import cron, every",
        "signals": "middleware (App(middleware=[...])), and boot steps for workers (App(bootsteps=[...]))",
        "exceptions": "celery5.errors; the usual ones are in celery5 itself",
        "canvas": "celery5 itself: chain, group, chord, and task.map(...)",
        "utils": "nothing; get_task_logger is logging.getLogger(__name__)",
        "backends": "nothing: results are where the jobs are",
        "contrib": "celery5.contrib.django for Django; is_aborted() is trio.from_thread.check_cancelled()",
        "Task": _BASE_CLASS,
        "bin": "celery5.cli, and @app.command for a command of your own",
        "result": "celery5 itself: AsyncResult, gather and wait",
        "apps": "celery5 -A shop worker start and celery5 scheduler start",
        "worker": "celery5 -A shop worker start; in a program of your own celery5.testing.running_worker(app)",
        "concurrency": "cpu_slots, concurrency and box_slots of a worker: there are no pools",
        "loaders": "nothing: the settings are those of App, and in Django CELERY5",
        "fixups": "celery5.contrib.django, which is found by itself",
        "platforms": "nothing: systemd, a container or a Controller keeps processes",
        "security": "nothing: use TLS and a Redis user with a password; commands are signed (keys)",
        "local": "nothing: an internal of Celery",
        "Signature": "the call that task.s(...) returns",
        **dict.fromkeys(("xmap", "xstarmap"), "task.map(items), task.starmap(items)"),
        "subtask": "task.s(...), or app.signature(name, ...)",
        **dict.fromkeys(("EagerResult", "ResultBase"), "AsyncResult: from celery5 import AsyncResult"),
        "result_from_tuple": "app.result(id)",
        "bugreport": "celery5 doctor",
        "WorkerLostError": 'TaskFailed with the reason "poisoned"',
        "BackendError": "nothing: results are in Redis; while Redis is unreachable BrokerUnavailable is raised",
    },
    "signature": {
        "apply_async": "task.options(countdown=5).s(...), then delay() or app.send_many([...])",
        "apply": "task(...), which runs the function here",
        "set": "task.options(queue=...).s(...)",
        "link": "a | b, which passes the value of a to b",
        **dict.fromkeys(("clone", "replace"), "another signature: task.s(...), or task.options(...).s(...)"),
        "freeze": "task.options(id=...).s(...), which gives the job its id",
        "set_immutable": "a >> b, which passes no value to b",
        **dict.fromkeys(
            ("stamp", "stamp_links"), "an argument of the task, or job.headers in Middleware.sending"
        ),
        "partial": "task.s(...) without its first argument",
        "skew": "task.options(countdown=...).s(...) of each member",
        "group": "start() of the chunks: each of them is a job",
        **dict.fromkeys(("run", "apply_chunks"), "start()"),
        **dict.fromkeys(
            (
                "args",
                "kwargs",
                "options",
                "id",
                "name",
                "type",
                "immutable",
                "tasks",
                "body",
                "parent_id",
                "root_id",
                "subtask_type",
                "app",
            ),
            "a variable of your own: a signature or a workflow is to be sent, and not to be read or changed",
        ),
        "AsyncResult": "app.result(id)",
        "election": "nothing: a job has no elections",
        **dict.fromkeys(
            ("link_error", "on_error"),
            "task.options(on_failure=task).s(...), or start(on_failure=task) of a workflow; that task is called with a "
            "list of StepFailure",
        ),
    },
    "workflow": {
        "apply_async": f"start(), {_RUN_OPTIONS}",
        "delay": "start(), or await astart()",
        "apply": "start(), and get() of the run that it returns",
        "set": f"start(), {_RUN_OPTIONS}",
        "link": "a | b, which passes the value of a to b",
        **dict.fromkeys(
            ("link_error", "on_error"),
            "start(on_failure=task); that task is called with a list of StepFailure",
        ),
    },
    "task": {
        "apply_async": "task.options(countdown=5).delay(...)",
        **dict.fromkeys(("apply", "run"), "task(...), which runs the function here"),
        "retry": "raise Retry(countdown=5)",
        "request": "current_job()",
        "signature": "task.s(...)",
        "si": "task.s(...), and a >> b, which passes no value to b",
        "Task": "a function and @app.task; what a base class did is middleware (App(middleware=[...]))",
        "update_state": "progress(done, total, note)",
        "max_retries": "task.policy.max_retries",
        "backend": "nothing: results are where the jobs are; app.result(id) has them",
        "AsyncResult": "task.app.result(id, task=task)",
        "subtask": "task.s(...)",
        **dict.fromkeys(("replace", "add_to_chord"), "return the workflow, from a task with dynamic=True"),
        "send_event": "the log, or @app.event",
        "MaxRetriesExceededError": "TaskFailed, which get() raises",
        "OperationalError": "BrokerUnavailable: from celery5 import BrokerUnavailable",
        **dict.fromkeys(
            ("push_request", "pop_request", "request_stack"),
            "celery5.testing: in_memory(app), whose run() runs jobs, each of which is current_job()",
        ),
        "add_trail": "nothing: a job does not know its children",
    },
    "result": {
        "ready": "wait([result], timeout=0), or result.status()",
        "successful": f'result.status() == "SUCCESS"{_OF_A_RUN.format("SUCCESS")}',
        "failed": f'result.status() == "DEAD"{_OF_A_RUN.format("FAILED")}',
        "state": "result.status(); for a run of a workflow: run.status().state",
        "result": "result.get()",
        "traceback": "the traceback of the TaskFailed that get() raises",
        "task_id": "result.id",
        "collect": "result.get()",
        "info": "result.get(); the progress of a running job is result.progress()",
        "exists": 'result.status() != "UNKNOWN"',
        "children": "nothing: a job does not know its children; run.graph() shows those of a workflow",
        "parent": "nothing: a job does not know who sent it; run.graph() shows those of a workflow",
        "date_done": "app.find(result.id).finished",
        "name": "app.find(result.id).task",
        **dict.fromkeys(("save", "restore", "as_tuple", "as_list"), "result.id, and app.result(id)"),
        **dict.fromkeys(("completed_count", "waiting"), "wait(results, timeout=0), which returns both lists"),
        "args": "app.find(result.id).args, while the job is unfinished or dead",
        "kwargs": "app.find(result.id).kwargs, while the job is unfinished or dead",
        "worker": "app.find(result.id).worker",
        "retries": "app.find(result.id).attempt - 1",
        "wait": "result.get()",
        "TimeoutError": "ResultTimeout: from celery5 import ResultTimeout",
        "ignored": "ignore_result of the task",
        **dict.fromkeys(
            ("graph", "build_graph", "iterdeps", "get_leaf"),
            "run.graph() of a workflow; a job knows no other jobs",
        ),
        "results": "run.results() of a workflow, or a list of results",
        **dict.fromkeys(
            ("add", "update", "remove", "discard", "clear"), "a list of results, with gather and wait"
        ),
        "delete": "nothing: results expire",
        "revoke_by_stamped_headers": "revoke(results)",
        "then": "await result.aget()",
        **dict.fromkeys(
            ("join", "join_native", "iter_native", "maybe_throw", "maybe_reraise", "throw"),
            "result.get(), or gather(results)",
        ),
    },
    "app": {
        "conf": 'App("shop", concurrency=200), app.configure(...) and app.settings',
        "send_task": "app.signature(name, ...).delay()",
        "autodiscover_tasks": 'app.autodiscover(["shop"])',
        "config_from_object": 'App("shop", concurrency=200), or CELERY5_CONCURRENCY=200',
        "AsyncResult": "app.result(id)",
        "worker_main": "celery5 -A shop worker start",
        "add_periodic_task": "app.schedule(task.s(...), when), or @app.task(schedule=...)",
        "steps": "App(bootsteps=[BootStep(name, start)], services=[...])",
        "user_options": "@app.command for a command of your own",
        **dict.fromkeys(
            ("Worker", "WorkController", "start"),
            "celery5 -A shop worker start; in a program of your own celery5.testing.running_worker(app)",
        ),
        "Beat": "celery5 scheduler start",
        **dict.fromkeys(
            ("ResultSet", "GroupResult"), "a list of results, with gather and wait, or the run of a workflow"
        ),
        "bugreport": "celery5 doctor",
        "now": "datetime.now(UTC)",
        "timezone": "app.settings.timezone",
        "uses_utc_timezone": "nothing: datetimes carry their time zone",
        **dict.fromkeys(("current_task", "current_worker_task"), "current_job()"),
        "main": "app.name",
        **dict.fromkeys(("annotations", "add_defaults", "prepare_config"), "app.configure(...)"),
        "config_from_cmdline": "nothing: the commands have their own options",
        "config_from_envvar": "the variable CELERY5_CONFIG",
        "setup_security": "TLS, and a Redis user with a password",
        "register_task": "@app.task on a function: a class is no task",
        "gen_task_name": "name= of the task; without it module and function",
        "select_queues": "celery5 -A shop worker start --queues a,b",
        **dict.fromkeys(
            ("on_after_configure", "on_after_finalize", "on_configure", "on_init"),
            "the module itself: app.schedule(task.s(...), when), without a function",
        ),
        "Task": _BASE_CLASS,
        "on_after_fork": "a boot step (App(bootsteps=[BootStep(...)])): each worker process runs it",
        **dict.fromkeys(
            ("set_default", "set_current", "finalize"),
            "nothing: a task knows its application, and a worker is given it",
        ),
        **dict.fromkeys(
            (
                "connection",
                "connection_for_read",
                "connection_for_write",
                "pool",
                "amqp",
                "backend",
                "loader",
                "log",
                "broker_connection",
                "connection_or_acquire",
                "producer_or_acquire",
                "producer_pool",
                "default_connection",
                "default_producer",
            ),
            "nothing: internals of Celery; app.find(id) knows a job, app.queue(name) a queue",
        ),
    },
    "control": {
        "inspect": 'app.control.send("active"), app.control.send("stats"), and app.control.ping()',
        "broadcast": 'app.control.send("stats"), or another command',
        "revoke": "app.result(id).revoke(), or revoke(results)",
        "terminate": "app.result(id).revoke(), which stops what runs",
        "shutdown": 'app.control.send("shutdown")',
        **dict.fromkeys(
            ("purge", "discard_all"), 'app.empty("mail") for a queue, app.dlq.purge() for dead jobs'
        ),
        "pool_restart": 'app.control.send("reload"), when the configuration has changed; for new code start another '
        "worker, and stop the old one",
        "revoke_by_stamped_headers": "revoke(results)",
        "election": "nothing: workers need no leader",
        "heartbeat": "nothing: each worker renews its lease by itself",
        "rate_limit": 'app.limits.set("shop.add", "10/s")',
        "time_limit": "time_limit of the task, or of the configuration",
        "cancel_consumer": 'app.control.send("pause-queue", {"queue": "mail"})',
        "add_consumer": 'app.control.send("resume-queue", {"queue": "mail"})',
        "pool_grow": 'app.control.send("budget", {"kind": "thread", "maximum": 8})',
        "pool_shrink": 'app.control.send("budget", {"kind": "thread", "maximum": 2})',
        "autoscale": 'app.control.send("budget", {"kind": "thread", "minimum": 2, "maximum": 8})',
        "enable_events": "nothing: the log has a line for each job",
        "disable_events": "nothing: the log has a line for each job",
    },
    "inspect": {
        **dict.fromkeys(
            ("active", "stats"),
            'app.control.send("active"), app.control.send("stats"): one reply of each worker',
        ),
        **dict.fromkeys(("ping", "hello"), "app.control.ping()"),
        **dict.fromkeys(
            ("reserved", "active_queues", "memsample"),
            'app.control.send("stats"), which has held jobs, queues and memory',
        ),
        "scheduled": "app.find(id).state, which is SCHEDULED; celery5 queue list counts these jobs",
        **dict.fromkeys(("registered", "registered_tasks"), "app.tasks, or celery5 task list"),
        "revoked": "app.find(id).state; celery5 task search --state REVOKED lists them",
        "query_task": "app.find(id)",
        **dict.fromkeys(
            ("conf", "report"), "app.settings; celery5 doctor and celery5 config show on the command line"
        ),
        "clock": "nothing: workers have no logical clock",
        **dict.fromkeys(
            ("memdump", "objgraph"), "nothing: a profiler such as memray shows what takes memory"
        ),
    },
    "option": {
        "acks_late": "nothing: jobs are always acknowledged with their outcome",
        "reject_on_worker_lost": "nothing: a dead worker's jobs are always put back",
        "retry_kwargs": "max_retries and backoff",
        "retry_backoff_max": "cap",
        "retry_jitter": "jitter",
        "default_retry_delay": "backoff and cap, both the same, with jitter=False",
        "task_id": "id, or key: one live job of each",
        "serializer": "nothing: it is always JSON",
        "link": "a | b, which passes the value of a to b",
        "track_started": "nothing: EXECUTING is always known",
        "throws": 'dont_autoretry_for, or raise Reject("why") for what is no error',
        "send_events": "nothing: the log has a line for each job",
        "trail": "nothing: a job does not know its children",
        "store_errors_even_if_ignored": "nothing: a job that finally failed is in the dead-letter queue",
        "typing": "nothing: arguments are always checked, in the producer",
        "compression": "nothing: it is always JSON",
        **dict.fromkeys(
            ("acks_on_failure", "acks_on_timeout", "acks_on_failure_or_timeout", "retry_on_worker_lost"),
            "nothing: a job is acknowledged with its outcome, whatever that is",
        ),
        **dict.fromkeys(
            ("pydantic", "pydantic_strict", "pydantic_context", "pydantic_dump_kwargs"),
            "nothing: annotations are always checked, also those with pydantic's models",
        ),
        **dict.fromkeys(
            ("resultrepr_maxsize", "shadow_name", "shadow"), "nothing: the log has the task's own name"
        ),
        **dict.fromkeys(
            ("exchange", "routing_key", "delivery_mode"), "queue: any name is a queue, as durable as Redis"
        ),
        **dict.fromkeys(
            ("connection", "producer", "publisher", "add_to_parent"),
            "nothing: the application opens its few connections itself",
        ),
        **dict.fromkeys(
            ("reply_to", "correlation_id"), "job.headers in Middleware.sending, or an argument of the task"
        ),
        **dict.fromkeys(
            ("group_id", "group_index", "root_id", "parent_id"),
            "nothing: the id of a job of a workflow begins with that of its run",
        ),
        "immutable": "a >> b, which passes no value to b",
        **dict.fromkeys(("once", "unique_on", "raise_on_duplicate"), ONE_AT_A_TIME),
        "retry": "not needed: a lost connection is retried, and the backlog keeps jobs meanwhile",
        "headers": "job.headers in Middleware.sending, or an argument of the task",
        "link_error": "on_failure, which is called with a list of StepFailure, in place of the task's own",
        "base": "middleware (App(middleware=[...])), or a decorator below @app.task: a task is a function, not a class",
    },
    "setting": {
        "backend": "nothing: results are where the jobs are",
        "broker_url": "broker",
        "result_backend": "nothing: results are where the jobs are",
        **dict.fromkeys(
            ("broker_read_url", "broker_write_url", "broker_failover_strategy"),
            "broker: one URL; Sentinel and Cluster find the other servers",
        ),
        **dict.fromkeys(
            (
                "broker_host",
                "broker_port",
                "broker_user",
                "broker_password",
                "broker_vhost",
                "broker_transport",
                "broker_login_method",
            ),
            'the broker\'s URL: broker="redis://user:password@host:6379/0"',
        ),
        **dict.fromkeys(
            ("broker_native_delayed_delivery_queue_type", "worker_detect_quorum_queues"),
            "nothing: these are RabbitMQ's",
        ),
        "broker_channel_error_retry": "nothing: a lost connection is opened again, without end",
        "include": 'App("shop", include=["shop.**.tasks"])',
        "result_failure_expires": "nothing: dead jobs do not expire; celery5 dlq purge removes them",
        "task_default_queue_type": "nothing: a queue is a stream of Redis",
        "task_repr_maxlevels": "nothing: arguments are not logged",
        "task_allow_error_cb_on_chord_header": "nothing: on_failure= of the chord's run is called once",
        "worker_autoscaler": "budgets, and a strategy of your own (celery5 docs concurrency)",
        "worker_enable_soft_shutdown_on_idle": "nothing: grace_period always holds",
        "worker_deduplicate_successful_tasks": "nothing: a job ends once, always",
        **dict.fromkeys(
            ("worker_log_datefmt", "worker_task_log_datefmt"),
            "--log-format, and log_detectors for a format of your own",
        ),
        **dict.fromkeys(
            (
                "worker_agent",
                "worker_consumer",
                "worker_proc_alive_timeout",
                "worker_timer",
                "worker_timer_precision",
            ),
            "nothing: there is no pool",
        ),
        "worker_eta_task_limit": "nothing: jobs wait for their time in Redis",
        **dict.fromkeys(
            ("worker_enable_prefetch_count_reduction", "worker_disable_prefetch"), "nothing: it is learnt"
        ),
        "result_expires": "results_ttl",
        "task_default_queue": "default_queue",
        "task_ignore_result": "ignore_result",
        "task_time_limit": "time_limit",
        "task_soft_time_limit": "soft_time_limit",
        "worker_concurrency": "cpu_slots for a fixed number of threads for def tasks, concurrency for async def tasks; "
        "without cpu_slots a worker finds out how many threads its tasks can use",
        "worker_prefetch_multiplier": "nothing: it is learnt",
        "visibility_timeout": "nothing: there is none",
        "broker_transport_options": "nothing: there is no visibility timeout; Sentinel's master_name is in the URL",
        "beat_schedule": "schedules",
        "task_routes": 'queue_routes={"media.mail.*": "mail"}; the setting routes chooses a broker',
        "task_queues": "nothing to declare: any name is a queue; --queues says which of them a worker reads",
        "task_default_rate_limit": "rate_limit of a task",
        "task_default_priority": "priority of a task: high, normal or low",
        "task_serializer": "nothing: it is always JSON",
        "accept_content": "nothing: it is always JSON",
        "result_serializer": "nothing: it is always JSON",
        "imports": 'App("shop", include=["shop.**.tasks"])',
        "worker_max_tasks_per_child": "max_jobs",
        "worker_max_memory_per_child": "max_memory",
        "task_always_eager": "celery5.testing: in_memory(app) as jobs keeps what a test sends, and jobs.run() runs it "
        "without a server (celery5 docs testing)",
        "enable_utc": "timezone; datetimes carry their time zone",
        **dict.fromkeys(
            (
                "task_acks_late",
                "task_reject_on_worker_lost",
                "task_retry_on_worker_lost",
                "task_track_started",
            ),
            "nothing: jobs are always acknowledged with their outcome, and put back when a worker dies",
        ),
        **dict.fromkeys(
            ("task_acks_on_failure", "task_acks_on_timeout", "task_acks_on_failure_or_timeout"),
            "nothing: a job is acknowledged with its outcome, whatever that is",
        ),
        **dict.fromkeys(
            ("result_accept_content", "result_compression", "task_compression", "event_serializer"),
            "nothing: it is always JSON",
        ),
        "result_extended": "nothing: app.find(id) always has task, worker, attempt and times",
        "result_persistent": "nothing: results are as durable as Redis",
        "result_cache_max": "nothing: a program keeps no results",
        "result_backend_*": "nothing: an outcome is kept until Redis has it",
        "result_chord_*": "nothing: a join is counted, not polled, and expires with its run",
        "result_exchange*": "nothing: there is no AMQP",
        "broker_connection_*": "nothing: a lost connection is opened again, without end",
        "broker_pool_*": "nothing: a process has three connections",
        "broker_heartbeat*": "nothing: a silent connection is pinged",
        "broker_use_ssl": "the broker's URL: rediss://host:6380/0?ssl_ca_certs=/etc/ca.pem",
        "redis_backend_use_ssl": "the broker's URL: rediss://host:6380/0?ssl_ca_certs=/etc/ca.pem",
        "task_eager_propagates": "celery5.testing: run() of in_memory(app) and recorded(app) raises the error of a job "
        "that has failed",
        "task_store_eager_result": "celery5.testing: in_memory(app)",
        "task_publish_retry*": "nothing: a lost connection is retried, and the backlog keeps jobs meanwhile",
        "task_store_errors_even_if_ignored": "nothing: a job that finally failed is in the dead-letter queue",
        "task_remote_tracebacks": "nothing: an error has its traceback as text",
        "task_protocol": "nothing: there is one format, with a version in each message",
        "task_annotations": "options in the declaration of a task, and App(retry_policy=RetryPolicy(...)) for all",
        "task_inherit_parent_priority": "nothing: each task has its priority",
        "task_queue_max_priority": "nothing: there are three priorities",
        "task_create_missing_*": "nothing: any name is a queue",
        "task_default_exchange*": "nothing: a queue is a stream of Redis",
        "task_default_routing_key": "nothing: a queue is a stream of Redis",
        "task_default_delivery_mode": "nothing: a queue is a stream of Redis",
        "task_send_sent_event": "nothing: the log has a line for each job, and metrics count them",
        "worker_send_task_events": "nothing: the log has a line for each job, and metrics count them",
        "event_*": "nothing: the log has a line for each job, and metrics count them",
        "control_*": "nothing: an inbox that nobody reads expires",
        "worker_disable_rate_limits": "rate_limit of a task; celery5 task limit TASK none while workers run",
        "worker_hijack_root_logger": "nothing: logging that you have set up is left alone",
        "worker_redirect_stdouts*": "nothing: print goes to stdout",
        "worker_pool*": "nothing: there is no pool; boxed=True of a task is a process of its own",
        "worker_cancel_long_running_tasks_on_connection_loss": "nothing: jobs go on, and their outcomes are kept",
        "worker_lost_wait": "nothing: there is no pool",
        "worker_state_db": "nothing: revocations are in Redis",
        "worker_enable_remote_control": "inbox",
        "worker_direct": "celery5 worker run TASK --to NAME",
        "worker_soft_shutdown_timeout": "grace_period",
        "worker_log_format": "--log-format, and log_detectors for a format of your own",
        "worker_task_log_format": "--log-format, and log_detectors for a format of your own",
        "worker_log_color": "the variable NO_COLOR",
        "beat_scheduler": "nothing: schedules are in Redis: celery5 schedule list",
        "beat_*": "nothing: Schedulers share their schedules in Redis, without a leader",
        "redis_*": "nothing: results are where the jobs are",
        "database_*": "nothing: results are where the jobs are",
        "cache_*": "nothing: results are where the jobs are",
        "mongodb_*": "nothing: results are where the jobs are",
        "s3_*": "nothing: results are where the jobs are",
        **dict.fromkeys(
            (
                "arangodb_*",
                "azureblockblob_*",
                "cassandra_*",
                "cosmosdbsql_*",
                "couchbase_*",
                "elasticsearch_*",
                "gcs_*",
            ),
            "nothing: results are where the jobs are",
        ),
        **dict.fromkeys(("once", "singleton_*"), ONE_AT_A_TIME),
        "security_*": "nothing: use TLS and a Redis user with a password; commands are signed (keys)",
    },
    "command": {
        "beat": "celery5 scheduler start",
        "inspect": "celery5 worker active, celery5 worker stats, celery5 worker ping and celery5 worker list",
        "inspect ping": "celery5 worker ping",
        "inspect active": "celery5 worker active",
        "inspect stats": "celery5 worker stats",
        "inspect active_queues": "celery5 worker stats",
        "inspect reserved": "celery5 worker stats",
        "inspect scheduled": "celery5 queue list",
        "inspect query_task": "celery5 task show ID",
        "inspect registered": "celery5 task list",
        "inspect revoked": "celery5 task search --state REVOKED",
        "inspect memsample": "celery5 worker stats",
        "inspect conf": "celery5 config show",
        "inspect report": "celery5 doctor",
        "inspect clock": "nothing: workers have no logical clock",
        "inspect memdump": "nothing: a profiler such as memray shows what takes memory",
        "inspect objgraph": "nothing: a profiler such as memray shows what takes memory",
        "control": "celery5 worker, whose commands tell workers what to do",
        "control revoke": "celery5 task revoke ID",
        "control terminate": "celery5 task revoke ID",
        "control shutdown": "celery5 worker shutdown",
        "control rate_limit": "celery5 task limit TASK 10/s",
        "control cancel_consumer": "celery5 queue pause NAME",
        "control add_consumer": "celery5 queue resume NAME",
        "control pool_grow": "celery5 worker budget thread --maximum 8",
        "control pool_shrink": "celery5 worker budget thread --maximum 2",
        "control autoscale": "celery5 worker budget thread --minimum 2 --maximum 8",
        "control pool_restart": "celery5 worker reload",
        "control time_limit": "time_limit of the task, or of the configuration",
        "control enable_events": "the log, which has a line for each job",
        "control disable_events": "the log, which has a line for each job",
        "control heartbeat": "the lease that each worker renews by itself",
        "control election": "the lease of a leader, where there is one: workers need none",
        "control revoke_by_stamped_headers": "revoke(results) in Python",
        "purge": "celery5 queue purge QUEUE, and celery5 dlq purge, which removes dead jobs",
        "call": "celery5 task send TASK --args JSON, or celery5 worker run TASK --to NAME on one worker",
        "status": "celery5 worker list, celery5 info and celery5 controller status",
        "result": "celery5 task show ID",
        "shell": "python -i -c 'from shop import *'",
        "flower": "celery5 dashboard start and celery5 top, and /metrics for Prometheus",
        "events": "the log, which has a line for each job, and celery5 worker active",
        "multi": "celery5 worker start --processes 4, or celery5 controller start",
        "list": "celery5 queue list and celery5 worker list",
        "report": "celery5 doctor and celery5 config show",
        "logtool": "nothing: the log is JSON lines, which jq reads",
        "graph": "celery5 workflow graph ID; boot graphs are not drawn",
        "amqp": "nothing: there is no AMQP",
        "upgrade": "nothing: an old name of a setting is refused with the new one",
    },
    "signal": {
        "before_task_publish": "Middleware.sending: the block's beginning",
        "after_task_publish": "Middleware.sending: the block's end; batch.error when it failed",
        "task_received": "Middleware.received",
        "task_prerun": "Middleware.running: the block's beginning, or Middleware.calling in the thread of the job "
        f"{_HANDLER}",
        "task_postrun": "Middleware.running: the block's end, or Middleware.calling in the thread of the job "
        f"{_HANDLER}",
        "task_success": "Middleware.running: job.outcome is Succeeded() when the block ends",
        "task_failure": "Middleware.running: job.outcome is Dead(reason, error) when the block ends; it runs on the "
        f"event loop, so have it await a task's adelay(...) {_HANDLER}",
        "task_retry": "Middleware.running: job.outcome is Retrying(delay, error) when the block ends",
        "task_revoked": "Middleware.running: job.outcome is Revoked() when the block ends; Middleware.unstarted",
        "task_rejected": "Middleware.unstarted, with Dead and its reason",
        "task_unknown": "Middleware.unstarted, with Dead and its reason",
        "task_internal_error": "nothing: what middleware raises is logged and changes no job",
        "worker_init": "a boot step (App(bootsteps=[BootStep(...)])), or Middleware.added",
        "celeryd_init": "a boot step (App(bootsteps=[BootStep(...)])), or Middleware.added",
        "celeryd_after_setup": "a boot step (App(bootsteps=[BootStep(...)])), or Middleware.added",
        "worker_ready": 'Middleware.process_started, or a boot step with requires=["consumer"]',
        "worker_shutting_down": "undo of a boot step",
        "worker_shutdown": "Middleware.process_stopped",
        "worker_process_init": "a boot step, App(bootsteps=[BootStep(name, start)]), of each worker process; its "
        "threads share what it opens, where each child of Celery's had its own",
        "worker_process_shutdown": "undo of a boot step, or Middleware.process_stopped",
        "worker_before_create_process": "nothing: there are no pools",
        "heartbeat_sent": "nothing: the worker renews its lease itself",
        "beat_init": 'Middleware.process_started("scheduler", name)',
        "beat_embedded_init": 'Middleware.process_started("scheduler", name)',
        "setup_logging": "logging.basicConfig(...) in the application's module, or log_detectors",
        "after_setup_logger": "logging.basicConfig(...) in the application's module, or log_detectors",
        "after_setup_task_logger": "logging.basicConfig(...) in the application's module, or log_detectors",
        "import_modules": "nothing: App(include=[...]) says what is imported",
        "user_preload_options": "nothing: a command of your own is @app.command",
        **dict.fromkeys(
            (
                "eventlet_pool_started",
                "eventlet_pool_preshutdown",
                "eventlet_pool_postshutdown",
                "eventlet_pool_apply",
            ),
            "nothing: there are no pools",
        ),
    },
    "task class": {
        "before_start": "Middleware.running: the block's beginning",
        "after_return": "Middleware.running: the block's end",
        "on_success": "Middleware.running: job.outcome is Succeeded() when the block ends",
        "on_failure": "on_failure= of the task, which options(on_failure=) of a call replaces, or Middleware.running: "
        f"job.outcome is Dead(reason, error) {_HANDLER}",
        "__call__": "Middleware.calling, or a decorator below @app.task",
        "on_retry": "Middleware.running: job.outcome is Retrying(delay, error) when the block ends",
        "on_replace": "nothing: a job returns what goes on, with dynamic=True",
        "apply_async": "Middleware.sending for what all calls need; task.options(...) for one call",
        "run": "the function that @app.task decorates",
        **dict.fromkeys(
            ("Request", "Strategy", "start_strategy", "on_bound", "annotate", "bind", "from_config"),
            "nothing: internals of Celery",
        ),
        "abstract": "nothing: a task is a function, not a class",
    },
    "request": {
        "id": "id",
        "task": "task",
        "hostname": "worker",
        "retries": "self.attempt - 1",
        "delivery_info": "self.queue",
        "called_directly": "current_job() is None",
        "is_eager": "current_job() is None",
        "args": "nothing: the function has its arguments",
        "kwargs": "nothing: the function has its arguments",
        "eta": "an argument of the task",
        "expires": "an argument of the task",
        "timelimit": "an argument of the task",
        "headers": "job.headers in Middleware.running, or an argument of the task",
        "group": "self.run_id",
        "root_id": "self.run_id",
        "parent_id": "self.run_id",
        "correlation_id": "job.headers in Middleware.running, or self.run_id",
        "origin": "job.headers in Middleware.sending, or an argument of the task",
        **dict.fromkeys(("time_limit", "soft_time_limit"), "an argument of the task"),
        **dict.fromkeys(
            ("stamps", "stamped_headers"), "an argument of the task, or job.headers in Middleware.running"
        ),
        "reply_to": "job.headers in Middleware.running, or an argument of the task",
    },
    "result option": {
        "propagate": "gather([result], return_exceptions=True), whose list has the error in place of the result; "
        "for a run of a workflow write except TaskFailed around its get()",
        "interval": "nothing: results are not polled",
        "no_ack": "nothing: results are not polled",
        "follow_parents": "nothing: a job has no parents",
        "callback": "nothing: await result.aget()",
        "on_message": "nothing: results are not polled",
        "on_interval": "nothing: results are not polled",
        "disable_sync_subtasks": "nothing: a job can wait for another one, but should not",
    },
}
FENNEL: Mapping[NameKind, Mapping[str, str]] = {
    "result": {"uuid": "result.id"},
    "option": {"retries": "max_retries"},
    "setting": {
        "redis_url": "broker",
        "interface": "nothing: delay and adelay are both there",
        "default_retries": "retry_policy=RetryPolicy(max_retries=3)",
        "read_timeout": "read_block, in seconds",
        "prefetch_count": "nothing: it is learnt",
        "heartbeat_timeout": "lease",
        "heartbeat_interval": "lease",
        "schedule_interval": "nothing: Redis says when a job is due",
        "maintenance_interval": "lease",
        "task_timeout": "result.get(timeout=10), or time_limit",
        "results_enabled": "ignore_result",
        "autodiscover": 'app.autodiscover("shop"), or App(include=["shop.**.tasks"])',
    },
}
RUNNEL: Mapping[NameKind, Mapping[str, str]] = {
    "module": {
        "ExceptionPolicy": '@app.processor(stream, then="quarantine") or then="ignore"',
        "DeadLetterMiddleware": '@app.processor(stream, then="ignore"), and app.streams.dead_records',
        "Middleware": "celery5.streams.ProcessorMiddleware",
        "middleware": "celery5.streams.ProcessorMiddleware; dead records are kept without one",
        "interfaces": "celery5.streams, which has Serializer, Compressor and ProcessorMiddleware",
        "constants": 'nothing: an exception policy is a text, @app.processor(stream, then="quarantine")',
        "RunnelException": "CeleryError",
        "RebalanceFailed": "nothing: a partition is taken when it is free, without a number of attempts",
        "NoPartitionsAssigned": "nothing: a member without partitions waits for one",
        "AcquirePartitionLockFailed": "nothing: there are no locks",
        "ExtendPartitionLockFailed": "nothing: there are no locks",
    },
    "app": {
        "crontab": '@app.task(schedule=cron("0 3 * * *")), or @app.timer(cron("0 3 * * *"), on_leader=True)',
        "run": "celery5 -A shop worker start, or celery5.testing.running_worker(app)",
    },
    "option": {
        "on_leader": "@app.on_start(on_leader=True), or @app.task(schedule=cron(...)) for jobs by the clock"
    },
    "stream option": {
        "record": 'the second argument: app.stream("orders", Order)',
        "partition_by": "by",
        "serializer": 'codec="json", or a Serializer of yours',
        "partition_count": "partitions",
        "partition_size": "keep=Keep(records=50_000)",
        "hasher": "nothing: there is one hash, the same for all producers",
    },
    "stream": {
        "route": "stream.find_partition(record)",
        "partition_key": "stream.keys.log(partition)",
        "all_partition_keys": "[stream.keys.log(number) for number in range(stream.partitions)]",
        "clone": "another stream: app.stream(...)",
        "serialize": "stream.codec.encode(record)",
        "deserialize": "stream.codec.decode(fields)",
        "ack": "nothing: a record is acknowledged when the next one is asked for",
        "partition_count": "stream.partitions",
        "partition_size": "stream.keep.records",
        "record": "nothing: stream.codec.decode(fields) makes records",
    },
    "send option": {"stream_ids": "times=[ms since 1970, ...]; the number in an id counts the records"},
    "processor option": {
        "exception_policy": 'then="quarantine" or "ignore", and on_error=RetryPolicy(...)',
        "lock_expiry": "the setting lease",
        "read_timeout": "nothing: reading ends at once when a worker stops",
        "prefetch_count": "prefetch",
        "assignment_attempts": "nothing: a partition is taken when it is free",
        "assignment_sleep": "nothing: a member hears when a partition is free",
        "pool_size": "nothing: one read is for all partitions",
        "join_delay": "nothing: the plan is sticky, so that members may join one after the other",
    },
    "failure action": {
        "HALT": 'then="quarantine": the partition stops on all workers, and the process goes on',
        "QUARANTINE": 'then="quarantine"',
        "IGNORE": 'then="ignore", which keeps the record as a dead one',
    },
    "events": {
        "xid": "entry.id",
        "data": "entry.record, or entry.fields as they are stored",
        "recovering": "nothing: a record that comes again looks like the others",
        "ack": "nothing: a record is acknowledged when the next one is asked for",
    },
    "setting": {
        "redis_url": "broker",
        "autodiscover": 'App(include=["shop.**.streams"])',
        "leadership_poll_interval": "nothing: there is no leader",
        "default_partition_count": "app.stream(..., partitions=16)",
        "default_partition_size": "app.stream(..., keep=Keep(records=50_000))",
        "default_serializer": 'app.stream(..., codec="json")',
        "default_hasher": "nothing: there is one hash, the same for all producers",
        "default_exception_policy": "@app.processor(..., then=...)",
        "default_lock_expiry": "lease",
        "default_read_timeout": "nothing: reading ends at once when a worker stops",
        "default_prefetch_count": "@app.processor(..., prefetch=256)",
        "default_assignment_attempts": "nothing: a partition is taken when it is free",
        "default_assignment_sleep": "nothing: a member hears when a partition is free",
        "default_grace_period": "grace_period",
        "default_pool_size": "nothing: one read is for all partitions",
        "default_join_delay": "nothing: the plan is sticky, so that members may join one after the other",
        "testing": "celery5.testing.streams.ProcessorDriver",
    },
    "command": {
        "worker APP": "celery5 -A APP worker start",
        "send": "celery5 stream send STREAM RECORD",
        "sendmany": "celery5 stream send STREAM --file FILE",
        "processor": "celery5 stream reset STREAM GROUP --to earliest",
        "processor reset": "celery5 stream reset STREAM GROUP --to earliest",
    },
}
_LIBRARIES = (
    ("Celery", CELERY, "celery5 docs from-celery"),
    ("Fennel", FENNEL, "celery5 docs from-fennel"),
    ("Runnel", RUNNEL, "celery5 docs from-runnel"),
)
"""The libraries, their names, and the pages of the guide that explain them."""


def find_equivalent(thing: NameKind, name: str, names: Mapping[NameKind, Mapping[str, str]] = CELERY) -> str:
    """Return what a library's table has for `name`: for it alone, or for all names that begin so (`redis_*`).

    Returns:
        '' if the table does not have it; a text that begins with `nothing` if there is no such thing.
    """
    table = names.get(thing, {})
    if name in table:
        return table[name]
    beginnings = [key for key in table if key.endswith("*") and name.startswith(key[:-1])]
    return table[max(beginnings, key=len)] if beginnings else ""


def find_hint(thing: NameKind, name: str) -> str:
    """Return what to write instead of `name`, as the end of a message; '' if it is no name of another library."""
    exact = [library for library in _LIBRARIES if name in library[1].get(thing, {})]
    for library, names, page in exact or _LIBRARIES:
        hint = find_equivalent(thing, name, names)
        if hint:
            return f"; for {library}'s {name} there is {hint} (see {page})"
    return ""


def find_variable_hint(variable: str, settings: Collection[str]) -> str:
    """Return what is to be set instead of a variable of Fennel's or Runnel's environment; '' if it is none of theirs.

    Args:
        variable: The name in the environment.
        settings: The names of celery5's settings; those with the name of theirs need no entry in a table.
    """
    for library, names, page in _LIBRARIES[1:]:
        prefix, _, name = variable.partition("_")
        name = name.lower()
        instead = f"CELERY5_{name.upper()}" if name in settings else names["setting"].get(name, "")
        if prefix == library.upper() and instead:
            return f"instead of {library}'s {name} there is {instead} (see {page})"
    return ""


def describe_option(thing: NameKind, option: str, known: Sequence[str]) -> str:
    """Return that there is no such option, with a hint to what the author may have meant."""
    hint = find_hint(thing, option)
    if not hint:
        suggestion = did_you_mean(option, known, otherwise=f"there are {', '.join(sorted(known))}")
        hint = f"; {suggestion}"
    return f"{option} is no option{hint}"


def find_command_hint(words: Sequence[str], group: str = "") -> str:
    """Return what to write instead of the command that these words begin, as the end of a message.

    The first two words, `inspect active`, count before the first alone. '' if no other library has such a command.

    Args:
        words: The words from the first one that celery5 does not know.
        group: The group of commands before them; '' for none. After `worker` Celery's commands to workers are found
            without their first word, too: `worker registered`.
    """
    if words[0] == "worker":  # Runnel's comes with the application, and celery5 has a command of this name
        return find_hint("command", "worker APP") if ":" in "".join(words[1:2]) else ""
    names = [word for word in words if not word.startswith("-")][:2] or words[:1]
    commands = [" ".join(names), names[0]]
    if group == "worker":
        commands += [f"inspect {names[0]}", f"control {names[0]}"]
    return next(filter(None, (find_hint("command", command) for command in commands)), "")


def make_attribute_error(thing: NameKind, of: Any, name: str) -> AttributeError:
    """Return the error for a missing attribute, with a hint.

    Without a hint the error has `obj`, so that Python suggests a similar attribute. With a hint it has no `obj`: for
    `app.conf` Python would also suggest `app.config`, which is something else.
    """
    hint = find_hint(thing, name)
    text = f"{type(of).__name__!r} object has no attribute {name!r}{hint}"
    return AttributeError(text, name=name, obj=None if hint else of)


def make_import_error(name: str, package: str = "celery5") -> Exception:
    """Return the error for a name that celery5, or a package of it, does not have, with a hint.

    It is an ImportError if there is a hint, since `from celery5 import` shows the text of no other error.
    """
    if package == "celery5":
        hint = find_hint("module", name) or _find_package(name)
    else:  # a module of the package that is not loaded yet is no error: Python imports it after an AttributeError
        hint = "" if find_spec(f"{package}.{name}") else find_hint("module", name)
    text = f"module {package!r} has no attribute {name!r}{hint}"
    return ImportError(text, name=package) if hint else AttributeError(text, name=name)


def _find_package(name: str) -> str:
    """Return a hint to the package that has a name which `celery5` does not; '' if none has it."""
    for package in SUBJECTS:
        if name in getattr(import_module(f"celery5.{package}"), "__all__", ()):
            return f": from celery5.{package} import {name}"
    return ""


SUBJECTS = (
    "tasks",
    "events",
    "streams",
    "scheduling",
    "limits",
    "scaling",
    "health",
    "results",
    "dead_letters",
    "logs",
)
"""The packages with public names besides those of `celery5`. An import of one loads only its list of names."""


def refuse_old_module(name: str) -> None:
    """Raise ModuleNotFoundError with a hint for a module of Celery's, such as `celery5.schedules`.

    Do nothing for other modules: Django asks for modules of `celery5.contrib.django` that are not there.
    """
    if name.startswith("celery5.contrib.django."):
        return
    package, _, module = name.partition(".")
    old = module.partition(".")[0]
    if package == "celery5" and (instead := find_hint("module", old)):
        raise ModuleNotFoundError(f"No module named {name!r}{instead}", name=f"{package}.{old}")
