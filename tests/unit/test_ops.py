"""What `ops/` says of metrics, settings and runbooks exists."""

import json
import re
from pathlib import Path

import yaml

from cachesvc.config.settings import env_name, known_settings
from cachesvc.observability.table import METRICS

OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus" / "rules.yml"
BOARDS = sorted((OPS / "k8s" / "components" / "monitoring" / "boards").glob("*.json"))
SUFFIXES = ("_bucket", "_sum", "_count")


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    panels = [panel for board in BOARDS for panel in json.loads(board.read_text())["panels"]]
    return rules + [target["expr"] for panel in panels for target in panel["targets"]]


def test_boards_and_rules_use_only_metrics_that_exist():
    used = {
        name for text in expressions() for name in re.findall(r"\bcachesvc_[a-z_]+\b(?!:)", text)
    }
    assert used
    unknown = {
        name
        for name in used
        if name not in METRICS and not any(name.removesuffix(end) in METRICS for end in SUFFIXES)
    }
    assert set() == unknown


def test_every_alert_has_its_runbook():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    missing = [
        rule["alert"]
        for rule in alerts
        if not (OPS.parent / rule["annotations"]["runbook"]).is_file()
    ]
    assert alerts
    assert [] == missing


def test_deployments_set_only_variables_that_exist():
    known = {env_name(name) for name in known_settings()} | {"CACHESVC_CONFIG"}
    files = [path for path in OPS.rglob("*") if path.is_file() and path.suffix != ".json"]
    used = {name for path in files for name in re.findall(r"CACHESVC_[A-Z_]+", path.read_text())}
    assert used
    assert set() == used - known
