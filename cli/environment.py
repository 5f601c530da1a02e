"""What the environment says that is meant for nobody: told once, at the start of a command."""

import difflib
import logging
import os
from collections.abc import Iterable, Mapping

from cluster.plan import setting_names
from common.cache_directory import CACHE_ENV
from common.log import FORMAT_ENV, get_logger, log_event, setup_logging
from common.service_links import service_links
from common.settings import ENV_PREFIX

log = get_logger("environment")


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """KVRELAY_* that no role knows, with the name that may be meant: mistakes in spelling. Values may be secrets."""
    known = setting_names() | {CACHE_ENV, FORMAT_ENV}
    ours = {name for name in environ if name.startswith(ENV_PREFIX)}
    unknown = sorted(ours - known - service_links(environ))
    return [name + _meant(name, known) for name in unknown]


def _meant(name: str, known: Iterable[str]) -> str:
    bare = [other.removeprefix(ENV_PREFIX) for other in known]
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), bare, 1)
    return f" ({ENV_PREFIX}{close[0]}?)" if close else ""


def check_environment(role: str, environ: Mapping[str, str] = os.environ) -> None:
    """One log line for unknown settings and one for service links where a setting would be. Raises ConfigError."""
    unknown, links = unknown_settings(environ), sorted(service_links(environ) & setting_names())
    if unknown or links:
        setup_logging("info", role, environ=environ)
    if unknown:
        log_event(log, logging.WARNING, "unknown settings in the environment", names=", ".join(unknown))
    if links:
        log_event(log, logging.INFO, "no settings but links to services", names=", ".join(links))
