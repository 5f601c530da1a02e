"""The router: python -m router."""

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import web

from common.address import join_address
from common.awake_clock import AwakeClock
from common.discovery.config import RedisConfig
from common.discovery.redis_access import prove_access
from common.discovery.redis_client import connect
from common.discovery.registry import Registry, WorkerRecord
from common.listening import listen
from common.model.open import open_model
from common.model.source import tokenizer_id
from common.role import announce_ready, run_role, stop_on_signals
from common.rpc.channel import channel_opener
from common.rpc.config import SecurityConfig
from common.rpc.security import Security
from common.settings import from_arguments, listed
from common.tasks import end, until
from common.text.text_model import TextModel
from router.app import build_app, build_runner
from router.config import RequestLimits, RouterConfig
from router.fleet.prefix_index import PrefixIndex
from router.fleet.workers import Workers
from router.http.client_tls import client_tls
from router.metrics import RouterMetrics
from router.pipeline.pipeline import Pipeline


def stranger(record: WorkerRecord, names: Set[str], tokenizer: str) -> str:
    """Why a worker is not one to ask here: it serves a model of another name, or speaks other token ids."""
    if record.served_model_name not in names:
        return f"it serves {record.served_model_name!r}, this router {sorted(names)}"
    if record.tokenizer and record.tokenizer != tokenizer:
        return "it has another tokenizer than this router"
    return ""


SWITCH_S = 0.001  # after which a thread that computes lets the event loop go on


async def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit status."""
    sys.setswitchinterval(SWITCH_S)
    settings = from_arguments(RouterConfig, arguments)
    redis_settings = from_arguments(RedisConfig, arguments)
    deadlines = settings.deadlines()
    security = Security.load(from_arguments(SecurityConfig, arguments), serves=False)
    tls = client_tls(settings)
    source = await asyncio.to_thread(open_model, settings, weights=False)
    tokenizer = await asyncio.to_thread(tokenizer_id, source)
    text = await asyncio.to_thread(TextModel.load, source)
    max_model_len = text.config.context_length(settings.max_model_len)
    names = settings.names(source)
    metrics = RouterMetrics(names[0])
    namespace = redis_settings.redis_namespace
    async with AsyncExitStack() as stack:
        redis = await connect(redis_settings.redis_url, deadlines)
        stack.push_async_callback(redis.aclose)
        await prove_access(redis, redis_settings, deadlines, writes=False)
        registry = Registry(redis, namespace, deadlines, key=security.key)
        index = PrefixIndex(redis, namespace, deadlines, registry.outage)
        awake = AwakeClock()
        workers = Workers(
            registry,
            index,
            secrets.token_hex(8),
            deadlines,
            awake,
            metrics,
            channel_opener(security),
            max_unsplit_tokens=settings.max_unsplit_tokens,
            stranger=partial(stranger, names=set(names), tokenizer=tokenizer),
            strict_numerics=settings.strict_numerics,
        )
        pipeline = Pipeline(workers, text, metrics, deadlines, time.monotonic, max_queued=settings.max_queued_requests)
        stack.push_async_callback(workers.close)
        following = asyncio.create_task(workers.run(), name="registry")
        indexing = asyncio.create_task(index.run(), name="prefix index")
        ticking = asyncio.create_task(awake.run(), name="clock")
        stack.push_async_callback(end, following, indexing, ticking)
        app = build_app(
            pipeline,
            text,
            model_names=names,
            max_model_len=max_model_len,
            deadlines=deadlines,
            ready=workers.ready,
            metrics=metrics,
            limits=from_arguments(RequestLimits, arguments),
            api_keys=listed(settings.api_key),
            allowed_origins=listed(settings.allowed_origins),
        )
        runner = build_runner(app, deadlines.drain_s)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for listening in listen(settings.host, settings.port, backlog=settings.backlog):
            await web.SockSite(runner, listening, backlog=settings.backlog, ssl_context=tls).start()
        stop = stop_on_signals()
        await workers.settle()
        scheme = "http" if tls is None else "https"
        announce_ready("router", f"{scheme}://{join_address(*runner.addresses[0][:2])}")
        await until(stop, following, indexing, ticking)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_role("router", (RouterConfig, RequestLimits, RedisConfig, SecurityConfig), run, argv)


if __name__ == "__main__":
    sys.exit(main())
