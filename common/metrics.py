"""Prometheus metrics of every role. Names, units and buckets are vLLM's where the thing is the same."""

from collections.abc import Callable, Mapping, Sequence

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

PREFIX = "kvrelay:"


def new_registry() -> CollectorRegistry:
    """A registry with this process's CPU, memory and file descriptors in it."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # two series for each otherwise
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    return registry


class MetricMaker:
    """Makes metrics with constant labels; further labels are named when one is used."""

    def __init__(self, registry: CollectorRegistry, constant: Mapping[str, str]) -> None:
        self.registry = registry
        self.constant = dict(constant)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, list(self.constant), registry=self.registry).labels(**self.constant)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, list(self.constant), registry=self.registry).labels(**self.constant)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        names = list(self.constant)
        return Histogram(PREFIX + name, text, names, registry=self.registry, buckets=buckets).labels(**self.constant)

    def counters(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        family = Counter(PREFIX + name, text, [*self.constant, *labels], registry=self.registry)
        return lambda **values: family.labels(**self.constant, **values)

    def gauges(self, name: str, text: str, *labels: str) -> Callable[..., Gauge]:
        family = Gauge(PREFIX + name, text, [*self.constant, *labels], registry=self.registry)
        return lambda **values: family.labels(**self.constant, **values)


def metrics_response(registry: CollectorRegistry, accept: str = "") -> web.Response:
    """The registry as text, in the format that the Accept header asks for."""
    encode, content_type = choose_encoder(accept)
    return web.Response(body=encode(registry), headers={"Content-Type": content_type})
