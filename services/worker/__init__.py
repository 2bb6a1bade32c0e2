"""The services of a worker: reading, admitting, running and settling jobs, and its commands."""
