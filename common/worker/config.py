"""Settings of a worker process."""

from dataclasses import dataclass, replace

from common.address import Address, is_any, join_address
from common.deadlines import Deadlines
from common.errors import ConfigError
from common.settings import PORTS, TIMES, setting


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The network side of a prefill or decode worker."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(0, "gRPC port (0: any free one)", within=PORTS)
    advertise: str = setting("", "host:port that others reach this worker at (default: what it binds)")
    metrics_port: int = setting(0, "port of /metrics and /health over HTTP (0: any free one)", within=PORTS)
    worker_id: str = setting("", "name in logs, metrics and Redis, unique there (default: role and address)")
    transport: str = setting("auto", "ways to move KV, best first, comma-separated (auto: all that can be proven)")
    max_held_kv: float = setting(
        0.75,
        "share of a prefill worker's blocks that may be held for others before it refuses prompts",
        within=(0.0, 1.0),
    )
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to end after SIGTERM", within=(0.0, 86400.0)
    )
    deadline_scale: float = setting(1.0, "factor on all time-outs; for tests", within=(1e-3, 1e3))
    request_timeout: float = setting(
        Deadlines().request_s, "seconds that a request may take here; as for the routers", within=TIMES
    )

    def deadlines(self) -> Deadlines:
        """Every wait of this worker."""
        return replace(
            Deadlines(request_s=self.request_timeout).scaled(self.deadline_scale), drain_s=self.drain_timeout
        )


def check_reachable(settings: WorkerConfig) -> None:
    """What others are told must be an address that can be called. Raises ConfigError."""
    if not settings.advertise:
        if is_any(settings.host):
            problem = f"--host {settings.host} needs --advertise: nobody can call that address"
            raise ConfigError(problem, field="advertise")
        return
    try:
        host = Address.parse(settings.advertise).host
        if is_any(host):
            raise ValueError(f"nobody can call {host}")
    except ValueError as error:
        raise ConfigError(f"--advertise must be host:port: {error}", field="advertise") from error


def http_address(host: str, address: str, bound_host: str, bound_port: int) -> str:
    """Where others find the metrics of the worker at `address`: what is bound to every address is there, too."""
    return join_address(Address.parse(address).host if is_any(host) else bound_host, bound_port)
