"""Settings of every role. A field is a flag (--max-num-seqs) and an environment name (KVRELAY_MAX_NUM_SEQS)."""

import argparse
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from common.errors import ConfigError
from common.service_links import service_links

ENV_PREFIX = "KVRELAY_"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.ASCII | re.IGNORECASE)
PORTS = (0, 65535)
POSITIVE = (1, None)
TIMES = (0.001, 7 * 86400.0)  # seconds


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
    repeats: bool = False,
) -> Any:
    """A dataclass field with its help text and bounds (both inclusive); default MISSING makes it required.

    A secret is in no repr and, to other processes, only in their environment. One that repeats is a text of
    comma-separated items, of which each flag may give some.
    """
    metadata = {"help": help, "choices": choices, "within": within, "flag": flag, "secret": secret, "repeats": repeats}
    return field(default=default, metadata=metadata, repr=not secret)


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


class _Repeated(argparse.Action):
    """Flags of one name, joined by commas; the first takes the default's place."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is self.default else f"{before},{values}")


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
    links = service_links(environ)
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
            text = None if env_of(item) in links else environ.get(env_of(item))
            if text is not None:
                default = _from_env(item, text, kind)
            options: dict[str, Any] = {"default": default, "help": item.metadata["help"], "dest": item.name}
            if item.metadata["repeats"]:
                options["action"] = _Repeated
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = _argument_of(kind)
                options["choices"] = item.metadata["choices"] or None
                options["metavar"] = None if item.metadata["choices"] else item.name.upper()
                options["required"] = item.default is MISSING and text is None
            parser.add_argument(f"--{flag_of(item)}", **options)


def _from_env(item: Field[Any], text: str, kind: type) -> Any:
    name, choices = env_of(item), item.metadata["choices"]
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
