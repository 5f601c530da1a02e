"""Where the repository lies, for child processes that are to import it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
