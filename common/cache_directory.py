"""Where this user's models and native builds are kept."""

import os
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError

CACHE_ENV = "KVRELAY_CACHE"


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """$KVRELAY_CACHE, else kvrelay in the user's cache directory. Raises ConfigError where there is neither."""
    shared = environ.get("XDG_CACHE_HOME", "")
    try:
        if own := environ.get(CACHE_ENV):
            return Path(own).expanduser().absolute()
        if os.path.isabs(shared):  # a relative one is to be ignored
            return Path(shared) / "kvrelay"
        return Path.home() / ".cache" / "kvrelay"
    except RuntimeError as error:
        raise ConfigError(f"there is no home directory: set {CACHE_ENV}", field=CACHE_ENV) from error
