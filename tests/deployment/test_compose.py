from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.deployment.dockerfiles import stage
from tests.deployment.haproxy import check_haproxy
from tests.deployment.repository import (
    ROOT,
    check_settings,
    check_winnow_arguments,
    has_pinned_tag,
    read_yaml,
    unknown_to_sglang,
    version,
)

COMPOSE = "compose.yaml"
GPU = "compose.gpu.yaml"
# The Compose Specification's own schema.
SCHEMA = json.loads((ROOT / "tests/deployment/compose-spec.schema.json").read_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?\}")
OURS = {"runtime": "docker/runtime.Dockerfile", "service": "docker/service.Dockerfile"}


def services(path: str = COMPOSE) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read_yaml(path)["services"]
    return found


def interpolated(value: str, given: Mapping[str, str] | None = None) -> str:
    """As Compose reads ``value`` with only the ``given`` variables set."""
    return VARIABLE.sub(lambda found: (given or {}).get(found[1], found[2]), value)


@pytest.mark.parametrize("path", [COMPOSE, GPU])
def test_files_are_compose_files(path: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(read_yaml(path))] == []


def test_the_schema_objects() -> None:
    document = read_yaml(COMPOSE)
    document["services"]["runtime"]["imagee"] = "a"
    assert [error.message for error in VALIDATOR.iter_errors(document)]


def test_every_variable_has_a_default() -> None:
    for path in (COMPOSE, GPU):
        for name, default in VARIABLE.findall((ROOT / path).read_text()):
            assert default, f"{name} in {path}"


def test_images_are_pinned_and_ours_have_our_version() -> None:
    for name, service in (services() | services(GPU)).items():
        image = service["image"]
        assert has_pinned_tag(image), image
        assert (name in OURS) == image.startswith(f"winnow-{name}:{version()}")


def test_ours_are_built_from_our_dockerfiles() -> None:
    for name, dockerfile in OURS.items():
        assert services()[name]["build"]["dockerfile"] == dockerfile
    for path, variant in ((COMPOSE, "cpu"), (GPU, "cuda")):
        runtime = services(path)["runtime"]
        assert runtime["build"]["args"] == {"VARIANT": variant}
        assert runtime["image"].endswith(f"-{variant}")
        assert stage(OURS["runtime"], variant).base


def test_ports_are_published_on_loopback_only() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published.keys() == {"service", "prometheus", "grafana"}
    for ports in published.values():
        for port in ports:
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", interpolated(port))


def test_the_balancer_is_where_several_runtimes_are(tmp_path: Path) -> None:
    balancer = services()["balancer"]
    assert balancer["profiles"] == ["balanced"]
    assert balancer["volumes"] == ["./deploy/haproxy:/etc/haproxy:ro"]
    files = {path.name: path.read_text() for path in (ROOT / "deploy/haproxy").glob("*.cfg")}
    check_haproxy(files, balancer["command"], balancer["environment"], tmp_path)
    port = stage(OURS["runtime"], "").values("EXPOSE")[0]
    assert f"server-template runtime 16 runtime:{port} resolvers dns" in files["runtimes.cfg"]
    # The command that the file says, with what the service is given by it.
    text = (ROOT / COMPOSE).read_text()
    [given] = re.findall(r"# +WINNOW_RUNTIME_URL=(\S+) docker compose --profile balanced up --scale runtime=2", text)
    assert given == f"http://balancer{balancer['environment']['WINNOW_BALANCER_BIND']}"
    assert (
        interpolated(services()["service"]["environment"]["WINNOW_RUNTIME_URL"], {"WINNOW_RUNTIME_URL": given}) == given
    )


@pytest.mark.parametrize("name", ["runtime", "redis", "balancer"])
def test_what_needs_no_key_is_in_a_network_of_its_own(name: str) -> None:
    networks = read_yaml(COMPOSE)["networks"]
    assert all(networks[network]["internal"] for network in services()[name]["networks"])
    assert "ports" not in (services(GPU).get(name) or {})
    assert "networks" not in (services(GPU).get(name) or {})


def test_everything_is_hardened() -> None:
    for service in services().values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert service.get("user") != "root"


@pytest.mark.parametrize("given", [{}, {"WINNOW_ADMIN_KEY": "0123456789abcdef0123456789abcdef"}])
def test_the_service_understands_its_environment(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINNOW_ADMIN_KEY", raising=False)
    environment = services()["service"]["environment"]
    passed_on = {
        name: given[name] if value is None else interpolated(value)
        for name, value in environment.items()
        if value or given
    }
    settings = check_settings(passed_on | stage(OURS["service"], "").environment | passed_on, monkeypatch)
    assert settings.runtime_url.host == "runtime"
    assert str(settings.runtime_url.port) in stage(OURS["runtime"], "").values("EXPOSE")
    assert urlsplit(settings.store_url.get_secret_value()).hostname == "redis"
    # Open is only what is published on loopback only: another test sees to that.
    assert settings.allow_open
    assert (settings.admin_key is None) == (not given)


def test_the_service_starts_with_arguments_it_has() -> None:
    assert "command" not in services()["service"]
    [command] = stage(OURS["service"], "").values("CMD")
    read = check_winnow_arguments(json.loads(command))
    assert read["host"] == "0.0.0.0"
    assert stage(OURS["service"], "").values("EXPOSE") == [str(read["port"])]


@pytest.mark.parametrize("path", [COMPOSE, GPU])
def test_the_runtime_starts_with_arguments_it_has(path: str) -> None:
    [entry_point] = stage(OURS["runtime"], "").values("ENTRYPOINT")
    command = [interpolated(argument) for argument in services(path)["runtime"]["command"]]
    assert unknown_to_sglang([*json.loads(entry_point), *command]) == []
    assert "--served-model-name=needle" in command
    port = stage(OURS["runtime"], "").values("EXPOSE")[0]
    assert {"--host=0.0.0.0", f"--port={port}", "--model-path=/model"} <= set(command)


def test_an_unknown_argument_would_be_seen() -> None:
    assert unknown_to_sglang(["--port=1", "--prot=1"]) == ["--prot"]


def test_mounted_files_are_in_the_repository() -> None:
    volumes = read_yaml(COMPOSE)["volumes"]
    for service in services().values():
        for volume in service.get("volumes", []):
            source = interpolated(volume).split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in volumes


def test_the_model_is_the_one_that_ships() -> None:
    [model, _] = services()["runtime"]["volumes"]
    assert (ROOT / interpolated(model).split(":")[0] / "config.json").exists()


def test_redis_keeps_every_write() -> None:
    command = shlex.join(services()["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command
    assert "redis:/data" in services()["redis"]["volumes"]


def test_redis_takes_its_arguments(tmp_path: Path) -> None:
    # It reads the command line before it binds: with a port that it cannot have it ends, and says which.
    program = shutil.which("redis-server")
    assert program is not None
    command = [program, *services()["redis"]["command"][1:], "--dir", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode != 0
    assert "Configured to not listen anywhere" in ended.stdout


def test_prometheus_configuration_is_valid() -> None:
    checked = subprocess.run(
        ["promtool", "check", "config", ROOT / "deploy/prometheus/prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_prometheus_scrapes_what_there_is() -> None:
    targets: set[str] = set()
    for job in read_yaml("deploy/prometheus/prometheus.yml")["scrape_configs"]:
        targets.update(target for each in job.get("static_configs", []) for target in each["targets"])
        targets.update(f"{name}:{each['port']}" for each in job.get("dns_sd_configs", []) for name in each["names"])
    ports = {f"{name}:{stage(dockerfile, '').values('EXPOSE')[0]}" for name, dockerfile in OURS.items()}
    metrics_bind = services()["balancer"]["environment"]["WINNOW_BALANCER_METRICS_BIND"]
    assert targets == ports | {f"balancer{metrics_bind}", "127.0.0.1:9090"}
    networks = set(services()["prometheus"]["networks"])
    assert all(networks & set(services()[name]["networks"]) for name in [*OURS, "balancer"])
    assert "--enable-metrics" in services()["runtime"]["command"]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = "deploy/grafana/provisioning"
    [source] = read_yaml(f"{provisioning}/datasources/prometheus.yaml")["datasources"]
    address = urlsplit(source["url"])
    assert address.hostname in services()
    assert services()[address.hostname]["ports"][0].endswith(f":{address.port}")
    [provider] = read_yaml(f"{provisioning}/dashboards/winnow.yaml")["providers"]
    mounted = {volume.split(":")[1] for volume in services()["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted
