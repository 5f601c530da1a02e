"""Settings come from flags and the environment, every bad value is an error that names its field, and none is lost."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from types import SimpleNamespace

import pytest

from common.discovery.config import RedisConfig
from common.engine.config import EngineConfig
from common.errors import ConfigError
from common.settings import Bytes, add_arguments, from_arguments, listed, setting, to_arguments, to_environment
from common.worker.config import WorkerConfig
from router.config import RouterConfig


def parse(*argv: str, configs: Sequence[type] = (EngineConfig,), environ: dict[str, str] | None = None):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, *configs, environ=environ or {})
    return parser.parse_args(argv)


def engine(*argv: str, environ: dict[str, str] | None = None) -> EngineConfig:
    return from_arguments(EngineConfig, parse(*argv, environ=environ))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1Ki", 1024),
        ("512Mi", 512 * 2**20),
        ("512MiB", 512 * 2**20),
        ("4G", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("1.5 Gi", 3 * 2**29),
        (" 2m ", 2 * 10**6),
        ("7b", 7),
    ],
)
def test_sizes_are_read_with_decimal_and_binary_units(text, size):
    assert Bytes.parse(text) == size


@pytest.mark.parametrize(
    "text", ["", "Mi", "4i", "4ib", "12q", "-1", "-1Mi", "nan", "inf", "1e3", "1..5", "1 2", "4bb", "٤"]
)
def test_what_is_no_size_is_a_value_error(text):
    with pytest.raises(ValueError):
        Bytes.parse(text)


def test_defaults_hold_without_flags_and_environment():
    assert engine("--model", "m") == EngineConfig(model="m")


def test_a_flag_beats_the_environment_and_the_environment_beats_the_default():
    environ = {"KVRELAY_MAX_NUM_SEQS": "7", "KVRELAY_THREADS": "3"}
    config = engine("--model", "m", "--threads", "1", environ=environ)
    assert (config.max_num_seqs, config.threads) == (7, 1)


def test_a_required_field_may_come_from_the_environment():
    assert engine(environ={"KVRELAY_MODEL": "m"}).model == "m"


def test_a_missing_required_field_is_named():
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("False", False), ("0", False)])
def test_a_switch_is_read_from_the_environment(text, value):
    assert engine("--model", "m", environ={"KVRELAY_ENABLE_PREFIX_CACHING": text}).enable_prefix_caching is value


def test_a_switch_has_a_negative_flag():
    assert not engine("--model", "m", "--no-enable-prefix-caching").enable_prefix_caching


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVRELAY_MAX_NUM_SEQS", "many"),
        ("KVRELAY_MAX_NUM_SEQS", ""),
        ("KVRELAY_MAX_NUM_SEQS", "1.5"),
        ("KVRELAY_ENABLE_PREFIX_CACHING", "maybe"),
        ("KVRELAY_KV_CACHE_MEMORY", "4x"),
        ("KVRELAY_KV_CACHE_MEMORY", "inf"),
        ("KVRELAY_DTYPE", "int3"),
    ],
)
def test_a_bad_environment_value_is_an_error_that_names_it(name, text):
    with pytest.raises(ConfigError, match=name) as caught:
        parse("--model", "m", environ={name: text})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--max-num-seqs", "many"), ("--kv-cache-memory", "4x"), ("--dtype", "int3")],
)
def test_a_bad_flag_value_is_an_error_that_names_it(flag, text):
    with pytest.raises(argparse.ArgumentError, match=flag):
        parse("--model", "m", flag, text)


@pytest.mark.parametrize("flag", ["--max-num", "--unknown"])
def test_an_unknown_or_shortened_flag_is_refused(flag):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("--model", "m", flag, "3")


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("--max-num-seqs", "0", False),
        ("--max-num-seqs", "1", True),
        ("--threads", "-1", False),
        ("--kv-cache-memory", "0", False),
        ("--max-model-len", "0", False),
        ("--max-num-batched-tokens", "1", True),
    ],
)
def test_numbers_are_held_to_their_bounds(flag, text, allowed):
    if allowed:
        engine("--model", "m", f"{flag}={text}")
        return
    with pytest.raises(ConfigError, match=flag) as caught:
        engine("--model", "m", f"{flag}={text}")
    assert caught.value.field == flag.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize(("port", "allowed"), [("-1", False), ("0", True), ("65535", True), ("65536", False)])
def test_ports_are_held_to_their_bounds(port, allowed):
    arguments = parse(f"--port={port}", configs=[WorkerConfig])
    if allowed:
        assert from_arguments(WorkerConfig, arguments).port == int(port)
    else:
        with pytest.raises(ConfigError, match="--port must be between 0 and 65535"):
            from_arguments(WorkerConfig, arguments)


LINKS = {
    "KVRELAY_SERVICE_HOST": "10.96.0.12",
    "KVRELAY_SERVICE_PORT": "8000",
    "KVRELAY_SERVICE_PORT_HTTP": "8000",
    "KVRELAY_PORT": "tcp://10.96.0.12:8000",
    "KVRELAY_PORT_8000_TCP": "tcp://10.96.0.12:8000",
    "KVRELAY_PORT_8000_TCP_PROTO": "tcp",
    "KVRELAY_PORT_8000_TCP_PORT": "8000",
    "KVRELAY_PORT_8000_TCP_ADDR": "10.96.0.12",
}


@pytest.mark.parametrize("prefix", ["KVRELAY", "KVRELAY_METRICS"])
@pytest.mark.parametrize("url", ["tcp://10.96.0.12:8000", "udp://10.96.0.12:8000", "tcp://[fd00::12]:8000"])
def test_links_to_a_service_of_our_name_are_no_settings(prefix, url):
    environ = {name.replace("KVRELAY", prefix, 1): text for name, text in (LINKS | {"KVRELAY_PORT": url}).items()}
    assert from_arguments(WorkerConfig, parse(configs=[WorkerConfig], environ=environ)) == WorkerConfig()


def test_a_port_that_is_set_beside_links_counts():
    arguments = parse(configs=[WorkerConfig], environ=LINKS | {"KVRELAY_PORT": "7001"})
    assert arguments.port == 7001


def test_a_url_that_no_service_explains_is_a_mistake():
    with pytest.raises(ConfigError, match=r"KVRELAY_PORT='tcp://0\.0\.0\.0:8000' is not a whole number"):
        parse(configs=[WorkerConfig], environ={"KVRELAY_PORT": "tcp://0.0.0.0:8000"})


def test_bounds_hold_for_values_of_the_environment_too():
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        engine("--model", "m", environ={"KVRELAY_MAX_NUM_SEQS": "0"})


def test_configs_may_share_a_field_and_the_first_gives_the_default():
    arguments = parse("--model", "m", configs=[RouterConfig, EngineConfig, RedisConfig])
    assert from_arguments(RouterConfig, arguments) == RouterConfig(model="m")
    assert from_arguments(EngineConfig, arguments) == EngineConfig(model="m")
    assert from_arguments(RedisConfig, arguments) == RedisConfig()


def test_fields_may_be_skipped_and_then_have_their_defaults():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, WorkerConfig, skip=("host", "port"), environ={"KVRELAY_PORT": "no number"})
    arguments = parser.parse_args(["--worker-id", "w"])
    assert "host" not in arguments
    assert from_arguments(WorkerConfig, arguments, skip=("host", "port")) == WorkerConfig(worker_id="w")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9"])
def test_a_deadline_factor_is_a_sensible_number(text):
    with pytest.raises(ConfigError, match="--deadline-scale must be between"):
        from_arguments(WorkerConfig, parse(f"--deadline-scale={text}", configs=[WorkerConfig]))


ENGINE = EngineConfig(model="m")


@pytest.mark.parametrize(
    "config",
    [
        ENGINE,
        replace(
            ENGINE,
            model="-a folder with spaces",
            dtype="float32",
            max_model_len=100,
            enable_prefix_caching=False,
            kv_cache_memory=Bytes(123456789),
            threads=2,
        ),
        WorkerConfig(host="::1", port=1, advertise="h:1", log_level="debug"),
        RouterConfig(model="m", port=0, served_model_name=""),
        RedisConfig(redis_namespace="n"),
    ],
)
def test_the_flags_of_a_config_make_the_same_config(config):
    assert from_arguments(type(config), parse(*to_arguments(config), configs=[type(config)])) == config


def test_a_secret_is_in_no_flag_and_no_repr_and_goes_by_the_environment():
    config = RouterConfig(model="m", api_key="s3cret")
    assert "s3cret" not in f"{config} {to_arguments(config)}"
    assert to_environment(config) == {"KVRELAY_API_KEY": "s3cret"}
    redis = RedisConfig(redis_url="redis://:s3cret@h:1/0")
    assert "s3cret" not in f"{redis} {to_arguments(redis)}"
    assert to_environment(redis) == {"KVRELAY_REDIS_URL": "redis://:s3cret@h:1/0"}
    arguments = parse(*to_arguments(config), configs=[RouterConfig], environ=to_environment(config))
    assert from_arguments(RouterConfig, arguments) == config
    assert to_environment(RouterConfig(model="m")) == {}


@pytest.mark.parametrize(("text", "items"), [("", ()), (" , ", ()), ("a", ("a",)), (" a, b ,", ("a", "b"))])
def test_listed_items_are_between_commas(text, items):
    assert listed(text) == items


def test_defaults_make_no_flags():
    assert to_arguments(WorkerConfig()) == []


def test_every_setting_is_explained_and_has_a_readable_type():
    @dataclass(frozen=True)
    class Every:
        text: str = setting(MISSING, "a")
        number: float = setting(0.5, "b", flag="other-name")

    assert from_arguments(Every, parse("--text", "t", "--other-name", "2.5", configs=[Every])) == Every("t", 2.5)
    with pytest.raises(argparse.ArgumentError, match="'x' is not a number"):
        parse("--text", "t", "--other-name", "x", configs=[Every])


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ((), ("own",)),
        (("--served-model-name", "a"), ("a",)),
        (("--served-model-name", "a, b"), ("a", "b")),
        (("--served-model-name", "a", "--served-model-name=b,c"), ("a", "b", "c")),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_model_has_the_names_of_all_flags_else_of_the_environment_else_its_own(argv, names, named):
    environ = {"KVRELAY_SERVED_MODEL_NAME": "x,y"} if named else {}
    settings = engine("--model", "m", *argv, environ=environ)
    assert settings.names(SimpleNamespace(name="own")) == (("x", "y") if named and not argv else names)
    again = engine(*to_arguments(settings))
    assert again == settings
