"""The version of everything here; pyproject.toml has the same."""

VERSION = "0.1.0"
