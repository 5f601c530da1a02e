"""Settings of every role. A field is a flag (--max-num-seqs) and an environment name (KVRELAY_MAX_NUM_SEQS)."""

import argparse
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from common.errors import ConfigError

ENV_PREFIX = "KVRELAY_"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.ASCII | re.IGNORECASE)
PORTS = (0, 65535)
POSITIVE = (1, None)


class Bytes(int):
    """A size in bytes; written 512Mi, 4G or as a plain number."""

    @classmethod
    def parse(cls, text: str) -> "Bytes":
        """Raises ValueError."""
        match = SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a size such as 512Mi")
        number, unit = match.groups()
        return cls(float(number) * UNITS[(unit or "").lower()])


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    within: tuple[float | None, float | None] = (None, None),
    flag: str = "",
    secret: bool = False,
) -> Any:
    """A dataclass field with its help text and bounds (both inclusive); default MISSING makes it required.

    A secret is in no repr and, to other processes, only in their environment.
    """
    metadata = {"help": help, "choices": choices, "within": within, "flag": flag, "secret": secret}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, of those who compute with it and of those who handle its text."""

    model: str = setting(MISSING, "model directory, GGUF file or owner/name on the Hugging Face hub")
    load_format: str = setting("auto", "of the weights (auto: what is there)", choices=("auto", "safetensors", "gguf"))
    revision: str | None = setting(None, "branch, tag or commit on the hub (default: its main branch)")
    tokenizer: str | None = setting(None, "another model, for its tokenizer and chat template (default: the model's)")
    served_model_name: str = setting("", "name in the API and in metrics (default: the model's own)")


@dataclass(frozen=True, slots=True)
class EngineConfig(ModelSettings):
    """One engine: a model, its KV pool and how much a step may take on."""

    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    max_model_len: int | None = setting(
        None, "longest prompt plus output, tokens (default: the model's own)", within=POSITIVE
    )
    max_num_seqs: int = setting(64, "sequences running at once", within=POSITIVE)
    max_num_batched_tokens: int | None = setting(
        None, "tokens a step may compute (default: 512, on decode workers 256)", within=POSITIVE
    )
    enable_prefix_caching: bool = setting(True, "keep full blocks for later requests with the same prefix")
    kv_cache_memory: Bytes | None = setting(
        None, "size of the KV pool, such as 512Mi (default: this worker's part of the memory)", within=POSITIVE
    )
    attention_backend: str = setting(
        "auto",
        "attention's code: compiled here for this CPU, or torch's operations",
        choices=("auto", "native", "torch"),
    )
    gpu_memory_utilization: float = setting(
        0.5, "share of the memory that all workers of this host may use together", within=(0.01, 1.0)
    )
    workers_per_host: int = setting(1, "workers on this host, which share its memory", within=POSITIVE)
    threads: int | None = setting(
        None, "CPU threads of the step loop (default: the cores this process may use)", within=POSITIVE
    )


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where workers and routers find each other."""

    redis_url: str = setting("redis://127.0.0.1:6379/0", "the registry and prefix index")
    redis_namespace: str = setting("kvrelay", "prefix of all keys: one cluster, one namespace")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The network side of a prefill or decode worker."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(0, "gRPC port (0: any free one)", within=PORTS)
    advertise: str = setting("", "host:port that others reach this worker at (default: what it binds)")
    metrics_port: int = setting(0, "port of /metrics and /health over HTTP (0: any free one)", within=PORTS)
    worker_id: str = setting("", "name in logs, metrics and Redis, unique there (default: role and address)")
    transport: str = setting("auto", "ways to move KV, best first, comma-separated (auto: all that can be proven)")
    max_held_kv: float = setting(
        0.75,
        "share of a prefill worker's blocks that may be held for others before it refuses prompts",
        within=(0.0, 1.0),
    )
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to end after SIGTERM", within=(0.0, 86400.0)
    )
    deadline_scale: float = setting(1.0, "factor on all time-outs; for tests", within=(1e-3, 1e3))


@dataclass(frozen=True, slots=True)
class RouterConfig(ModelSettings):
    """The HTTP side."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(8000, "HTTP port", within=PORTS)
    max_model_len: int | None = setting(
        None, "longest prompt plus output, tokens (default: the model's own)", within=POSITIVE
    )
    api_key: str = setting("", "keys that clients must show one of, comma-separated (default: none)", secret=True)
    allowed_origins: str = setting("", "origins that browsers may call from, comma-separated, or * (default: none)")
    max_unsplit_tokens: int = setting(
        32, "prompts with so few uncached tokens may skip the prefill pool, where that is quicker", within=(0, None)
    )
    max_queued_requests: int = setting(
        1024, "requests that may wait for room in the decode pool; more are refused (429)", within=(0, None)
    )
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to end after SIGTERM", within=(0.0, 86400.0)
    )
    deadline_scale: float = setting(1.0, "factor on all time-outs; for tests", within=(1e-3, 1e3))


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one HTTP request may ask for."""

    max_body_size: Bytes = setting(Bytes(64 * 2**20), "of a request, such as 64Mi", within=POSITIVE)
    max_n: int = setting(16, "answers to one prompt", within=(1, 128))
    max_answers: int = setting(256, "answers to one request: its prompts times n", within=POSITIVE)
    max_stop_strings: int = setting(16, "stop strings of one request", within=(1, 128))
    max_logit_bias: int = setting(1024, "entries of logit_bias", within=(1, 8192))
    max_bad_words: int = setting(128, "entries of bad_words", within=(1, 1024))


Config = TypeVar("Config")
KIND_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "one of 1, true, 0, false",
    Bytes: "a size such as 512Mi",
}


def _value_type(hint: Any) -> type:
    """The one type besides None that a field takes."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.cast(type, hint)


def _parser_of(kind: type) -> Callable[[str], Any]:
    return Bytes.parse if kind is Bytes else kind


def _argument_of(kind: type) -> Callable[[str], Any]:
    """The parser with a message of ours, which argparse shows."""

    def parse(text: str) -> Any:
        try:
            return _parser_of(kind)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {KIND_NAMES[kind]}") from error

    return parse


def flag_of(item: Field[Any]) -> str:
    """The command-line flag of a field, without its dashes."""
    return str(item.metadata["flag"] or item.name.replace("_", "-"))


def env_of(item: Field[Any]) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + item.name.upper()


def add_arguments(
    parser: argparse.ArgumentParser,
    *configs: type,
    skip: Collection[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Adds a flag for each field of the configs, once; the environment gives defaults. Raises ConfigError."""
    parser.allow_abbrev = False  # what isn't a field's flag is an error
    seen = {action.dest for action in parser._actions} | set(skip)
    for config in configs:
        hints = typing.get_type_hints(config)
        for item in fields(config):
            if item.name in seen:
                continue
            seen.add(item.name)
            kind = _value_type(hints[item.name])
            default = None if item.default is MISSING else item.default
            text = environ.get(env_of(item))
            if text is not None:
                default = _from_env(env_of(item), text, kind, item.metadata["choices"])
            options: dict[str, Any] = {"default": default, "help": item.metadata["help"], "dest": item.name}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = _argument_of(kind)
                options["choices"] = item.metadata["choices"] or None
                options["metavar"] = None if item.metadata["choices"] else item.name.upper()
                options["required"] = item.default is MISSING and text is None
            parser.add_argument(f"--{flag_of(item)}", **options)


def _from_env(name: str, text: str, kind: type, choices: tuple[str, ...]) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        value = _parser_of(kind)(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{name}={text!r} is not {KIND_NAMES[kind]}", field=name) from error
    if choices and value not in choices:
        raise ConfigError(f"{name}={text!r} is none of {', '.join(choices)}", field=name)
    return value


def from_arguments(config: type[Config], arguments: argparse.Namespace, *, skip: Collection[str] = ()) -> Config:
    """The slice of parsed arguments that is one component's. Raises ConfigError for a value out of bounds."""
    items = [item for item in fields(config) if item.name not in skip]  # type: ignore[arg-type]
    values = {item.name: getattr(arguments, item.name) for item in items}
    for item in items:
        (low, high), value = item.metadata["within"], values[item.name]
        if value is None:
            continue
        if not ((low is None or value >= low) and (high is None or value <= high)):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"--{flag_of(item)} must be {wanted}, got {value}", field=item.name)
    return config(**values)


def listed(text: str) -> tuple[str, ...]:
    """The items of a comma-separated setting."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def to_arguments(config: Any) -> list[str]:
    """The flags that make this config again; what equals its default is left out, and so are secrets."""
    flags: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if value is None or item.metadata["secret"] or (item.default is not MISSING and value == item.default):
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag_of(item)}" if value else f"--no-{flag_of(item)}")
        else:
            flags.append(f"--{flag_of(item)}={value}")
    return flags


def to_environment(config: Any) -> dict[str, str]:
    """A config's secrets: what any user could read in a command line."""
    secrets = [item for item in fields(config) if item.metadata["secret"]]
    return {env_of(item): getattr(config, item.name) for item in secrets if getattr(config, item.name)}
