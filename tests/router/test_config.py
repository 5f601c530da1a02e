"""Each time limit that a client or a proxy can meet follows its flag, and what has no flag keeps its default."""

from dataclasses import asdict, replace

import pytest

from common.deadlines import Deadlines
from common.worker.config import WorkerConfig
from router.config import RouterConfig


@pytest.mark.parametrize("config", [RouterConfig(model="m"), WorkerConfig()])
def test_without_flags_all_deadlines_are_the_defaults(config: RouterConfig | WorkerConfig) -> None:
    assert config.deadlines() == Deadlines()


@pytest.mark.parametrize(
    ("flag", "deadline"),
    [
        ("request_timeout", "request_s"),
        ("queue_timeout", "router_queue_s"),
        ("sse_ping_interval", "keepalive_s"),
        ("timeout_keep_alive", "http_idle_s"),
        ("header_timeout", "http_header_s"),
        ("body_timeout", "http_body_s"),
        ("drain_timeout", "drain_s"),
    ],
)
def test_a_flag_sets_its_deadline_and_no_other(flag: str, deadline: str) -> None:
    configs: list[RouterConfig | WorkerConfig] = [RouterConfig(model="m")]
    if flag in ("request_timeout", "drain_timeout"):  # workers have it, too
        configs.append(WorkerConfig())
    for config in configs:
        deadlines = replace(config, **{flag: 1234.5}).deadlines()  # type: ignore[arg-type]
        assert asdict(deadlines) == asdict(Deadlines()) | {deadline: 1234.5}


@pytest.mark.parametrize("config", [RouterConfig(model="m"), WorkerConfig()])
def test_all_but_the_grace_are_scaled(config: RouterConfig | WorkerConfig) -> None:
    scaled = replace(config, deadline_scale=0.5, request_timeout=1000.0).deadlines()
    assert (scaled.request_s, scaled.heartbeat_s, scaled.drain_s) == (500.0, 0.5, 30.0)
