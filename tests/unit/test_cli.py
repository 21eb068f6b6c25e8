"""The command line as a whole: what it lists, what it says of errors, with which exit codes."""

import gc
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import cachesvc
from api.admin.routes.operation_table import REMOVED_VALUES
from api.format import seconds, size
from cachesvc.cli import COMMANDS, run
from cachesvc.cli.lazy import load
from cachesvc.cli.removed import REMOVED
from cachesvc.config.settings import known_settings
from cachesvc.importing import importing
from tests.patience import ended
from tests.support.commands import call, said, told

apart = partial(ended, sys.executable, "-c")  # where nothing else has been imported


def test_help_shows_what_stands_in_brackets(monkeypatch):
    """Rich takes them for styles: `[all time]`, `[seller]`."""
    monkeypatch.setenv("COLUMNS", "200")
    written = (Path(cachesvc.__file__).parents[1] / "docs" / "commands.md").read_text()
    lost, num_found = [], 0
    for section in written.split("\n## cachesvc ")[1:]:
        found = re.findall(r"\[[^\[\]]+\]", section)
        if found:
            shown = call(*section.partition("\n")[0].split(), "--help").stdout
            lost += [text for text in found if text not in shown]
            num_found += len(found)
    assert [] == lost
    assert num_found > 15


def test_no_help_but_of_serve_imports_torch():
    code = (
        "import importlib, json, sys\n"
        "from cachesvc.cli import COMMANDS\n"
        "from cachesvc.cli.cache.app import COMMANDS as CACHE\n"
        "import billing.errors, engine.errors, tiers.errors\n"
        "guilty = []\n"
        "entries = {**{n: e for n, e in COMMANDS.items() if n != 'serve'}, **CACHE}\n"
        "for name, entry in entries.items():\n"
        "    importlib.import_module(entry.target.partition(':')[0])\n"
        "    if {'torch', 'transformers', 'uvicorn', 'fastapi'} & set(sys.modules):\n"
        "        guilty.append(name)\n"
        "        break\n"
        "print(json.dumps([guilty, len(entries)]))"
    )
    guilty, num_imported = json.loads(apart(code).stdout)
    assert [] == guilty
    assert num_imported > 15


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded_and_has_help(name):
    command = load(name, COMMANDS[name])
    assert command.name == name
    assert "Usage" in said(name, "--help")
    assert name in said("--help")
    texts = [each.help or "" for each in (command, *getattr(command, "commands", {}).values())]
    assert [] == [text for text in texts if re.search(r"[^\n]\n[^\n]", text)], "of the source"


REMOVED_VALUES_OF = {"tenants budget b acme 5": "per", "usage --statement x": "format"}


@pytest.mark.parametrize(
    ("words", "name", "instead"),
    [
        ("explain a b", "explain of two requests", REMOVED["diff"]),
        *(
            (f"{typed} 1", typed.split()[-1], instead)
            for typed, instead in REMOVED.items()
            if " --" in typed
        ),
        *(
            (f"{command} --{option} {value}", value, instead)
            for command, option in REMOVED_VALUES_OF.items()
            for value, instead in REMOVED_VALUES[option].items()
        ),
    ],
)
def test_a_removed_option_or_value_says_what_to_do_instead(words, name, instead):
    assert f"{name} was removed: {instead}" in said(*words.split(), code=2)


def test_an_error_is_one_sentence_and_beside_torch_the_last_word():
    """The process ends at once: what ends with it afterwards would print what torch leaks."""
    code = (
        "import atexit, sys\n"
        "from cachesvc.cli import main\n"
        "sys.modules['torch'] = sys\n"
        "atexit.register(lambda: print('afterwards', file=sys.stderr))\n"
        "sys.argv = ['cachesvc', 'config', 'show', '--config', '/nowhere.toml']\n"
        "main()"
    )
    ran = apart(code)
    assert 1 == ran.returncode
    file, why = "/nowhere.toml", "No such file or directory"
    assert f"error: cannot read the config file {file}: {why}\n" == ran.stderr


def test_what_a_command_writes_is_its_users_alone(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)  # a volume that was there before
    arguments = ["tenants", "create", "acme", "--data-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["cachesvc", *arguments])
    before = os.umask(0o022)
    try:
        with pytest.raises(SystemExit) as exited:
            run()
    finally:
        os.umask(before)
    assert not exited.value.code
    written = list(tmp_path.iterdir())
    assert written
    assert [] == [each.name for each in written if each.stat().st_mode & 0o077]


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("cachesvc.cli.app", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run()


def test_a_file_that_cannot_be_used_is_named_without_a_traceback(tmp_path, monkeypatch):
    (tmp_path / "new").touch()
    (tmp_path / "scopes.json").mkdir()

    def replace(*_: Any) -> None:
        (tmp_path / "new").replace(tmp_path / "scopes.json")

    monkeypatch.setattr("cachesvc.cli.lazy.LazyGroup.invoke", replace)
    sentence = "scopes.json cannot be used: Is a directory; repair it, or move it away"
    assert sentence in said("top", code=1)


@pytest.mark.parametrize(
    "command",
    [["keys", "create", "--tenant", "acme"], ["tenants", "create", "acme"], ["cache", "stats"]],
)
def test_a_misspelt_variable_stops_a_command_that_would_use_the_default_directory(
    monkeypatch, tmp_path, command
):
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    monkeypatch.setenv("CACHESVC_DATA_DIR", str(tmp_path / "meant"))
    refused = call(*command)
    assert "did you mean CACHESVC_SERVER__DATA_DIR?" in refused.stderr
    assert not home.exists()
    given = call(*command, "--data-dir", str(tmp_path / "given"))
    assert "CACHESVC_DATA_DIR" not in f"{given.output}{given.exception}"


def test_config_show_prints_every_setting_and_masks_passwords(monkeypatch):
    url = "postgresql://ledger:hunter2@db/ledger"
    monkeypatch.setenv("CACHESVC_BILLING__DATABASE_URL", url)
    monkeypatch.setenv("CACHESVC_ENGINE__KEY", "sk-hunter2")
    rows = {row["name"]: row for row in told("config", "show")}
    assert "**********" == rows["engine.key"]["value"]
    assert known_settings().keys() == rows.keys()
    row = rows["billing.database_url"]
    assert "env CACHESVC_BILLING__DATABASE_URL" == row["origin"]
    assert "postgresql://ledger:***@db/ledger" == row["value"]
    assert "hunter2" not in call("config", "show").stdout


def test_sizes_and_durations_read_well():
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 1020 << 20: "1020 MiB", 8 << 40: "8 TiB"}
    assert sizes == {num_bytes: size(num_bytes) for num_bytes in sizes}
    times = {0.00034: "340 µs", 0.0123: "12.3 ms", 0.9999: "1000 ms", 4.2: "4.2 s"}
    times |= {600: "10 min", 14400: "4 h"}
    assert times == {duration_s: seconds(duration_s) for duration_s in times}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cachesvc ", {"serve", "top", "cache", "usage"}),
        ("cachesvc cache ", {"stats", "tree", "verify"}),
        ("cachesvc cache tree --", {"--depth", "--tenant"}),
        ("cachesvc replay --write-policy ", {"on_evict", "write_through"}),
    ],
)
def test_a_shell_completes_commands_options_and_values(words, expected):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    asked["_CACHESVC_COMPLETE"] = "complete_bash"
    assert expected <= set(call(env=asked, prog_name="cachesvc").stdout.split())


# Settings, PostgreSQL, signatures and pages' templates cost half of such a command's time.
MONEY = [
    *("sqlalchemy", "pydantic", "api.errors", "pydantic_settings", "jinja2", "cryptography"),
    *("torch", "fastapi", "sqlalchemy.dialects.postgresql", "cachesvc.config.settings"),
]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        *((f"cachesvc.cli.money.{name}", MONEY) for name in ("usage", "tenants", "keys")),
        *((f"cachesvc.cli.money.{name}", MONEY[3:]) for name in ("balance", "prices")),
        ("cachesvc.cli.cache.stats", ["numpy", "zstandard", "rich.progress"]),
        ("cachesvc.server.node", ["transformers", "torch._dynamo"]),
        ("engine.attention.cpu", ["transformers", "torch._dynamo"]),
    ],
)
def test_a_command_does_not_wait_for_what_it_may_not_need(module, heavy):
    """A running server has the database open; how full a disk is needs no arithmetic, and a node
    has no model, nor have the checks of attention's bits."""
    code = f"import sys, {module}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    ran = apart(code)
    assert "[]" == ran.stdout.strip()


def test_a_command_ends_without_looking_through_all_that_it_imported(tmp_path):
    """The interpreter collects garbage as it ends, which took a third of a short command's time."""
    code = (
        "import atexit, gc, sys\n"
        "from cachesvc.cli import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, gc.isenabled()))\n"
        f"sys.argv = ['cachesvc', 'tenants', 'create', 'a', '--data-dir', {str(tmp_path)!r}]\n"
        "main()"
    )
    ran = apart(code)
    assert "True True" == ran.stdout.splitlines()[-1]


def test_nothing_is_collected_while_modules_are_imported():
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_removed_command_is_refused_with_what_to_do_instead():
    """And a command that it names exists, with its options."""
    removed = {typed: instead for typed, instead in REMOVED.items() if " --" not in typed}
    assert 20 < len(removed)
    for command, instead in removed.items():
        assert f"cachesvc {command} was removed: {instead}" in said(*command.split(), code=2)
        named = re.search(r"`cachesvc ([a-z ]*[a-z])[^`]*`", instead)
        if named is None:
            continue
        helped = said(*named[1].split(), "--help")
        options = re.findall(r"--[a-z-]+", instead)
        assert [] == [each for each in options if each not in helped], instead


def test_a_sigterm_ends_what_handles_none_itself():
    """As the first process of a container, `serve` went on, to be killed two minutes later."""
    code = (
        "import os, signal, time\n"
        "from cachesvc import cli\n"
        "cli.app = lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))\n"
        "cli.main()"
    )
    ended = apart(code)
    assert (143, "", "") == (ended.returncode, ended.stdout, ended.stderr)


def test_ctrl_c_does_not_wait_for_a_model_that_loads(tmp_path):
    """A first start went on converting or compiling for up to 15 s, and could end by SIGABRT."""
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "from cachesvc import cli\n"
        "from cachesvc.server import engines\n"
        "def prepare(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "engines.prepare = prepare\n"
        f"sys.argv = ['cachesvc', 'serve', '--port', '0', '--data-dir', {str(tmp_path)!r}]\n"
        "cli.main()"
    )
    ran = apart(code)
    assert 130 == ran.returncode, ran.stderr
    assert "Traceback" not in ran.stderr
