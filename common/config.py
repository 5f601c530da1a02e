"""Settings of every role. A field is a flag (--max-num-seqs) and an environment name (KVRELAY_MAX_NUM_SEQS)."""

import argparse
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from common.errors import ConfigError

ENV_PREFIX = "KVRELAY_"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Bytes(int):
    """A size in bytes; written 512Mi, 4G or as a plain number."""

    @classmethod
    def parse(cls, text: str) -> "Bytes":
        number = text.strip().lower().removesuffix("b")
        digits = number.rstrip("kmgi")
        return cls(float(digits) * UNITS[number[len(digits) :]])


def setting(default: Any, help: str, *, choices: tuple[str, ...] = (), flag: str = "") -> Any:
    """A dataclass field with its help text; default MISSING makes it required."""
    return field(default=default, metadata={"help": help, "choices": choices, "flag": flag})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: a model, its KV pool and how much a step may take on."""

    model: str = setting(MISSING, "model directory")
    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    max_model_len: int | None = setting(None, "longest prompt plus output, tokens (default: the model's own)")
    max_num_seqs: int = setting(64, "sequences running at once")
    max_num_batched_tokens: int | None = setting(
        None, "tokens a step may compute (default: 512, on decode workers 256)"
    )
    enable_prefix_caching: bool = setting(True, "keep full blocks for later requests with the same prefix")
    kv_cache_memory: Bytes = setting(Bytes(512 * 2**20), "size of the KV pool, such as 512Mi")
    threads: int | None = setting(None, "CPU threads of the step loop (default: the cores this process may use)")


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where workers and routers find each other."""

    redis_url: str = setting("redis://127.0.0.1:6379/0", "the registry and prefix index")
    redis_namespace: str = setting("kvrelay", "prefix of all keys: one cluster, one namespace")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The network side of a prefill or decode worker."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(0, "gRPC port (0: any free one)")
    advertise: str = setting("", "host:port that others reach this worker at (default: what it binds)")
    metrics_port: int = setting(0, "port of /metrics and /health over HTTP (0: any free one)")
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The HTTP side."""

    model: str = setting(MISSING, "model directory: tokenizer, chat template and defaults are read")
    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(8000, "HTTP port")
    served_model_name: str = setting("", "name in the API (default: the model directory's name)")
    max_model_len: int | None = setting(None, "longest prompt plus output, tokens (default: the model's own)")
    log_level: str = setting("info", "least level logged", choices=("debug", "info", "warning", "error"))


Config = TypeVar("Config")


def _value_type(hint: Any) -> type:
    """The one type besides None that a field takes."""
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.cast(type, hint)


def _parser_of(kind: type) -> Any:
    return Bytes.parse if kind is Bytes else kind


def _flag_name(item: Field[Any]) -> str:
    return item.metadata["flag"] or item.name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, *configs: type, environ: Mapping[str, str] = os.environ) -> None:
    """Adds a flag for each field of the configs, once; the environment gives defaults. Raises ConfigError."""
    seen = {action.dest for action in parser._actions}
    for config in configs:
        hints = typing.get_type_hints(config)
        for item in fields(config):
            if item.name in seen:
                continue
            seen.add(item.name)
            kind = _value_type(hints[item.name])
            default = None if item.default is MISSING else item.default
            env_name = ENV_PREFIX + item.name.upper()
            text = environ.get(env_name)
            if text is not None:
                default = _from_env(env_name, text, kind, item.metadata["choices"])
            options: dict[str, Any] = {"default": default, "help": item.metadata["help"], "dest": item.name}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = _parser_of(kind)
                options["choices"] = item.metadata["choices"] or None
                options["metavar"] = None if item.metadata["choices"] else item.name.upper()
                options["required"] = item.default is MISSING and text is None
            parser.add_argument(f"--{_flag_name(item)}", **options)


def _from_env(name: str, text: str, kind: type, choices: tuple[str, ...]) -> Any:
    try:
        value = {"1": True, "true": True, "0": False, "false": False}[text.lower()] if kind is bool else None
        value = _parser_of(kind)(text) if value is None else value
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{name}={text!r} is not a {kind.__name__}", field=name) from error
    if choices and value not in choices:
        raise ConfigError(f"{name}={text!r} is none of {', '.join(choices)}", field=name)
    return value


def from_arguments(config: type[Config], arguments: argparse.Namespace) -> Config:
    """The slice of parsed arguments that is one component's."""
    return config(**{item.name: getattr(arguments, item.name) for item in fields(config)})  # type: ignore[arg-type]
