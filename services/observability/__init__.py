"""The services that report the metrics of a process, and keep those of the application as history."""
