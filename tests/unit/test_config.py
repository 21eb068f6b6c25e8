"""Settings: where each value comes from, and what a wrong one is told."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.cli.config import shown
from cachesvc.config.errors import ConfigError
from cachesvc.config.idle import idle_settings
from cachesvc.config.places import default_data_dir
from cachesvc.config.quantities import format_duration, format_size, parse_duration, parse_size
from cachesvc.config.settings import Settings, env_name, main_of
from cachesvc.config.sources import REMOVED, load_settings


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cachesvc.toml"
    path.write_text(text)
    return path


def test_sizes_are_read_in_binary_and_decimal_units():
    sizes = {"64MiB": 64 << 20, "4GiB": 4 << 30, "1.5 GB": 1_500_000_000, "4096": 4096, 4096: 4096}
    sizes |= {"3k": 3072, "2tib": 2 << 40, "0": 0}
    assert sizes == {text: parse_size(text) for text in sizes}
    for text in ("", "bananas", "-1", "64 MiB MiB", "1e9", "7x", "MiB"):
        with pytest.raises(ValueError, match="write it like 64MiB"):
            parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_reads_back_the_same(num_bytes):
    assert num_bytes == parse_size(format_size(num_bytes))


def test_durations_are_read_with_their_unit():
    durations = {"250ms": 0.25, "30s": 30, "5m": 300, "2h": 7200, "7d": 604800}
    assert durations == {text: parse_duration(text) for text in durations}


@given(st.one_of(st.integers(0, 10**9), st.integers(0, 10**6).map(lambda ms: ms / 1000)))
def test_a_formatted_duration_reads_back_the_same(seconds):
    assert seconds == parse_duration(format_duration(seconds))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("server.drain", 1.5, "1.5s"),
        ("cache.idle_ttl", 0.0, "0s"),
        ("cache.idle_ttl", 43200.0, "12h"),
        ("server.max_body_bytes", 16 << 20, "16MiB"),
        ("cache.disk_bytes", 1 << 30, "1GiB"),
        ("cache.disk_reserve_bytes", None, "-"),
        ("cache.quotas", {"acme": 64 << 20}, "acme=64MiB"),
        ("server.require_keys", True, "true"),
        ("engine.max_running", 64, "64"),
    ],
)
def test_a_setting_is_shown_in_its_unit(name, value, text):
    """Also where the name does not tell the unit; a share is no duration."""
    assert text == shown(name, value)


def test_flags_win_over_environment_over_file_over_default(tmp_path, monkeypatch):
    text = '[server]\nhost = "a"\nport = 1\ndrain = "1m"\n[cache]\nblock_size = 32\n'
    path = write(tmp_path, text)
    monkeypatch.setenv("CACHESVC_CONFIG", str(path))  # which names the file where no flag does
    monkeypatch.setenv("CACHESVC_SERVER__PORT", "2")
    monkeypatch.setenv("CACHESVC_SERVER__HOST", "b")
    loaded = load_settings({"server.host": "c", "cache.block_size": None})

    server = loaded.settings.server
    assert ("c", 2, 60.0) == (server.host, server.port, server.drain)
    assert 32 == loaded.settings.cache.block_size
    origins = {row.name: row.origin for row in loaded.rows()}
    assert "flag" == origins["server.host"]
    assert "env CACHESVC_SERVER__PORT" == origins["server.port"]
    assert str(path) == origins["server.drain"] == origins["cache.block_size"]
    assert "default" == origins["cache.write_policy"]


def test_the_data_directory_follows_the_environment(tmp_path, monkeypatch):
    assert tmp_path / "xdg" / "cachesvc" == load_settings().settings.server.data_dir
    monkeypatch.setenv("CACHESVC_SERVER__DATA_DIR", "/srv/cachesvc")
    assert Path("/srv/cachesvc") == default_data_dir()
    assert Path("/srv/cachesvc") == load_settings().settings.server.data_dir


A = "[[models]]\nname = 'a'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\ndevise_bytes = 1\n", r"cache\.devise_bytes in .*; did you mean cache\.device"),
        (
            "[cash]\nblock_size = 1\n",
            r"setting cash\.block_size in .*did you mean cache\.block_size\?",
        ),
        ("port = 1\n", r"unknown setting port in .*\.toml; did you mean server\.port\?"),
        ("cache = 1\n", r"cache in .*\.toml is a section: write \[cache\] above its settings"),
        ("[cache]\npromotion = 'auto'\n", r"cache\.promotion in .* was removed: the sizes of"),
        ("[cache]\ndevice_bytes = '12 bananas'\n", r"cache\.device_bytes = '12 bananas' \(from /"),
        ("[server]\nport = 70000\n", r"server\.port = 70000 .* less than or equal to 65535"),
        ("[cache]\npolicy = 'lru'\n", r"cache\.policy in .*\.toml was removed: the block that was"),
        ("[server\n", "is not valid TOML"),
        ("[[models]]\nname = 'a'\nsize = 1\n", "models = 1 .*table 1: size: Extra"),
        ("[[models]]\nengine = 'ftp://a'\n", "table 1: engine: 'ftp://a' is no engine"),
        (f"{A}[[models]]\nname = 'b'\nengine = 'vllm'\n", "one server has one engine of its own"),
        (f"model.name = 'b'\n{A}", r"model.name \(from .*is of one model, and .*give it there"),
        (f"engine.key = 'k'\n{A}", "engine.key .*is of one model"),
        *(
            (f"[server]\ncors_origins = ['http://ok:3000', '{wrong}']\n", rf"{wrong}' is no origin")
            for wrong in ("https://A.example", "https://a.example/", "http://a:80", "null", "a.b")
        ),
    ],
)
def test_a_wrong_file_stops_the_start_and_says_why(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(config_file=write(tmp_path, text))


def test_a_mistyped_variable_is_refused_and_the_nearest_named(monkeypatch):
    monkeypatch.setenv("CACHESVC_SERVER__PRT", "1")
    with pytest.raises(ConfigError, match="did you mean CACHESVC_SERVER__PORT"):
        load_settings()


def test_a_variable_of_several_values_is_json(monkeypatch):
    monkeypatch.setenv("CACHESVC_MODEL__ADAPTERS", '{"pirate": "/adapters/pirate"}')
    assert {"pirate": "/adapters/pirate"} == load_settings().settings.model.adapters
    monkeypatch.setenv("CACHESVC_MODEL__ADAPTERS", "pirate=/x")
    with pytest.raises(ConfigError, match="JSON"):
        load_settings()


def test_an_adapter_has_a_name_of_its_own():
    twice = {"model.name": "big", "model.adapters": {"big": "x"}}
    for wrong in (twice, {"model.adapters": {" ": "x"}}):
        with pytest.raises(ConfigError, match="a name other than the model"):
            load_settings(wrong)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_setting_is_refused_by_name_with_what_to_do(tmp_path, monkeypatch, name):
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=f"the setting {name} in .* was removed: "):
        load_settings({}, write(tmp_path, f"[{section}]\n{key} = 1\n"))
    monkeypatch.setenv(env_name(name), "1")
    with pytest.raises(ConfigError, match=f"{name} in the environment .* was removed: "):
        load_settings()


def test_where_events_go_is_an_address_or_a_table(tmp_path, monkeypatch):
    assert load_settings().settings.events.publisher is None
    monkeypatch.setenv("CACHESVC_EVENTS__ZMQ", "tcp://127.0.0.1:5557")
    plain = load_settings().settings.events.publisher
    assert plain is not None and "tcp://127.0.0.1:5557" == plain.endpoint
    monkeypatch.delenv("CACHESVC_EVENTS__ZMQ")
    text = '[events.zmq]\nendpoint = "tcp://h:1"\nreplay_endpoint = "tcp://h:2"\n'
    table = load_settings(config_file=write(tmp_path, text)).settings.events.publisher
    assert table is not None and "tcp://h:2" == table.replay_endpoint
    with pytest.raises(ConfigError, match=r"events\.zmq.*: replay_endpont: "):
        load_settings(
            config_file=write(tmp_path, text.replace("replay_endpoint", "replay_endpont"))
        )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[server]\nport = 'redis://:geheim@host/0'\n", r"redis://:\*\*\*@host/0"),
        ("[cache]\nremote_url = ['redis://me:ge@heim@host']\n", r"redis://me:\*\*\*@host"),
        ("[server]\nport = 'redis:/:ge/heim@host'\n", r"redis:/:\*\*\*@host"),
        ("[cache]\nwrite_policy = 'redis://me:geheim@host/0'\n", r"redis://me:\*\*\*@host/0"),
        (
            "[server]\nport = 's3://b/p?a=b&my_SECRET_key=heim&c=d'\n",
            r"a=b&my_SECRET_key=\*\*\*&c=d",
        ),
        ("[engine]\nkey = 'geheim und lang'\n", r"engine.key = \*\*\* .*: a key has no spaces"),
        ("[[models]]\nkey = 'geheim und lang'\n", r"models = \*\*\* .*table 1: key: a key has no"),
        (f"{A}{A}key = 'geheim'\n", r"models \(from .*two models are called 'a'"),
    ],
)
def test_an_error_masks_a_password_or_key(tmp_path, text, shown):
    with pytest.raises(ConfigError, match=shown) as raised:
        load_settings(config_file=write(tmp_path, text))
    assert "heim" not in str(raised.value)


def test_each_of_several_models_has_its_own_settings_and_the_rest_of_the_file(tmp_path):
    text = """
        engine.max_waiting = 7
        [[models]]
        name = "a"
        engine = "http://a:1"
        key = "geheim"
        [[models]]
        name = "/models/b"
        served_as = "b"
        dtype = "bfloat16"
    """
    loaded = load_settings(config_file=write(tmp_path, text))
    first, second = loaded.settings.each()
    assert (["http://a:1"], "geheim") == (first.engine.urls, first.engine.key.get_secret_value())
    assert ("a", "b") == (first.model.client_name, second.model.client_name)
    assert ("embedded", "bfloat16") == (second.engine.backend, second.model.dtype)
    assert 7 == first.engine.max_waiting == second.engine.max_waiting
    assert 1 == main_of([first, second]), "the tiers are those of the engine here"
    assert ([], []) == (list(idle_settings(first)), list(idle_settings(second)))
    [row] = [row for row in loaded.rows() if row.name == "models"]
    told = shown(row.name, row.value)
    assert "name=a, engine=http://a:1" in told and "geheim" not in told


def test_settings_that_the_chosen_engine_does_not_read_are_named():
    """A new setting of these sections is read by every engine, or joins the table."""
    usual = Settings.model_validate({})
    sections = ("model", "cache", "engine", "events")
    everything = {section: dict(getattr(usual, section)) for section in sections}
    sizes = {"cache": {"host_bytes": 1 << 30, "block_size": 64}}
    chosen = {"url": "http://10.0.0.5:8000", "vllm": "vllm", "embedded": "embedded"}

    def named(kind: str, given: dict[str, dict[str, Any]]) -> list[str]:
        engine = given.get("engine", {}) | {"backend": chosen[kind]}
        return list(idle_settings(Settings.model_validate(given | {"engine": engine})))

    assert ["cache.block_size", "cache.host_bytes"] == named("url", sizes)
    assert ["cache.block_size"] == named("vllm", sizes)
    idle = ["engine.key", "engine.vllm", "engine.node", "engine.max_time"]
    assert idle == named("embedded", everything)
    read = {f"{section}.{name}" for section, table in everything.items() for name in table}
    by_url = [f"model.{name}" for name in ("name", "served_as", "exact", "adapters")]
    by_url += [f"engine.{name}" for name in ("backend", "vllm", "key")]
    by_url += [f"engine.{name}" for name in ("max_waiting", "max_wait", "max_time")]
    assert set(by_url) == read - set(named("url", everything))
