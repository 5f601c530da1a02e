"""What a cluster on this machine consists of: its settings, its processes and the order of their start."""

import argparse
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from cluster.children import ChildSpec, Console, Ready
from cluster.local_cluster import Cluster
from cluster.redis_server import find_redis_server, free_port, server_command
from common.control_groups import usable_cores
from common.discovery.config import RedisConfig
from common.engine.config import EngineConfig
from common.listening import check_bindable
from common.model.hub import is_hub_name
from common.model.open import open_model
from common.rpc.config import SecurityConfig
from common.rpc.security import Security
from common.settings import POSITIVE, env_of, from_arguments, setting, to_arguments, to_environment
from common.worker.config import WorkerConfig
from router.config import RequestLimits, RouterConfig
from router.http.client_tls import client_tls

PER_WORKER = ("host", "port", "advertise", "metrics_port", "worker_id")  # not one value for all workers
BACKOFF_S = (1.0, 30.0)
CLOSING_S = 2.0  # of the time to stop, after requests had theirs
Stages = tuple[tuple[ChildSpec, ...], ...]


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What a local cluster consists of."""

    prefill: int = setting(1, "prefill workers (0: decode workers compute the prompts, too)", within=(0, None))
    decode: int = setting(1, "decode workers", within=POSITIVE)
    redis_url: str | None = setting(None, "an existing Redis (default: one of the cluster's own)", secret=True)
    redis_namespace: str | None = setting(None, "prefix of all keys (default: a random one)")
    restart: bool = setting(False, "start again what dies")
    startup_timeout: int = setting(300, "seconds until all must be ready", within=POSITIVE)
    shutdown_timeout: int = setting(10, "seconds that router, workers and Redis each get to stop", within=POSITIVE)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Everything about one local cluster."""

    up: UpConfig
    router: RouterConfig
    engine: EngineConfig
    worker: WorkerConfig
    limits: RequestLimits = RequestLimits()
    security: SecurityConfig = SecurityConfig()

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "ClusterConfig":
        return cls(
            up=from_arguments(UpConfig, arguments),
            router=from_arguments(RouterConfig, arguments),
            engine=from_arguments(EngineConfig, arguments),
            worker=from_arguments(WorkerConfig, arguments, skip=PER_WORKER),
            limits=from_arguments(RequestLimits, arguments),
            security=from_arguments(SecurityConfig, arguments),
        )


def divided_threads(workers: int) -> list[int]:
    """This process's cores over the workers, at least one each."""
    cores = usable_cores()
    return [max(1, cores // workers + (index < cores % workers)) for index in range(workers)]


def setting_names() -> set[str]:
    """Environment names of all settings of all roles."""
    kinds = (UpConfig, RouterConfig, RequestLimits, EngineConfig, WorkerConfig, RedisConfig, SecurityConfig)
    return {env_of(item) for kind in kinds for item in fields(kind)}


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Without our settings, which the children get as flags; secrets are put back by whoever passes them on."""
    settings = setting_names()
    return {name: value for name, value in environ.items() if name not in settings} | {"PYTHONUNBUFFERED": "1"}


def redis_ready(url: str, line: str) -> Ready | None:
    """From a line of redis-server's log."""
    return Ready("redis", url) if "Ready to accept connections" in line else None


def plan(config: ClusterConfig) -> Stages:
    """The processes in the order of their start. Raises StartupError for what is known to fail."""
    up, env = config.up, child_environment()
    stages: list[tuple[ChildSpec, ...]] = []
    redis_url = up.redis_url
    if redis_url is None:
        port = free_port()
        url = redis_url = f"redis://127.0.0.1:{port}/0"
        command = tuple(server_command(find_redis_server(), port, log_level="notice"))
        stages.append((ChildSpec("redis", command, env, lambda line: redis_ready(url, line), verbose=False),))
    redis = RedisConfig(redis_url, up.redis_namespace or f"kvrelay-{secrets.token_hex(4)}")

    def role(name: str, module: str, *configs: object) -> ChildSpec:
        flags = [flag for each in configs for flag in to_arguments(each)]
        # -P: a folder of the same name where the command was given must not be taken for the package
        own = env | {name: text for each in configs for name, text in to_environment(each).items()}
        return ChildSpec(name, (sys.executable, "-P", "-m", module, *flags), own, essential=module == "router")

    drain_s = max(0.0, up.shutdown_timeout - CLOSING_S)
    router = replace(config.router, drain_timeout=min(config.router.drain_timeout, drain_s))
    names = [f"prefill-{index}" for index in range(up.prefill)] + [f"decode-{index}" for index in range(up.decode)]
    workers = []
    for name, threads in zip(names, divided_threads(len(names)), strict=True):
        engine = replace(config.engine, threads=config.engine.threads or threads, workers_per_host=len(names))
        worker = replace(
            config.worker,
            worker_id="" if up.redis_namespace else name,  # two clusters may share one
            drain_timeout=min(config.worker.drain_timeout, drain_s),
        )
        workers.append(role(name, f"{name.split('-')[0]}_svc", engine, worker, redis, config.security))
    return (*stages, tuple(workers), (role("router", "router", router, config.limits, redis, config.security),))


def check(config: ClusterConfig) -> None:
    """What would fail anyway fails before anything is started. Raises StartupError."""
    client_tls(config.router)
    Security.load(config.security, serves=True)
    if not is_hub_name(config.engine.model):  # those are fetched before, where Ctrl-C can end it
        open_model(config.engine, weights=True)
    check_bindable(config.router.host, config.router.port)


def make_cluster(config: ClusterConfig, console: Console) -> Cluster:
    """To be entered with `async with`, in the main thread."""
    check(config)
    return Cluster(
        plan(config),
        console,
        startup_s=config.up.startup_timeout,
        grace_s=config.up.shutdown_timeout,
        restart_backoff_s=BACKOFF_S if config.up.restart else None,
    )
