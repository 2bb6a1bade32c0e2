"""A job as it travels and what may become of it: Command, states, verdicts, dead letters."""
