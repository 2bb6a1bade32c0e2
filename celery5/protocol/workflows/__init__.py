"""Plans of workflows and the states of their runs."""
