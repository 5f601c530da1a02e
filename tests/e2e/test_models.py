"""A real cluster serves a GGUF file, and a model of the hub, as a plain forward pass answers."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.model.open import open_source
from common.text.text_model import TextModel
from tests.support.checkpoints import make_random_checkpoint
from tests.support.fake_hub import Hub
from tests.support.gguf_models import Kind, random_model, write_model

FLAGS = ["--port", "0", "--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory", "32Mi"]
PROMPT, COUNT = "hello world", 24


@contextmanager
def cluster(model: str, *flags: str, **environ: str) -> Iterator[str]:
    """The address of `kvrelay up`, one worker of each kind."""
    command = [sys.executable, "-m", "cli.main", "up", "--model", model, *FLAGS, *flags]
    env = os.environ | environ
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=env)
    try:
        assert process.stdout is not None
        address = next((match[1] for line in process.stdout if (match := re.match(r"ready (\S+)", line))), None)
        assert address, f"the cluster did not start: exit status {process.wait()}"
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def completion(address: str) -> tuple[str, str]:
    """The greedy answer's text, and the name that the model goes by."""
    body = {"model": None, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as reply:
        body["model"] = name = json.load(reply)["data"][0]["id"]
    return post(f"{address}/v1/completions", body)["choices"][0]["text"], name


def expected(model: PreTrainedModel, text: TextModel) -> str:
    """Token by token from a whole forward pass."""
    prompt = text.encode(PROMPT)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(COUNT):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    stream = text.detokenizer(skip_special_tokens=True)
    return stream.push(ids[len(prompt) :]) + stream.finish()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_gguf_file_is_served(architecture: str, tmp_path: Path):
    torch.set_num_threads(1)
    path = write_model(tmp_path / "tiny.gguf", architecture, random_model(architecture), kind=Kind.Q8_0)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    wanted = expected(reference, TextModel.load(open_source(path)))
    with cluster(str(path)) as address:
        assert completion(address) == (wanted, "tiny")


def test_a_model_of_the_hub_is_served_and_fetched_once(tmp_path: Path):
    torch.set_num_threads(1)
    made = make_random_checkpoint(tmp_path / "made")
    hub = Hub({file.name: file.read_bytes() for file in made.iterdir()} | {"extra.bin": b"pickle"})
    reference = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager")
    try:
        environ = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        with cluster("owner/name", **environ) as address:
            assert completion(address) == (expected(reference, TextModel.load(made)), "owner/name")
        assert sorted(hub.fetched) == sorted({*hub.fetched} - {"extra.bin"})
    finally:
        hub.close()
