"""`kvrelay model show` says what a worker would load, with the engine's own numbers, and imports nothing heavy."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cli.main import main
from cli.show import describe
from common.engine.build import build_engine
from common.engine.config import EngineConfig
from common.errors import ConfigError
from common.settings import Bytes
from tests.support.checkpoints import make_random_checkpoint
from tests.support.gguf_models import Kind, random_model, write_model


@pytest.fixture(params=["directory", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "directory":
        return make_random_checkpoint(tmp_path / "m", tie_word_embeddings=False)
    return write_model(tmp_path / "m.gguf", "llama", random_model("llama"), kind=Kind.Q4_K)


def test_what_is_shown_is_what_an_engine_has(model: Path):
    torch.set_num_threads(1)
    settings = EngineConfig(model=str(model), dtype="float32", kv_cache_memory=Bytes(2**24))
    shown = describe(settings)
    built = build_engine(settings, max_num_batched_tokens=64, shared_pool=False, clock=time.monotonic)
    try:
        assert (shown.name, shown.fingerprint) == (built.name, built.fingerprint)
        assert (shown.blocks, shown.block_bytes) == (built.pool.blocks.shape[0], built.layout.block_bytes)
        assert shown.weights_bytes == built.weights_bytes
        assert shown.max_model_len == built.model.max_position_embeddings
        assert shown.kv_bytes_per_token * shown.block_size == shown.block_bytes
    finally:
        built.pool.close()
    assert shown.parameters == shown.weights_bytes // 4
    assert shown.eos_token_ids == (2,)
    assert shown.chat_template


def test_a_dtype_changes_sizes_and_fingerprint(model: Path):
    wide, narrow = (describe(EngineConfig(model=str(model), dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert (wide.weights_bytes, wide.block_bytes) == (2 * narrow.weights_bytes, 2 * narrow.block_bytes)
    assert (wide.file_bytes, wide.parameters) == (narrow.file_bytes, narrow.parameters)
    assert wide.fingerprint != narrow.fingerprint
    assert narrow.blocks > 0  # of the memory that is here


def test_a_context_that_the_model_was_not_made_for_is_refused(model: Path):
    with pytest.raises(ConfigError, match="max_model_len is 999999"):
        describe(EngineConfig(model=str(model), max_model_len=999_999))


def test_lines_and_json_say_the_same(model: Path, capsys: pytest.CaptureFixture[str]):
    command = ["model", "show", str(model), "--kv-cache-memory", "64Mi", "--max-model-len", "100"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = {line[:13].strip(): line[14:] for line in lines}
    assert said["model"] == found["name"] == "m"
    assert said["fingerprint"] == found["fingerprint"]
    assert said["parameters"] == f"{found['parameters']:,}"
    assert said["context"] == "100 tokens, 7 blocks"
    assert said["EOS"] == "2"
    assert said["blocks"].startswith(f"{2**26 // found['block_bytes']:,} fit")
    assert said["tokenizer"] == f"{found['tokenizer']}, with a chat template"


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["model", "show", "none"]) == 2
    assert capsys.readouterr().err == "error: there is no 'none', and it is no name on the Hugging Face hub, either\n"


def test_showing_imports_nothing_heavy(model: Path):
    program = f"""
import sys
from cli.main import main
main(["model", "show", {str(model)!r}, "--json"])
print(sorted({{"torch", "numpy", "gguf", "transformers", "huggingface_hub"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("[]", "")
