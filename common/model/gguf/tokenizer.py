"""A GGUF file's tokenizer as the content of tokenizer.json and tokenizer_config.json; needs no tokenizer library.

Two kinds are written: byte-level BPE (`gpt2`), which differs from family to family in how it splits text before
merging, and SentencePiece's BPE (`llama`), whose merges follow from the scores.
"""

import math
from typing import Any

from common.model.gguf.config import CONTROL
from common.model.gguf.header import GgufFile

Json = dict[str, Any]

_UNKNOWN, _USER_DEFINED = 2, 4  # tokenizer.ggml.token_type
_LONGEST_PIECE = 128  # characters of a token that others make; a hostile one of megabytes would take hours to cut
_SPACE = "\u2581"  # SentencePiece's letter for a space
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# How text is split before merging, by tokenizer.ggml.pre: the regular expressions of the models' own tokenizer.json.
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_BREAKS}"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_BREAKS}"
_TEKKEN = rf"{_LETTERS}{_UPPER}*{_LOWER}+|{_LETTERS}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_BREAKS}"
_GPT4O = (
    rf"{_LETTERS}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_LETTERS}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_BREAKS}"
)
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # a word in the vocabulary needs no merges
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
_PLAIN = ("default", "gpt-2", "gpt2")  # GPT-2's own split
_DIGITS = ("smollm",)  # the same, with digits one by one


def tokenizer_kind(file: GgufFile) -> str:
    """What people call it, such as gpt2/llama-bpe."""
    model, pre = file.get("tokenizer.ggml.model", str), file.optional("tokenizer.ggml.pre", str)
    return f"{model}/{pre}" if pre and model == "gpt2" else str(model)


def gguf_tokenizer(file: GgufFile) -> Json:
    """As tokenizer.json. Raises ModelError for a kind that is not supported, and for what doesn't fit together."""
    model = file.get("tokenizer.ggml.model", str)
    if model not in _BUILDERS:
        raise file.error("tokenizer.ggml.model", f"{model[:60]!r} is not supported (only {' and '.join(_BUILDERS)})")
    tokens = file.items("tokenizer.ggml.tokens", str)
    if not tokens:
        raise file.error("tokenizer.ggml.tokens", "is missing")
    kinds = file.items("tokenizer.ggml.token_type", int) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.error("tokenizer.ggml.token_type", f"has {len(kinds)} entries for {len(tokens)} tokens")
    content: Json = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None}
    content |= _BUILDERS[model](file, tokens)
    vocab = content["model"]["vocab"]
    if len(vocab) != len(tokens):
        raise file.error("tokenizer.ggml.tokens", f"has {len(tokens) - len(vocab)} tokens twice")
    content["added_tokens"] = [
        _added(token, vocab[token], special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, _USER_DEFINED) and token and token in vocab
    ]
    content["post_processor"] = _template(file, tokens)
    return content


def gguf_tokenizer_config(file: GgufFile) -> Json:
    """As tokenizer_config.json."""
    tokens = file.items("tokenizer.ggml.tokens", str) or []
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": list(control_tokens(file)),
        "clean_up_tokenization_spaces": False,
    }
    for name, role in _ROLES.items():
        token_id = _token_id(file, role, len(tokens))
        if token_id is not None:
            config[name] = tokens[token_id]
    config["add_bos_token"], config["add_eos_token"] = _adds(file)
    template = file.optional("tokenizer.chat_template", str)
    return config | ({} if template is None else {"chat_template": template})


def control_tokens(file: GgufFile) -> dict[str, int]:
    """Special tokens, by their text."""
    tokens, kinds = file.items("tokenizer.ggml.tokens", str) or [], file.items("tokenizer.ggml.token_type", int) or []
    return {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL}


def _token_id(file: GgufFile, role: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id: int | None = file.optional(key, int)
    if token_id is not None and not 0 <= token_id < count:
        raise file.error(key, f"is {token_id}, there are {count} tokens")
    return token_id


def _adds(file: GgufFile) -> tuple[bool, bool]:
    """Whether a text gets a BOS before it, and an EOS after it."""
    bos = file.optional("tokenizer.ggml.add_bos_token", bool)
    if bos is None:
        bos = _is_sentencepiece(file) or file.optional("tokenizer.ggml.pre", str) in _BOS_BY_DEFAULT
    return bos, file.optional("tokenizer.ggml.add_eos_token", bool) or False


def _is_sentencepiece(file: GgufFile) -> bool:
    return bool(file.get("tokenizer.ggml.model", str) == "llama")


def _template(file: GgufFile, tokens: list[str]) -> Json | None:
    """The post-processor that adds BOS and EOS."""
    named = dict(zip(("bos", "eos"), _adds(file), strict=True))
    ids = {role: _token_id(file, role, len(tokens)) for role, added in named.items() if added}
    special = {role: token_id for role, token_id in ids.items() if token_id is not None}
    if not special:
        return None
    sequence: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    for parts in (sequence, pair):
        if "bos" in special:
            parts.insert(0, {"SpecialToken": {"id": tokens[special["bos"]], "type_id": 0}})
        if "eos" in special:
            parts.append({"SpecialToken": {"id": tokens[special["eos"]], "type_id": 0}})
    entries = {
        tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
        for token_id in special.values()
    }
    return {"type": "TemplateProcessing", "single": sequence, "pair": pair, "special_tokens": entries}


def _added(token: str, token_id: int, *, special: bool) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **flags, "special": special}


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[list[str]] | None:
    """Pairs of tokens, best first; each with the whole in the vocabulary."""
    lines = file.items("tokenizer.ggml.merges", str)
    if lines is None:
        return None
    pairs = [line.split(" ") for line in lines]
    for pair in pairs:
        if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab):
            raise file.error("tokenizer.ggml.merges", f"has {' '.join(pair)[:40]!r}: no two tokens that make a third")
    return pairs


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Json:
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return model | options | {"vocab": vocab, "merges": merges}


def _byte_level(file: GgufFile, tokens: list[str]) -> Json:
    pre = file.optional("tokenizer.ggml.pre", str) or "default"
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if pre in _SPLITS:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps: Json = {"type": "Sequence", "pretokenizers": [split, {**whole, "use_regex": False}]}
    elif pre in _DIGITS:
        steps = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, whole]}
    elif pre in _PLAIN:
        steps = whole
    else:
        known = ", ".join((*_SPLITS, *_DIGITS, *_PLAIN))
        raise file.error("tokenizer.ggml.pre", f"{pre[:60]!r} is a pre-tokenizer that is not supported (only {known})")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(file, vocab)
    if merges is None:
        raise file.error("tokenizer.ggml.merges", "is missing")
    model = _bpe(vocab, merges, ignore_merges=pre in _WHOLE_WORDS)
    return {"pre_tokenizer": steps, "decoder": {**whole, "add_prefix_space": True}, "model": model}


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Json:
    """Gemma's and Phi-3's own tokenizer.json have other ways to the prefix space than Llama's."""
    architecture = file.get("general.architecture", str)
    is_gemma = architecture.startswith("gemma")
    if is_gemma:  # tokens of spaces alone come as spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(file, vocab)
    if merges is None:
        # Gemma's merges are in the order of the vocabulary, not in that of its scores.
        order = [-float(i) for i in range(len(tokens))] if is_gemma else _scores(file, len(tokens))
        merges = _merges_of(tokens, vocab, order)
    unknown = _token_id(file, "unknown", len(tokens))
    model = _bpe(
        vocab,
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else tokens[unknown],
    )
    prefix = file.optional("tokenizer.ggml.add_space_prefix", bool) is not False and not is_gemma
    decoders: list[Json] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    content: Json = {"decoder": {"type": "Sequence", "decoders": decoders}, "model": model}
    if is_gemma:
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        return content | {"normalizer": spaces, "pre_tokenizer": split}
    if architecture == "phi3":
        steps = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
        return content | {"normalizer": {"type": "Sequence", "normalizers": [*steps, spaces]}}
    scheme = "first" if prefix else "never"
    words = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    return content | {"pre_tokenizer": words}


def _scores(file: GgufFile, count: int) -> list[float]:
    scores = file.items("tokenizer.ggml.scores", float)
    if scores is None or len(scores) != count or not all(math.isfinite(score) for score in scores):
        raise file.error("tokenizer.ggml.scores", f"must be a finite number for each of {count} tokens")
    return scores


def _merges_of(tokens: list[str], vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Every way to make a token of two others, the best token first.

    That is what SentencePiece's BPE does: it joins the two neighbours whose whole has the best score.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _LONGEST_PIECE:
            continue
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in found]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
