"""/tokenize and /detokenize give what the models see: transformers' token ids, strings and text."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.text.text_model import TextModel
from router.openai.tokenize import MAX_CHARS
from tests.support.http_tools import CHAT, MODEL, serve
from tests.support.tiny_text import byte_level, model_directory, sentencepiece_directory

TEXTS = ["hello", "", " ", "Über 東京 \U0001f600<|im_end|>x", "</think>", "a" * 70_000]
KINDS = {
    "plain": model_directory,
    "bos": lambda path: model_directory(path, tokenizer=byte_level(bos=True)),
    "sentencepiece": sentencepiece_directory,
}


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def text(directory: Path) -> TextModel:
    return TextModel.load(directory)


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("prompt", TEXTS, ids=lambda prompt: prompt[:8])
@pytest.mark.parametrize("special", [None, True, False])
async def test_prompts(text: TextModel, reference: PreTrainedTokenizerFast, prompt: str, special: bool | None) -> None:
    fields = {} if special is None else {"add_special_tokens": special}
    async with serve(text) as served:
        response, reply = await served.post("/tokenize", {"prompt": prompt, "return_token_strs": True, **fields})
    ids = reference.encode(prompt, add_special_tokens=special is not False)
    assert response.status == 200
    assert reply == {
        "count": len(ids),
        "max_model_len": 128,
        "tokens": ids,
        "token_strs": reference.convert_ids_to_tokens(ids),
    }


@pytest.mark.parametrize("generation", [None, True, False])
async def test_messages(text: TextModel, reference: PreTrainedTokenizerFast, generation: bool | None) -> None:
    fields = {} if generation is None else {"add_generation_prompt": generation}
    async with serve(text) as served:
        _, reply = await served.post("/tokenize", {"model": MODEL, "messages": CHAT["messages"], **fields})
    wanted = reference.apply_chat_template(
        CHAT["messages"], add_generation_prompt=generation is not False, return_dict=False
    )
    assert (reply["tokens"], reply["count"], reply["token_strs"]) == (wanted, len(wanted), None)


@pytest.mark.parametrize("prompt", [prompt for prompt in TEXTS if prompt], ids=lambda prompt: prompt[:8])
async def test_detokenizing(text: TextModel, reference: PreTrainedTokenizerFast, prompt: str) -> None:
    ids = reference.encode(prompt, add_special_tokens=False)
    async with serve(text) as served:
        response, reply = await served.post("/detokenize", {"tokens": ids})
        _, empty = await served.post("/detokenize", {"tokens": [], "model": MODEL})
    assert response.status == 200
    assert reply == {"prompt": reference.decode(ids)}
    assert empty == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 1024]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_wrong_field_is_named(text: TextModel, path: str, body: Any, status: int, field: str) -> None:
    async with serve(text) as served:
        response, reply = await served.post(path, body)
    assert (response.status, reply["error"]["param"]) == (status, field)


@pytest.mark.parametrize("excess", [0, 1])
async def test_texts_have_a_limit(text: TextModel, monkeypatch: pytest.MonkeyPatch, excess: int) -> None:
    size = MAX_CHARS + excess
    half = {"role": "user", "content": "a " * (size // 4)}
    rest = {"role": "user", "content": "a" * (size - 2 * len(half["content"]))}
    monkeypatch.setattr(text, "encode", lambda *_, **__: [5])
    monkeypatch.setattr(text, "encode_chat", lambda *_, **__: [5])
    async with serve(text) as served:
        one, reply = await served.post("/tokenize", {"prompt": "a" * size})
        several, _ = await served.post("/tokenize", {"messages": [half, rest, half]})
    assert (one.status, several.status) == ((400, 400) if excess else (200, 200))
    assert not excess or str(MAX_CHARS) in reply["error"]["message"]


async def test_ids_that_only_the_model_has_are_no_text(text: TextModel) -> None:
    async with serve(text) as served:
        _, reply = await served.post("/detokenize", {"tokens": [1023]})
    assert reply == {"prompt": ""}
