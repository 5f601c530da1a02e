"""kvrelay demo: a cluster, two turns of one chat, and where their time went."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from cli.chat import show
from cluster.chat_client import ChatAnswer, ChatClient, ChatTurn
from cluster.children import Console
from cluster.local_cluster import run_until_signal
from cluster.plan import ClusterConfig, UpConfig, make_cluster
from common.engine.config import EngineConfig
from common.errors import KVRelayError
from common.model.open import open_model
from common.settings import Bytes
from common.worker.config import WorkerConfig
from kvtransfer.transport import AUTO, choose
from router.config import RouterConfig

SYSTEM = (
    "You are a friendly physics teacher. You explain things to curious people who are not experts, "
    "in a few short and correct sentences, and you like examples from daily life."
)
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
QUESTIONS = ("Why is the sky blue?", "And why is it red in the evening?")


def seconds(value: float) -> str:
    """As people read it."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.{0 if value >= 0.01 else 1}f} ms"


def size(value: float) -> str:
    """Bytes, as people read them."""
    unit, factor = next((unit, factor) for unit, factor in UNITS if value >= factor or factor == 1)
    return f"{value:.0f} B" if factor == 1 else f"{value / factor:.2f} {unit}"


def summary(answer: ChatAnswer) -> list[str]:
    """What one turn took and who did it, a line each."""
    report, tokens = answer.report, answer.report["completion_tokens"]
    decode_s = report["last_token_s"] - report["first_token_s"]
    rate = report["handover_bytes"] / report["handover_s"] if report["handover_s"] else 0.0
    rows = [
        ("TTFT", f"{seconds(report['first_token_s'])} from the request to its first token"),
        ("TPOT", f"{seconds(decode_s / max(tokens - 1, 1))} a token after that"),
        ("tokens", f"{report['prompt_tokens']} of prompt, {tokens} of answer (ended by {answer.finish_reason})"),
        ("prefix hits", f"{report['cached_tokens']} of the {report['prompt_tokens']} prompt tokens were cached"),
        ("router", f"queued for {seconds(report['router_queue_s'])}"),
        (
            "prefill",
            f"by {report['prefill_worker']}: queued for {seconds(report['prefill_queue_s'])}, "
            f"computed in {seconds(report['prefill_s'])}",
        ),
        (
            "hand-over",
            f"{size(report['handover_bytes'])} of KV in {seconds(report['handover_s'])} "
            f"by {report['transport'] or 'nothing'} ({size(rate)}/s); "
            f"KV of {report['decode_cached_tokens']} tokens was there already",
        ),
        (
            "decode",
            f"by {report['decode_worker']}: queued for {seconds(report['decode_queue_s'])}, "
            f"{tokens - 1} tokens in {seconds(decode_s)}",
        ),
    ]
    return [f"  {name:<12} {text}" for name, text in rows]


def problems(answers: Sequence[ChatAnswer]) -> list[str]:
    """What should have happened and did not."""
    found = []
    for turn, answer in enumerate(answers, 1):
        report = answer.report
        if not answer.text.strip():
            found.append(f"turn {turn}: the answer is empty")
        if not (report.get("handover_bytes") and report.get("transport") and report.get("decode_worker")):
            found.append(f"turn {turn}: no KV was handed over")
        if turn > 1 and not report.get("cached_tokens"):
            found.append(f"turn {turn}: the history of the chat was no prefix hit")
    return found


async def _chat(client: ChatClient, console: Console, max_tokens: int) -> list[ChatAnswer]:
    model = await client.model()
    messages: list[ChatTurn] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        console.say(f"\nyou: {question}")
        messages.append({"role": "user", "content": question})
        show(f"{model}: ")
        answer = await client.ask(messages, show, model=model, max_tokens=max_tokens, temperature=0.0, report=True)
        console.say("\n")
        if not answer.report:
            raise KVRelayError("the router sent no report of the request")
        for line in summary(answer):
            console.say(line)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


async def _run(config: ClusterConfig, max_tokens: int) -> int:
    console, loop = Console(), asyncio.get_running_loop()
    began = loop.time()
    async with make_cluster(config, console) as cluster, ChatClient(cluster.address("router")) as client:
        console.say(f"ready {cluster.address('router')} in {loop.time() - began:.1f} s")
        answers = await _chat(client, console, max_tokens)
        found = problems(answers)
        found += [f"{name} died" for name, child in cluster.children.items() if not child.alive]
    for problem in [*found, *cluster.unclean]:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found or cluster.unclean else 0


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Runs a cluster and a short chat, tells where its time went, and stops all that it started."
    parser = subparsers.add_parser("demo", description=text)
    parser.add_argument("--model", help="directory, GGUF file or hub name (default: the demo model, fetched once)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (default: %(default)s)")
    parser.add_argument("--transport", default=AUTO, help="ways to move KV, best first (default: all)")


def run(arguments: argparse.Namespace) -> int:
    choose(arguments.transport)  # what is wrong with it is said first
    model: Any = arguments.model
    if model is None:
        from cluster.model_fetch import ensure_demo_model

        model = ensure_demo_model()
    config = ClusterConfig(
        up=UpConfig(),
        router=RouterConfig(model=str(model), port=0, log_level="warning", max_unsplit_tokens=0),  # shows the hand-over
        engine=EngineConfig(model=str(model), kv_cache_memory=Bytes(512 * 2**20)),
        worker=WorkerConfig(log_level="warning", transport=arguments.transport),
    )
    open_model(config.engine, weights=True)  # from the hub: once, not by each process
    return run_until_signal(_run(config, arguments.max_tokens))
