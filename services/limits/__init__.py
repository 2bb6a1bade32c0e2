"""The services that admit jobs of tasks with limits."""
