"""Token ids of plain and of chat prompts are those of transformers, whatever tokenizer_config.json adds or repeats."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from common.text.text_model import TextModel
from tests.support.tiny_text import CONVERSATIONS, byte_level, model_directory
from tests.support.tokenizer_kinds import KINDS

TEXTS = (
    "hello world", " two  spaces ", "", "a<|im_end|>b", "x <think> y", "Über 東京 \N{GRINNING FACE}",
    "tab\tnew\nline", "<new>after <new> x", "<unk></s>x",
)  # fmt: skip
PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
QUIRKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bos told": {"add_bos_token": True},
    "bos and eos told": {"add_bos_token": True, "add_eos_token": True},
    "bos denied": {"add_bos_token": False, "add_eos_token": False},
    "prefix space told": {"add_prefix_space": True, "legacy": True},
    "prefix space denied": {"add_prefix_space": False, "legacy": False},
    "no length": {"model_max_length": 1000000000000000019884624838656},
    "cleaned up": {"clean_up_tokenization_spaces": True},
    "listed": {"added_tokens_decoder": {"900": {"content": "<new>", **PLAIN, "special": False}}},
    "listed as special": {"added_tokens_decoder": {"900": {"content": "<new>", **PLAIN, "special": True}}},
    "listed and stripped": {"added_tokens_decoder": {"900": {"content": "<new>", **PLAIN, "lstrip": True}}},
    "listed otherwise": {
        "added_tokens_decoder": {"400": {"content": "<think>", **PLAIN, "lstrip": True, "rstrip": True}}
    },
    "named": {"pad_token": "<new>"},
    "named and stripped": {"pad_token": {"__type": "AddedToken", "content": "<new>", **PLAIN, "lstrip": True}},
    "additional": {"additional_special_tokens": ["<new>", "<s>"]},
    "extra": {"extra_special_tokens": ["<new>"]},
    "extra by name": {"extra_special_tokens": {"image_token": "<new>"}},
}


@lru_cache
def kind_of(name: str) -> Tokenizer:
    return byte_level(bos=True) if name == "bos" else KINDS[name]()


@pytest.mark.parametrize("quirk", QUIRKS)
@pytest.mark.parametrize("kind", ["byte_level", "bos", "sentencepiece", "metaspace_first", "unigram"])
def test_ids_are_those_of_transformers(kind: str, quirk: str, tmp_path: Path):
    tokenizer = kind_of(kind)
    eos = "</s>" if tokenizer.token_to_id("</s>") is not None else "<|im_end|>"
    directory = model_directory(tmp_path, tokenizer=tokenizer, tokenizer_config={"eos_token": eos} | QUIRKS[quirk])
    ours, theirs = TextModel.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    assert [ours.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]
    for messages in CONVERSATIONS:
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode_chat(messages) == wanted
