"""Protocol: values and decisions, pure: no clock, no Redis, no Trio."""
