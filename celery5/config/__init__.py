"""Configuration: every setting, and where its value comes from."""
