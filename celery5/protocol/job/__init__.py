"""A job as it travels and what may become of it: envelope, states, verdicts, dead letters."""
