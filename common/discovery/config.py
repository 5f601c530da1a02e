"""Settings of the registry."""

from dataclasses import dataclass

from common.settings import setting


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where workers and routers find each other. The URL may hold a password."""

    redis_url: str = setting("redis://127.0.0.1:6379/0", "the registry and prefix index", secret=True)
    redis_namespace: str = setting("kvrelay", "prefix of all keys: one cluster, one namespace")
