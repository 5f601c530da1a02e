"""kvrelay bench stalls: how long one client's hostile request keeps the router from answering another's /health.

Each kind is sent several times in turn, over one connection, while a process of its own asks for /health.
"""

import asyncio
import json
import time
from collections.abc import Iterator

import aiohttp

from bench.options import StallsOptions
from bench.own_cluster import own_cluster
from bench.report import ResultTable, note
from bench.router.lag_probe import probing
from bench.stats import percentile
from cluster.local_cluster import run_until_signal
from common.address import Address

COLUMNS = ("request", "mib", "status", "answer_ms", "health_ms_p50", "health_ms_p99", "health_ms_max", "rounds")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGE, LARGER = 16 * 2**20, 44 * 2**20  # bytes
EVERY_MS = 2.0
PATIENCE_S = 300.0


def filled(head: bytes, item: bytes, tail: bytes, size: int) -> bytes:
    """A body of about so many bytes."""
    return head + item * ((size - len(head) - len(tail)) // len(item)) + tail


def requests(fitting: int, tokens: int) -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body); `fitting` bytes are the most that the router takes."""
    yield "nothing", "/v1/models", b""
    for size in (fitting, LARGE, LARGER):
        yield "lists of ids", COMPLETIONS, filled(b'{"prompt":[', b"[0],", b"[0]]}", size)
    yield "ids", COMPLETIONS, filled(b'{"prompt":[', b"0,", b"0]}", fitting)
    yield "ids below the bound", COMPLETIONS, filled(b'{"prompt":[', b"0,", b"0]}", 2**19)
    yield "lists below the bound", COMPLETIONS, filled(b'{"prompt":[', b"[0],", b"[0]]}", 2**16)
    message = b'{"role":"user","content":"a"},'
    yield "messages", CHAT, filled(b'{"messages":[', message, message[:-1] + b"]}", fitting)
    yield (
        "messages below the bound",
        CHAT,
        filled(b'{"messages":[', message, message[:-1] + b"]}", 240_000),
    )
    yield "one long message", CHAT, filled(b'{"messages":[{"role":"user","content":"', b"the relay ", b'"}]}', fitting)
    yield "one long prompt", COMPLETIONS, filled(b'{"prompt":"', b"the relay ", b'"}', fitting)
    yield "escaped quotes", COMPLETIONS, filled(b'{"prompt":"', b'\\"', b'"}', fitting)
    yield "tokenize", "/tokenize", filled(b'{"prompt":"', b"the relay ", b'"}', 2**20)
    yield (
        "tokenize, strings too",
        "/tokenize",
        filled(b'{"return_token_strs":true,"prompt":"', b"\\u6771", b'"}', 2**20),
    )
    yield "detokenize", "/detokenize", filled(b'{"tokens":[', b"300,", b"300]}", 2**20)
    yield "stop strings", COMPLETIONS, filled(b'{"prompt":"a","stop":[', b'"b",', b'"b"]}', fitting)
    yield "biases", COMPLETIONS, filled(b'{"prompt":"a","logit_bias":{', b'"1":1,', b'"1":1}}', fitting)
    yield "bad words", COMPLETIONS, filled(b'{"prompt":"a","bad_words":[', b'"b",', b'"b"]}', fitting)
    yield (
        "metadata",
        CHAT,
        filled(b'{"metadata":[', b"1.5,", b'1],"messages":[{"role":"user","content":"a"}]}', fitting),
    )
    yield "depth", COMPLETIONS, b'{"prompt":' + b"[" * (fitting - 100)
    asked = {"n": 16, "max_tokens": tokens, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, **asked}
    yield "logprobs of a chat", CHAT, json.dumps(chat).encode()
    yield "logprobs of a completion", COMPLETIONS, json.dumps({"prompt": "a", "logprobs": 20, **asked}).encode()


async def measure(options: StallsOptions) -> int:
    report, worst_ms = ResultTable(COLUMNS, as_json=options.json), 0.0
    async with own_cluster(options, 16) as cluster:
        url = cluster.address("router")
        address = Address.parse(url.removeprefix("http://"))
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            async with session.get("/v1/models") as response:
                context = (await response.json())["data"][0]["max_model_len"]
            for name, path, body in requests(4 * 2**20 + 64 * context, options.output_tokens):
                note(name)
                async with probing(address.host, address.port, every_ms=EVERY_MS) as health_ms:
                    began = time.perf_counter()
                    for _ in range(options.rounds):
                        status = await _status(session, path, body)
                    answer_ms = (time.perf_counter() - began) * 1e3 / options.rounds
                worst_ms = max(worst_ms, *health_ms)
                report.row(
                    {
                        "request": name,
                        "mib": len(body) / 2**20,
                        "status": status,
                        "answer_ms": answer_ms,
                        "health_ms_p50": percentile(health_ms, 50),
                        "health_ms_p99": percentile(health_ms, 99),
                        "health_ms_max": max(health_ms),
                        "rounds": options.rounds,
                    }
                )
    return int(worst_ms > options.most_ms)


async def _status(session: aiohttp.ClientSession, path: str, body: bytes) -> int:
    """0: the router closed the connection while the body was sent, as it may after a refusal."""
    if not body:
        await asyncio.sleep(1.0)
    try:
        async with session.request("POST" if body else "GET", path, data=body or None) as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


def run(options: StallsOptions) -> int:
    """A row for each request; the exit status is 1 if /health waited for longer than --most-ms."""
    return run_until_signal(measure(options))
