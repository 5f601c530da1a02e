"""Builds tiny model directories whose text side is real: a trained BPE tokenizer, special tokens, a chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
CORPUS = [
    "the relay hands the cache over, and the other pool writes the answer token by token",
    "a user asks: what is the capital of France? the assistant says: Paris.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # 3",
    "Über die Brücke gehen größere Züge; 東京は日本の首都です。 \N{GRINNING FACE}\N{THUMBS UP SIGN}",
    "<|im_start|> system user assistant <|im_end|> endoftext im_end im_start",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}\n"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
SYSTEM, USER, ASSISTANT = (
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "  What is the capital of France? <think> \n"},
    {"role": "assistant", "content": 'Über 東京 \N{GRINNING FACE} & <b>Paris</b> "quoted"'},
)
CONVERSATIONS = ([USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER], [{"role": "user", "content": ""}])
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def byte_level(vocab_size: int = 400, bos: bool = False) -> Tokenizer:
    """GPT-2's kind; bos: <s> is put before every prompt, as Llama 3's tokenizer does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])  # added, but not special
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def sentencepiece_like(vocab_size: int = 500) -> Tokenizer:
    """Llama 2's kind: spaces as ▁, bytes as <0xNN> where no letter is known."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # the byte tokens are ordinary vocabulary
    return Tokenizer.from_str(json.dumps(data))


def model_directory(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: str | None = CHATML,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Writes config.json, tokenizer.json, tokenizer_config.json and, where given, the two others."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (tokenizer or byte_level()).save(str(path / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "bos_token": "<s>", **(tokenizer_config or {})}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def sentencepiece_directory(path: Path) -> Path:
    return model_directory(
        path,
        tokenizer=sentencepiece_like(),
        chat_template="{{ bos_token }}{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{% endfor %}",
        tokenizer_config={"eos_token": "</s>", "unk_token": "<unk>"},
    )


def special_token(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, **flags)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def phi_like() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([special_token(f"<|{word}|>", rstrip=True) for word in ("user", "assistant", "end")])
    return tokenizer
