"""The probe tells how long a page takes, and a server that is gone is an error."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from bench.router.lag_probe import probing
from common.errors import Unavailable


@asynccontextmanager
async def serving(pause_s=0.0):
    asked = []

    async def health(_):
        asked.append(1)
        await asyncio.sleep(pause_s)
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner, runner.addresses[0][1], asked
    finally:
        await runner.cleanup()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_every_answer_has_its_time():
    async with serving(0.05) as (_, port, asked):
        async with probing("127.0.0.1", port) as times_ms:
            await until(lambda: len(asked) > 3)
        assert len(times_ms) == len(asked)
        assert min(times_ms) >= 50


async def test_a_server_that_is_gone_is_an_error():
    async def ask_in_vain():
        async with serving() as (runner, port, asked), probing("127.0.0.1", port):
            await until(lambda: asked)
            await runner.cleanup()
            await asyncio.sleep(0.2)

    with pytest.raises(Unavailable, match="no answer"):
        await ask_in_vain()


async def test_the_probe_ends_with_a_body_that_fails():
    async def fail(port, asked):
        async with probing("127.0.0.1", port):
            await until(lambda: asked)
            raise KeyError

    async with serving() as (_, port, asked):
        with pytest.raises(KeyError):
            await fail(port, asked)
        count = len(asked)
        await asyncio.sleep(0.2)
        assert len(asked) == count
