"""The jobs that a worker holds: in flight, in its internal queues, within its budget; and how they end."""
