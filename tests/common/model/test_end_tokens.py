"""Every token that ends an answer is found, wherever a checkpoint says it, and none that could never be chosen."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from common.model.directory import DirectorySource
from common.model.end_tokens import read_generation
from common.model.open import WithTokenizer
from common.text.text_model import TextModel
from tests.support.tiny_text import SPECIAL, byte_level, model_directory, sentencepiece_directory
from tests.support.tokenizer_kinds import unigram

END_OF_TEXT, IM_END, BOS = (SPECIAL.index(name) for name in ("<|endoftext|>", "<|im_end|>", "<s>"))
TURN_END = {
    "__type": "AddedToken",
    "content": "<|im_end|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
}
NO_TEMPLATE: dict[str, Any] = {"chat_template": None}


def ends(path: Path) -> tuple[int, ...]:
    return read_generation(DirectorySource(path)).eos_token_ids


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_config", "options", "expected"),
    [
        (0, None, {"eos_token": "<|im_end|>"}, NO_TEMPLATE, (0, IM_END)),
        (0, None, {"eos_token": TURN_END}, NO_TEMPLATE, (0, IM_END)),
        (0, {"eos_token_id": 0}, {"eos_token": "<|im_end|>"}, NO_TEMPLATE, (0, IM_END)),
        ([0, 1], {}, {"eos_token": None}, NO_TEMPLATE, (0, 1)),
        ([0, 1], {"eos_token_id": [1]}, {"eos_token": None}, NO_TEMPLATE, (1,)),
        (None, None, {"eos_token": "<|endoftext|>"}, NO_TEMPLATE, (END_OF_TEXT,)),
        (None, None, {"eos_token": "<|endoftext|>"}, {}, (END_OF_TEXT, IM_END)),  # a template: turns end, too
        (0, None, {"eos_token": "nobody knows it"}, NO_TEMPLATE, (0,)),
        ([2, 1024, 0, 2**31 - 1], None, {"eos_token": None}, NO_TEMPLATE, (2, 0)),
        (1024, None, {"eos_token": None}, NO_TEMPLATE, ()),
    ],
)
def test_ends_come_from_all_places(
    config: Any,
    generation: Any,
    tokenizer_config: dict[str, Any],
    options: dict[str, Any],
    expected: tuple[int, ...],
    tmp_path: Path,
):
    path = model_directory(
        tmp_path,
        config={"eos_token_id": config},
        generation=generation,
        tokenizer_config=tokenizer_config,
        **options,
    )
    assert ends(path) == expected
    assert TextModel.load(path).generation.eos_token_ids == expected


def test_nothing_that_transformers_stops_at_is_left_out(tmp_path: Path):
    path = model_directory(tmp_path, generation={"eos_token_id": [3, 0]}, tokenizer_config={"eos_token": TURN_END})
    theirs = GenerationConfig.from_pretrained(path).eos_token_id
    assert set(ends(path)) == {*theirs, AutoTokenizer.from_pretrained(path).eos_token_id}


def test_without_generation_config_transformers_takes_the_configs(tmp_path: Path):
    path = model_directory(tmp_path, config={"eos_token_id": [3, 0]}, tokenizer_config={"eos_token": "<|im_end|>"})
    theirs = GenerationConfig.from_model_config(PretrainedConfig.from_pretrained(path)).eos_token_id
    assert set(ends(path)) == {*theirs, IM_END}


def test_older_checkpoints_name_it_in_special_tokens_map(tmp_path: Path):
    path = model_directory(tmp_path, tokenizer_config={"eos_token": "<s>"}, config={"eos_token_id": 0}, **NO_TEMPLATE)
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert AutoTokenizer.from_pretrained(path).eos_token == "<|im_end|>"
    assert ends(path) == (0, IM_END)
    assert TextModel.load(path).special_tokens["eos_token"] == "<|im_end|>"
    content = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(content | {"added_tokens_decoder": {}}))
    assert AutoTokenizer.from_pretrained(path).eos_token == "<s>"
    assert ends(path) == (0, BOS)


def without_added(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []}))


@pytest.mark.parametrize(
    ("tokenizer", "token"), [(byte_level(), "<|im_end|>"), (unigram(), "</s>")], ids=["bpe", "uni"]
)
def test_an_end_may_be_a_plain_word_of_the_vocabulary(tokenizer: Tokenizer, token: str, tmp_path: Path):
    path = model_directory(
        tmp_path, tokenizer=without_added(tokenizer), tokenizer_config={"eos_token": token}, **NO_TEMPLATE
    )
    assert ends(path) == (2,)


def test_another_models_tokenizer_brings_its_own_end(tmp_path: Path):
    model = model_directory(tmp_path / "model", config={"eos_token_id": 0})
    lent = sentencepiece_directory(tmp_path / "tokenizer")
    assert read_generation(WithTokenizer(DirectorySource(model), DirectorySource(lent))).eos_token_ids == (0, 2)


def test_what_is_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = model_directory(tmp_path, config={"vocab_size": 288, "eos_token_id": [2, 300]})
    with caplog.at_level(logging.WARNING):
        assert ends(path) == (2,)
    assert "end tokens beyond the vocabulary are ignored" in caplog.text
