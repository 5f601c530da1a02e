"""How far `kvrelay bench serve` agrees with a public client, guidellm, about the same server.

    python -m bench.serve.client_agreement --guidellm VENV/bin/guidellm --tokenizer DIR [--url URL] [--rounds N] ...

guidellm has an environment of its own (pip install 'guidellm>=0.8'). Both send as many requests, of as many tokens,
at the same constant times, one client after the other and in turn first: what differs is the client. A JSON line a
round, and at the end the medians and their ratios.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import note
from bench.stats import median, rounded

FIGURES = ("ttft_ms_p50", "tpot_ms_p50")
TIMEOUT_S = 900.0


def kvrelay_command(options: argparse.Namespace, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "cli.main", "bench", "serve", "--json", "--warmup", "2", "--arrivals", "constant"),
        *("--url", options.url, "--served-model-name", options.model, "--rate", str(options.rate)),
        *("--requests", str(options.requests), "--seeds", str(seed)),
        *("--prompt-tokens", str(options.prompt_tokens), "--output-tokens", str(options.output_tokens)),
    ]


def guidellm_command(options: argparse.Namespace, seed: int, result: Path) -> list[str]:
    lengths = f"prompt_tokens={options.prompt_tokens},output_tokens={options.output_tokens}"
    backend = f"target={options.url},model={options.model},request_format=/v1/completions,http2=false"
    return [
        *(options.guidellm, "run", "--backend", f"kind=openai_http,{backend}", "--disable-console"),
        *("--profile", f"kind=constant,rate={options.rate}"),
        *("--constraint", f"kind=max_requests,count={options.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={options.tokenizer}"),
        *("--data", f"kind=synthetic_text,{lengths}", "--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={result}"),
    ]


def kvrelay_figures(output: str) -> dict[str, Any]:
    """From the last row that bench serve printed."""
    row = json.loads(output.splitlines()[-1])
    return {"requests": row["requests"] - row["failed"], **{name: row[name] for name in FIGURES}}


def guidellm_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """From guidellm's file; its inter-token latency is a request's mean time per token after the first, as TPOT is."""
    metrics = result["benchmarks"][0]["metrics"]
    ttft, tpot = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return {
        "requests": ttft["count"],
        "ttft_ms_p50": rounded(ttft["percentiles"]["p50"]),
        "tpot_ms_p50": rounded(tpot["percentiles"]["p50"]),
    }


def ask_kvrelay(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    command = kvrelay_command(options, seed)
    done = subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True)
    return kvrelay_figures(done.stdout)


def ask_guidellm(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        subprocess.run(
            guidellm_command(options, seed, path),
            check=True,
            timeout=TIMEOUT_S,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return guidellm_figures(json.loads(path.read_text()))


def agreement(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Each client's medians over the rounds, and kvrelay's over guidellm's."""
    medians = {
        client: {name: rounded(median(turn[client][name] for turn in rounds)) for name in FIGURES}
        for client in ("kvrelay", "guidellm")
    }
    ratios = {name: rounded((medians["kvrelay"][name] or 0) / (medians["guidellm"][name] or 1)) for name in FIGURES}
    return {"rounds": len(rounds), **medians, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", required=True, help="its executable")
    parser.add_argument("--tokenizer", required=True, help="the model's directory, for guidellm's synthetic prompts")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="its name there (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="of each client and round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=32, help="default: %(default)s")
    options = parser.parse_args()
    clients = {"kvrelay": ask_kvrelay, "guidellm": ask_guidellm}
    rounds = []
    for index in range(options.rounds):
        order = list(clients) if index % 2 == 0 else list(reversed(clients))
        note(f"round {index + 1} of {options.rounds}: {', then '.join(order)}")
        turn = {client: clients[client](options, 100 + index) for client in order}
        rounds.append(turn)
        print(json.dumps(turn), flush=True)
    print(json.dumps(agreement(rounds)), flush=True)


if __name__ == "__main__":
    main()
