"""The files in deploy/ against the code: every option, port, path, metric and time that they name."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import yaml

from engine.cli.options import KEY_VARIABLE
from engine.core.config import EngineConfig, describe, load_config
from engine.core.types import EngineStats
from engine.server.front_end.main import ERROR_EVENT_TIMEOUT
from engine.server.http.access import PUBLIC
from engine.server.http.prometheus import PrometheusExporter
from engine.server.metrics.reports import EngineReport
from engine.server.ray_serve.options import Options, read_arguments
from engine.server.shared import exit_limit
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable
from engine.server.supervisor.main import SHUTDOWN_SECONDS

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SERVER = EngineConfig().server
EXIT_SECONDS = ERROR_EVENT_TIMEOUT + SHUTDOWN_SECONDS + exit_limit.EXIT_SECONDS
"""Seconds that the server may need after server.shutdown_timeout: last events, front ends, engines."""
FLAGS = {flag for setting in describe() if setting.flag for flag in (setting.flag, *setting.alias_flags)}


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """scripts/run_dockerfile.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import run_dockerfile  # type: ignore[import-not-found]

        del sys.modules["run_dockerfile"]
        module: ModuleType = run_dockerfile
        return module


@pytest.fixture(scope="module")
def dockerfile(runner: ModuleType) -> dict[str, list[str]]:
    """The lines of each instruction of the Dockerfile."""
    found: dict[str, list[str]] = {}
    for name, rest in runner.instructions(DEPLOY / "Dockerfile"):
        found.setdefault(name, []).append(rest)
    return found


def document(file: str) -> Any:
    return yaml.safe_load((DEPLOY / file).read_text())


def unit() -> dict[str, list[str]]:
    """The lines of the systemd unit, by key."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "engine.service").read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def container() -> Any:
    return document("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]["containers"][0]


def settings() -> dict[str, Any]:
    """The settings that the ConfigMap gives."""
    given: dict[str, Any] = tomllib.loads(document("kubernetes/base/settings.yaml")["data"]["engine.toml"])
    return given


def routes() -> set[str]:
    sources = "".join(file.read_text() for file in (ROOT / "server" / "http").glob("*.py"))
    return set(re.findall(r'@router\.\w+\("(/[^"]*)"', sources))


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_systemd_unit_leaves_the_devices_of_gpus_accessible() -> None:
    blocks_other_devices = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    assert not blocks_other_devices & unit().keys()


def test_every_option_of_a_command_is_one_of_the_server(dockerfile: dict[str, list[str]]) -> None:
    entrypoint = json.loads(dockerfile["ENTRYPOINT"][0])
    start = shlex.split(unit()["ExecStart"][0])
    assert entrypoint[:2] == ["engine", "serve"]
    assert start[0].endswith("/bin/engine")
    assert start[1] == "serve"
    assert options(entrypoint) | options(start) | options(container()["args"]) <= FLAGS | {"--config"}


def test_all_ports_are_that_of_the_server(dockerfile: dict[str, list[str]]) -> None:
    entrypoint = json.loads(dockerfile["ENTRYPOINT"][0])
    port = entrypoint[entrypoint.index("--port") + 1]
    compose = document("compose.yaml")["services"]["engine"]
    template = document("kubernetes/base/deployment.yaml")["spec"]["template"]
    assert port == str(SERVER.port) == dockerfile["EXPOSE"][0]
    assert f":{port}/health" in dockerfile["HEALTHCHECK"][0]
    assert [one.rpartition(":")[2] for one in compose["ports"]] == [port]
    assert container()["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert settings()["server"]["port"] == int(port)
    assert template["metadata"]["annotations"]["prometheus.io/port"] == port
    assert document("kubernetes/base/service.yaml")["spec"]["ports"][0]["targetPort"] == "http"
    assert document("ray/serve.yaml")["http_options"]["port"] == int(port)


def test_probes_ask_a_route_that_needs_no_key(dockerfile: dict[str, list[str]]) -> None:
    probes = [container()[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["path"] for probe in probes} == {"/health"} <= routes() & PUBLIC
    assert {probe["port"] for probe in probes} == {"http"}
    annotations = document("kubernetes/base/deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes()


def test_the_liveness_probe_leaves_the_server_time_to_recover() -> None:
    probe = container()["livenessProbe"]
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience > SERVER.engine_timeout + SERVER.health_timeout
    start = container()["startupProbe"]
    deadline = document("kubernetes/base/deployment.yaml")["spec"]["progressDeadlineSeconds"]
    assert deadline > start["periodSeconds"] * start["failureThreshold"]


def test_everyone_waits_until_the_server_has_drained() -> None:
    spec = document("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]
    before = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    timeout = settings()["server"]["shutdown_timeout"]
    assert spec["terminationGracePeriodSeconds"] >= before + timeout + EXIT_SECONDS
    needed = SERVER.shutdown_timeout + EXIT_SECONDS
    assert seconds(document("compose.yaml")["services"]["engine"]["stop_grace_period"]) >= needed
    assert seconds(unit()["TimeoutStopSec"][0]) >= needed
    assert unit()["KillMode"] == ["mixed"]  # SIGTERM to an engine process would be its death
    assert unit()["Type"] == ["notify"]


def test_settings_of_kubernetes_and_ray_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(document("kubernetes/base/settings.yaml")["data"]["engine.toml"])
    assert load_config(file).config.server.host == "0.0.0.0"
    (application,) = document("ray/serve.yaml")["applications"]
    assert application["import_path"] == "engine.server.ray_serve:build_app"
    config, scale = read_arguments(application["args"])
    assert config.server.allowed_hosts == ("*",)
    assert scale.max_replicas > scale.min_replicas


def test_every_option_of_the_ray_serve_application_is_documented() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert not [field.name for field in attrs.fields(Options) if f"`serve.{field.name}`" not in page]


def test_the_names_of_keys_are_those_that_the_server_reads() -> None:
    variables = {one["name"] for one in container()["env"]}
    assert KEY_VARIABLE in variables
    assert KEY_VARIABLE in document("compose.yaml")["services"]["engine"]["environment"]
    assert f"# {KEY_VARIABLE}=" in (DEPLOY / "systemd" / "engine.service").read_text()


def test_autoscalers_ask_for_a_metric_that_the_server_has() -> None:
    table = MetricsTable([memoryview(bytearray(8 * FrontEndMetrics.size(1))).cast("d")])
    report = EngineReport(up=True, stats=EngineStats())
    text = PrometheusExporter(table, lambda: [report], model_name="m", max_len=100).text().decode()
    exposed = set(re.findall(r"^(\w+)\{", text, re.MULTILINE))
    files = (*(KUBERNETES / "keda").glob("*.yaml"), *(KUBERNETES / "hpa").glob("*.yaml"))
    named = set(re.findall(r"\bengine_\w+", "".join(file.read_text() for file in files)))
    assert named
    assert named <= exposed


def test_the_image_has_all_packages_and_known_extras(dockerfile: dict[str, list[str]], runner: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {link.name for link in (ROOT / "src" / "engine").iterdir() if link.is_symlink()}
    kept = set(runner.kept())
    assert packages | {"src", "pyproject.toml", "setup.py", project["readme"], *project["license-files"]} <= kept
    assert all((ROOT / name).exists() for name in kept)
    arguments = dict(line.partition("=")[::2] for line in dockerfile["ARG"])
    assert set(arguments["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    torch = next(line for line in project["dependencies"] if line.startswith("torch"))
    assert any(f"'{torch}'" in line for line in dockerfile["RUN"])


def test_the_user_and_the_volume_of_the_image_are_those_of_the_manifests(dockerfile: dict[str, list[str]]) -> None:
    spec = document("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]
    security = spec["securityContext"]
    assert dockerfile["USER"] == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    (volume,) = dockerfile["VOLUME"]
    environment = " ".join(dockerfile["ENV"])
    assert all(f"{name}={volume}/" in environment for name in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"))
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert set(mounts) == {one["name"] for one in spec["volumes"]}
    assert mounts["models"] == volume
    assert f"engine:{volume}" in document("compose.yaml")["services"]["engine"]["volumes"]
    assert container()["args"][1].startswith(mounts["settings"])


@pytest.mark.parametrize("folder", ["base", "keda", "hpa"])
def test_a_kustomization_names_files_that_exist(folder: str) -> None:
    kustomization = document(f"kubernetes/{folder}/kustomization.yaml")
    listed = kustomization["resources"]
    assert all((KUBERNETES / folder / name).exists() for name in listed)
    others = {file.name for file in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert others == {name for name in listed if name.endswith(".yaml")}
    assert kustomization["namespace"] == document("kubernetes/base/namespace.yaml")["metadata"]["name"]


def test_an_autoscaler_scales_the_deployment() -> None:
    name = document("kubernetes/base/deployment.yaml")["metadata"]["name"]
    for file in ("kubernetes/keda/scaled-object.yaml", "kubernetes/hpa/autoscaler.yaml"):
        assert document(file)["spec"]["scaleTargetRef"]["name"] == name
    assert "replicas" not in document("kubernetes/base/deployment.yaml")["spec"]


@pytest.mark.skipif(not (DEPLOY / "grafana").exists(), reason="this checkout has no dashboards")
def test_the_files_that_compose_mounts_exist() -> None:
    for service in document("compose.yaml")["services"].values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (DEPLOY / volume.partition(":")[0]).is_dir()
    scraped = document("prometheus/prometheus.yml")["scrape_configs"]
    assert f"engine:{SERVER.port}" in str(scraped)
