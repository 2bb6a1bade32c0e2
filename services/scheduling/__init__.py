"""The services of a Scheduler, which fires periodic tasks."""
