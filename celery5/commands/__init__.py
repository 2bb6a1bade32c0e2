"""Commands: what workers are told to do, and how such commands are signed."""
