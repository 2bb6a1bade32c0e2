"""Services of a worker that run processors of streams."""

from celery5.lazy_modules import load_lazily

load_lazily(__name__, "outbox_relay", "processor_calls", "processor_group", "stream_archiver")
