"""What `ops/` says of metrics, settings and runbooks exists, and what it deploys holds together:
probes, volumes, time to drain, what is mounted where."""

import json
import os
import re
import shutil
import socket
import subprocess
from inspect import signature
from pathlib import Path

import pytest
import yaml
from fastapi.routing import APIRoute

from api.routes import health
from cachesvc.cli.node import node
from cachesvc.config.quantities import parse_duration, parse_size
from cachesvc.config.settings import Settings, env_name, known_settings
from cachesvc.observability.table import METRICS
from cachesvc.server.supervisor import notify
from tests.helm import program
from tiers.node.pools import DRAIN_S

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
DOCKER = OPS / "docker"
K8S = OPS / "k8s"
PROMETHEUS = OPS / "prometheus"
BOARDS = sorted((K8S / "components" / "monitoring" / "boards").glob("*.json"))
KNOWN = {env_name(name) for name in known_settings()}
SETTINGS = Settings.model_validate({})
FLUSH_S = 60.0  # `TieredCache.flush`: the longest that a stop writes memory to disk
NEEDED_S = SETTINGS.server.drain + FLUSH_S
DISK = "CACHESVC_CACHE__DISK_BYTES"
SUFFIXES = ("_bucket", "_sum", "_count")


def read(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    return documents[0] if len(documents) == 1 else documents


RULES = [rule for group in read(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


def expressions():
    panels = [panel for board in BOARDS for panel in json.loads(board.read_text())["panels"]]
    targets = [target for panel in panels for target in panel["targets"]]
    return [each["expr"] for each in [*RULES, *targets]]


def test_boards_and_rules_use_only_metrics_that_exist():
    used = {name for one in expressions() for name in re.findall(r"\bcachesvc_[a-z_]+\b(?!:)", one)}
    assert used
    unknown = {
        name
        for name in used
        if name not in METRICS and not any(name.removesuffix(end) in METRICS for end in SUFFIXES)
    }
    assert set() == unknown


def test_every_alert_has_its_runbook():
    runbooks = [rule["annotations"]["runbook"] for rule in RULES if "alert" in rule]
    assert runbooks
    assert [] == [name for name in runbooks if not (ROOT / name).is_file()]


def test_deployments_set_only_variables_that_exist():
    files = [path for path in OPS.rglob("*") if path.is_file() and path.suffix != ".json"]
    used = {name for path in files for name in re.findall(r"CACHESVC_[A-Z_]+", path.read_text())}
    assert used
    assert set() == used - KNOWN - {"CACHESVC_CONFIG"}


def kubernetes():
    """The base by kind; of the two services, the one for clients."""
    names = read(K8S / "base" / "kustomization.yaml")["resources"]
    read_from = [read(K8S / "base" / name) for name in names]
    documents = [d for each in read_from for d in (each if isinstance(each, list) else [each])]
    return {document["kind"]: document for document in reversed(documents)}


BASE = kubernetes()
POD = BASE["StatefulSet"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
COMPOSE, FLEET, PAIR = (read(DOCKER / f"compose{name}.yaml") for name in ("", ".fleet", ".pair"))


def variables(container):
    return {each["name"]: each.get("value", "") for each in container["env"]}


def settings_of(folder):
    """What its kustomization adds to the servers' settings."""
    (generator,) = read(folder / "kustomization.yaml")["configMapGenerator"]
    assert "cachesvc-settings" == generator["name"]
    return dict(literal.split("=", 1) for literal in generator["literals"])


def test_probes_ask_routes_that_exist_on_ports_that_are_open():
    routes = {route.path for route in health.router.routes if isinstance(route, APIRoute)}
    ports = {port["name"] for port in CONTAINER["ports"]}
    probes = {name: CONTAINER[name]["httpGet"] for name in CONTAINER if name.endswith("Probe")}
    assert {"startupProbe", "livenessProbe", "readinessProbe"} == probes.keys()
    assert routes >= {probe["path"] for probe in probes.values()}
    assert ports >= {probe["port"] for probe in probes.values()}
    assert "/health/ready" == probes["readinessProbe"]["path"]
    assert [SETTINGS.server.port] == [port["containerPort"] for port in CONTAINER["ports"]]


def test_the_service_finds_its_pods():
    service, stateful = BASE["Service"]["spec"], BASE["StatefulSet"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    headless = read(K8S / "base" / "service.yaml")[1]
    assert "None" == headless["spec"]["clusterIP"]
    assert headless["metadata"]["name"] == stateful["spec"]["serviceName"]
    for kind, chosen in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert BASE[kind]["spec"][chosen]["matchLabels"].items() <= labels.items()


COMPONENTS = [
    (),
    ("gpu",),
    ("gpu", "monitoring", "postgres", "remote"),
    ("postgres", "fleet"),
    ("postgres", "fleet", "router"),
]
KUBECTL, HELM = program("kubectl"), program("helm")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, which CI installs")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm, which CI installs")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def built_by(*command):
    built = run(*command)
    assert 0 == built.returncode, built.stderr
    return [document for document in yaml.safe_load_all(built.stdout) if document]


def kustomized(folder, components, **more):
    """The objects of a kustomization of a user's. The folder is copied by itself, as users do."""
    shutil.copytree(K8S, folder / "k8s")
    chosen = folder / "k8s" / "chosen"
    chosen.mkdir()
    settings = {"name": "cachesvc-settings", "behavior": "merge"}
    settings |= {"literals": ["CACHESVC_MODEL__NAME=ours/model"]}
    kustomization = {
        "resources": ["../base"],
        "components": [f"../components/{name}" for name in components],
        "configMapGenerator": [settings],
        **more,
    }
    (chosen / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return built_by(KUBECTL, "kustomize", chosen)


@needs_kubectl
@pytest.mark.parametrize("components", COMPONENTS)
def test_kustomize_builds_what_kubernetes_knows(tmp_path, components):
    """Each document by the schema of its kind, where `kubernetes-validate` is installed."""
    documents = kustomized(tmp_path, components)
    kinds = [document["kind"] for document in documents]
    assert ("monitoring" in components) == ("ServiceMonitor" in kinds)
    (stateful,) = (each for each in documents if each["kind"] == "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    names = {each["name"] for each in container["env"]}
    shared = {env_name("billing.database_url"), env_name("limits.url")}
    assert ("postgres" in components) == (shared <= names)
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert ("postgres" in components) == ({"/data/secret", "/data/receipt_key"} <= mounts)
    maps = {each["metadata"]["name"]: each for each in documents if each["kind"] == "ConfigMap"}
    (settings,) = (name for name in maps if name.startswith("cachesvc-settings"))
    told = maps.pop(settings)["data"]
    assert "ours/model" == told[env_name("model.name")]
    engines = {"fleet": "http://cachesvc-engines:8000", "router": "http://cachesvc-router:8000"}
    asked = [engines[name] for name in components if name in engines]
    assert asked[-1:] == [told[name] for name in (env_name("engine.backend"),) if name in told]
    assert ("remote" in components) == (env_name("cache.remote_url") in told)
    assert ("fleet" in components) == (env_name("cache.disk_bytes") not in told)
    served = [each for each in documents if each["kind"] in ("StatefulSet", "Deployment")]
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in served}
    for name in {"cachesvc", "cachesvc-engines"} & pods.keys():
        (source,) = pods[name]["containers"][0]["envFrom"]
        assert settings == source["configMapRef"]["name"]
    services = [each for each in documents if each["kind"] == "Service"]
    hosts = re.findall(r"//([a-z-]+):\d+", " ".join(told.values()))
    assert set(hosts) <= {each["metadata"]["name"] for each in services}
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in served]
    for service in services:
        chosen_pods = service["spec"]["selector"].items()
        assert any(chosen_pods <= each.items() for each in labels), service["metadata"]["name"]
    boards = set(maps)
    stems = {path.stem for path in BOARDS}
    expected = {f"cachesvc-board-{stem}" for stem in stems}
    assert (expected if "monitoring" in components else set()) == boards
    assert ("gpu" in components) == ("nvidia.com/gpu" in container["resources"]["limits"])
    assert {env_name("server.require_keys"), env_name("server.data_dir")} <= names
    if "monitoring" in components:  # each pod is scraped once: Prometheus reads one service
        (monitor,) = (each for each in documents if each["kind"] == "ServiceMonitor")
        chosen_by = monitor["spec"]["selector"]["matchLabels"].items()
        read = [each for each in services if chosen_by <= each["metadata"]["labels"].items()]
        assert ["cachesvc-peers"] == [each["metadata"]["name"] for each in read]
    validated(document for document in documents if document["kind"] not in OPERATORS)


OPERATORS = {"ServiceMonitor", "PrometheusRule"}  # kinds of its own


def validated(documents):
    """By the schemas of Kubernetes."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, which CI installs"
    )
    for document in documents:
        validator.validate(document, "1.32", strict=True)


def rendered(folder, chart=K8S, **values):
    """The objects that the chart makes of these values."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    return built_by(HELM, "template", "release", chart, "--values", folder / "values.yaml")


def by_name(documents):
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@needs_kubectl
@needs_helm
@pytest.mark.parametrize("components", COMPONENTS)
def test_the_chart_makes_what_kustomize_does(tmp_path, components):
    """They restart pods for other settings by a name and by an annotation; all else is equal."""
    own = {"CACHESVC_MODEL__NAME": "ours/model"}
    image = "registry.example.com:5000/ours/cachesvc"
    expected = kustomized(
        tmp_path,
        components,
        replicas=[{"name": "cachesvc", "count": 3}],
        images=[{"name": "cachesvc", "newName": image, "newTag": "9"}],
    )
    chosen = {"components": list(components), "settings": own, "replicas": {"cachesvc": 3}}
    chosen["images"] = {"cachesvc": f"{image}:9"}
    found = by_name(rendered(tmp_path, tmp_path / "k8s", **chosen))
    restarted = {
        name: each["spec"]["template"]["metadata"].pop("annotations")["checksum/settings"]
        for (_, name), each in found.items()
        if "annotations" in each.get("spec", {}).get("template", {}).get("metadata", {})
    }
    assert ({"cachesvc", "cachesvc-engines"} if "fleet" in components else {"cachesvc"}) == (
        restarted.keys()
    )
    hashed = re.compile("cachesvc-settings-[a-z0-9]{10}")
    text = hashed.sub("cachesvc-settings", yaml.safe_dump_all(expected))
    assert by_name(yaml.safe_load_all(text)) == found


@needs_helm
def test_the_chart_takes_settings_and_parts_of_objects_and_refuses_what_it_does_not_know(tmp_path):
    first = by_name(rendered(tmp_path))
    more = {"containers": [{"name": "cachesvc", "resources": {"limits": {"memory": "9Gi"}}}]}
    patches = [
        {"kind": "ConfigMap", "metadata": {"name": "cachesvc-settings"}, "data": {DISK: None}},
        {"kind": "StatefulSet", "metadata": {"name": "cachesvc"}}
        | {"spec": {"template": {"spec": more}}},
    ]
    own = {"CACHESVC_SERVER__DRAIN": "5"}
    patched = by_name(rendered(tmp_path, settings=own, patches=patches))
    each = (first, patched)
    before, after = (made["StatefulSet", "cachesvc"]["spec"]["template"] for made in each)
    held, then = (made["ConfigMap", "cachesvc-settings"]["data"] for made in each)
    assert DISK in held
    assert {name: value for name, value in held.items() if name != DISK} | own == then
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]
    before["metadata"] = after["metadata"]
    before["spec"]["containers"][0]["resources"]["limits"]["memory"] = "9Gi"
    assert before == after
    refused = {
        "replicas.cachesvcs=3": "nothing runs as cachesvcs",
        "images.cachesvcs=a:1": "no image is called cachesvcs",
        "components={gpus}": "one of 'gpu', 'monitoring'",
        "setings.A=b": "'setings' not allowed",
        "settings.MODEL=b": "'MODEL' does not match",
        "settings.CACHESVC_SERVER__PORT=1": "want string|Expected: string",
        "patches[0].kind=A,patches[0].metadata.name=b": "there is no A/b",
    }
    for value, why in refused.items():
        done = run(HELM, "template", "release", K8S, "--set", value)
        assert done.returncode and re.search(why, done.stderr), (value, done.stderr)


def test_the_operators_rules_are_prometheus_own():
    """One is a copy of the other, because kustomize reads no files outside its folder."""
    rule = read(K8S / "components" / "monitoring" / "rules.yaml")
    assert read(PROMETHEUS / "rules.yml") == rule["spec"]


@needs_kubectl
def test_the_nodes_daemon_set_is_what_kubernetes_and_the_command_know():
    (daemons,) = built_by(KUBECTL, "kustomize", K8S / "node")
    pod = daemons["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert daemons["spec"]["selector"]["matchLabels"] == labels
    command, *arguments = container["args"]
    told = dict(argument.split("=") for argument in arguments)
    assert "node" == command
    assert told.keys() <= {f"--{name.replace('_', '-')}" for name in signature(node).parameters}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert mounts == [str(Path(told["--socket"]).parent), told["--disk-cache-dir"]]
    assert mounts == [volume["hostPath"]["path"] for volume in pod["volumes"]]
    (port,) = container["ports"]
    assert told["--metrics"].endswith(f":{port['containerPort']}")
    memory = parse_size(container["resources"]["requests"]["memory"] + "B")
    assert parse_size(told["--host-cache"]) < memory
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    validated([daemons])


def test_the_disk_tier_lies_on_a_volume_that_holds_it():
    claims = BASE["StatefulSet"]["spec"]["volumeClaimTemplates"]
    sizes = {
        claim["metadata"]["name"]: claim["spec"]["resources"]["requests"]["storage"]
        for claim in claims
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts.values()) <= {*sizes, *(volume["name"] for volume in POD["volumes"])}
    volume = mounts[variables(CONTAINER)[env_name("server.data_dir")]]
    wanted = parse_size(settings_of(K8S / "base")[env_name("cache.disk_bytes")])
    assert wanted < parse_size(sizes[volume] + "B"), "the ledger and models need room beside it"


def test_variables_have_values_that_the_settings_take():
    names = {env_name(name): name for name in known_settings()}
    nested = {}
    folders = [K8S / "base", *(K8S / "components" / name for name in ("remote", "fleet", "router"))]
    told = {variable: value for each in folders for variable, value in settings_of(each).items()}
    forced = variables(CONTAINER)
    assert not told.keys() & forced.keys(), "a variable of the pod hides a setting"
    for variable, value in (told | forced).items():
        section, key = names[variable].split(".")
        nested.setdefault(section, {})[key] = value
    assert Settings.model_validate(nested).server.require_keys


def test_a_stop_has_time_to_drain_and_to_flush():
    assert POD["terminationGracePeriodSeconds"] > NEEDED_S
    assert parse_duration(COMPOSE["services"]["cachesvc"]["stop_grace_period"]) > NEEDED_S
    unit = (OPS / "systemd" / "cachesvc.service").read_text()
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > NEEDED_S
    assert "KillSignal=SIGTERM" in unit


def test_the_container_runs_as_its_user_without_more_rights():
    uid = int(re.findall(r"--uid (\d+)", (DOCKER / "Dockerfile").read_text())[0])
    assert {uid} == {POD["securityContext"][name] for name in ("runAsUser", "fsGroup")}
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    writable = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert {"/data", "/tmp"} == writable


def test_the_image_copies_what_there_is_and_starts_the_console_script():
    text = (DOCKER / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (.+)$", text, re.MULTILINE)
    sources = [name for line in lines for name in line.split()[:-1]]
    assert sources
    assert [] == [name for name in sources if not (ROOT / name).exists()]
    packages = {"cachesvc", "api", "engine", "billing", "tiers"}
    assert packages <= set(sources)
    assert 'ENTRYPOINT ["cachesvc"]' in text
    assert 'cachesvc = "cachesvc.cli:main"' in (ROOT / "pyproject.toml").read_text()


def mounts(compose):
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            yield name, source, target


def test_compose_mounts_what_there_is():
    folders = [source for _, source, _ in mounts(COMPOSE) if source.startswith(".")]
    assert folders
    assert [] == [folder for folder in folders if not (DOCKER / folder).exists()]
    assert ["gpu"] == COMPOSE["services"]["cachesvc-gpu"]["profiles"]


@pytest.mark.parametrize("compose", [COMPOSE, FLEET, PAIR], ids=["one", "fleet", "pair"])
def test_what_compose_names_is_there_and_ports_are_open_to_this_machine_alone(compose):
    named = {source for _, source, _ in mounts(compose) if not source.startswith(".")}
    assert named == set(compose["volumes"])
    services = compose["services"].values()
    for built in (service["build"] for service in services if "build" in service):
        assert (DOCKER / built["context"] / built["dockerfile"]).is_file()
    ports = [port for service in services for port in service.get("ports", ())]
    assert ports and [] == [port for port in ports if not port.startswith("127.0.0.1:")]
    for service in services:
        assert "build" in service or ":" in service["image"], "an image has a version"


def test_the_fleets_servers_ask_its_router_and_the_router_its_engines():
    services = FLEET["services"]
    for name in ("one", "two"):
        assert "http://router:8000" == services[name]["environment"][env_name("engine.backend")]
    names = ("billing.database_url", "limits.url")
    for variable in map(env_name, names):
        host = re.search(r"(?:@|//)(\w+)(?::6379)?/", services["one"]["environment"][variable])
        assert host is not None and host[1] in services
    workers = [word for word in services["router"]["command"] if word.startswith("http:")]
    engines = [name for name in services if name.startswith("engine-")]
    assert [f"http://{name}:8000" for name in engines] == workers
    gpus = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in engines
    ]
    assert [["0"], ["1"]] == gpus


def test_two_servers_share_a_ledger_limits_and_blocks_and_nothing_else():
    one, two = (PAIR["services"][name] for name in ("one", "two"))
    differ = {key for key in KNOWN if one["environment"].get(key) != two["environment"].get(key)}
    assert {env_name("billing.server_name")} == differ
    assert not set(one["volumes"]) & set(two["volumes"])
    for name in ("billing.database_url", "limits.url", "cache.remote_url"):
        host = re.search(r"(?:@|//)(\w+)(?::6379)?/", one["environment"][env_name(name)])
        assert host is not None and host[1] in PAIR["services"], name
    # Blocks are found by a tenant's salt, which is made of one secret.
    assert "service_completed_successfully" == two["depends_on"]["secret"]["condition"]
    assert "cp -np /one/secret" in PAIR["services"]["secret"]["entrypoint"][-1]


def test_prometheus_and_grafana_find_each_other():
    """Targets and addresses name services of the compose file; boards name the data source."""
    services = COMPOSE["services"]
    watched = read(PROMETHEUS / "prometheus.yml")
    (job,) = watched["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in services
    assert SETTINGS.server.port == int(port)
    provisioning = OPS / "grafana" / "provisioning"
    (source,) = read(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    (provider,) = read(provisioning / "dashboards" / "cachesvc.yaml")["providers"]
    targets = {target for name, _, target in mounts(COMPOSE) if name == "grafana"}
    assert {provider["options"]["path"], "/etc/grafana/provisioning"} == targets
    for board in BOARDS:
        panels = json.loads(board.read_text())["panels"]
        assert {source["uid"]} == {panel["datasource"]["uid"] for panel in panels}, board.name
    (manager,) = watched["alerting"]["alertmanagers"]
    (target,) = manager["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    routes = read(PROMETHEUS / "alertmanager.yml")
    assert routes["route"]["receiver"] in {each["name"] for each in routes["receivers"]}


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_panels_have_their_own_ids_and_places_and_are_of_the_chosen_servers(board):
    told = json.loads(board.read_text())
    panels = told["panels"]
    assert len(panels) == len({panel["id"] for panel in panels})
    cells = [
        (x, y)
        for panel in panels
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    model, instance = told["templating"]["list"]
    assert ("model", "instance") == (model["name"], instance["name"])
    assert "label_values(cachesvc_build_info, model)" == model["query"]["query"]
    of_model = 'label_values(cachesvc_build_info{model=~"$model"}, instance)'
    assert of_model == instance["query"]["query"] == instance["definition"]
    assert "allValue" not in instance, "all servers are all of the chosen models"
    for panel in told["panels"]:
        for target in panel["targets"]:
            metrics = re.findall(r"\bcachesvc[_:][a-z0-9_:]+", target["expr"])
            assert len(metrics) == target["expr"].count('{instance=~"$instance"'), target["expr"]


@pytest.mark.parametrize("abstract", [False, True])
def test_a_supervisor_hears_that_the_server_is_ready(tmp_path, monkeypatch, abstract):
    notify("READY=1")  # nobody supervises: nothing happens
    address = f"\0cachesvc-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(address)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        notify("READY=1")
        assert b"READY=1" == supervisor.recv(100)
    notify("STOPPING=1")  # it has gone: nothing happens either
    assert "Type=notify" in (OPS / "systemd" / "cachesvc.service").read_text()
