"""A real cluster on the real model, through the official client: answers, stops, aborts, prefix hits, a clean end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.checkpoints import make_random_checkpoint
from tests.support.process_tools import is_running, wait_until_ended

pytestmark = pytest.mark.model
MODEL = "smol"
STORY = [{"role": "user", "content": "Tell me a long story about a fox and a bear."}]


@dataclass
class Cluster:
    """`kvrelay up` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    pids: dict[str, int]

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def http(self, path: str, body: object = None) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET, or of a POST of bytes or of something as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-KVRelay-Report": "1"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a router's metric over the series that have these labels."""
        total = 0.0
        for line in self.http("/metrics")[1].splitlines():
            match = re.fullmatch(rf"kvrelay:{name}\{{(.*)\}} (\S+)", line)
            if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
                total += float(match[2])
        return total

    def idle(self) -> bool:
        return self.metric("num_requests_running") == 0


def start_cluster(model: Path, *flags: str, dtype: str = "float32") -> Cluster:
    command = [sys.executable, "-m", "cli.main", "up", "--model", str(model), "--port", "0", "--dtype", dtype]
    command += ["--served-model-name", MODEL, "--max-model-len", "1024", "--kv-cache-memory", "128Mi", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    pids: dict[str, int] = {}
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"(\S+) +pid (\d+)", line):
            pids[match[1]] = int(match[2])
        if match := re.match(r"ready (\S+)", line):
            return Cluster(process, match[1], pids)
    raise AssertionError(f"the cluster did not start: exit status {process.wait()}")


def stop_cluster(cluster: Cluster) -> int:
    cluster.process.send_signal(signal.SIGINT)
    return cluster.process.wait(timeout=60)


def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(demo_model: Path) -> Iterator[Cluster]:
    """One worker of each kind."""
    cluster = start_cluster(demo_model, "--prefill", "1", "--decode", "1")
    yield cluster
    assert stop_cluster(cluster) == 0
    assert not any(is_running(pid) for pid in cluster.pids.values())


def test_streamed_equals_whole(cluster: Cluster) -> None:
    client = cluster.client()
    settings = {"model": MODEL, "messages": STORY, "max_tokens": 16, "temperature": 0.7, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**settings)
    stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert texts[0] != texts[1]


def test_a_stop_string_ends_the_answer_before_it(cluster: Cluster) -> None:
    client = cluster.client()
    settings = {"model": MODEL, "messages": STORY, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**settings).choices[0].message.content
    word = whole.split()[5]
    cut = client.chat.completions.create(**settings, stop=[word])
    assert cut.choices[0].message.content == whole[: whole.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 24


def test_a_prefix_hit_shows_in_usage_and_metrics(cluster: Cluster) -> None:
    client = cluster.client()
    prompt = "A list of a hundred rivers, with their length and where they end: " * 6
    settings = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    cold = client.completions.create(**settings)
    eventually(lambda: cluster.metric("prefix_index_blocks") > 0)
    warm = client.completions.create(**settings)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    # all full blocks but the one of the last token, whose logits are needed
    assert warm.usage.prompt_tokens_details.cached_tokens == (warm.usage.prompt_tokens - 1) // 16 * 16
    assert warm.choices[0].text == cold.choices[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_both_workers(cluster: Cluster, stream: bool) -> None:
    async def leave() -> None:
        client = AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        settings = {"model": MODEL, "messages": STORY, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        if stream:
            answer = await client.chat.completions.create(**settings, stream=True)
            async for chunk in answer:
                if chunk.choices[0].delta.content:
                    break
            await answer.close()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(**settings), 1.5)
        await client.close()

    asyncio.run(leave())
    eventually(cluster.idle)


def test_bad_requests_name_the_field(cluster: Cluster) -> None:
    chat = {"model": MODEL, "messages": STORY}
    cases = [
        (b"{", 400, None),
        (b'{"model": "smol", "messages": []}', 400, "messages"),
        ({**chat, "temperature": "hot"}, 400, "temperature"),
        (b'{"model": "smol", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}', 400, None),
        ({**chat, "max_tokens": 100_000}, 400, "max_tokens"),
        ({**chat, "messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
        ({**chat, "model": "other"}, 404, "model"),
    ]
    for body, status, field in cases:
        reply = cluster.http("/v1/chat/completions", body)
        assert (reply[0], reply[1]["error"]["param"]) == (status, field), body
    assert cluster.idle()


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    cluster = start_cluster(make_random_checkpoint(tmp_path / "tiny"), "--prefill", "1", "--decode", "1")
    os.kill(cluster.process.pid, signal.SIGKILL)
    assert cluster.process.wait(timeout=60) != 0
    for pid in cluster.pids.values():
        wait_until_ended(pid)
