from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.deployment.charts import (
    CHART,
    VALUES_FILES,
    Manifest,
    containers,
    manifests,
    matches,
    of_kind,
    pods,
    render,
    values_of,
)
from tests.deployment.haproxy import check_haproxy
from tests.deployment.repository import (
    ROOT,
    check_settings,
    check_winnow_arguments,
    read_yaml,
    unknown_to_sglang,
    version,
)
from winnow_service.settings import Settings

# The oldest that the chart says it is for, and the newest that there are schemas of.
KUBERNETES = ("1.27", kubernetes_validate.latest_version())
# Kinds that operators bring with them: for these there are no schemas.
CUSTOM_KINDS = {"LeaderWorkerSet", "PrometheusRule", "ServiceMonitor"}
WARNING = 2
KEY = "0123456789abcdef0123456789abcdef"

# How long the balancer takes a look-up for valid.
LOOKED_UP_EVERY_SECONDS = 5

each_values_file = pytest.mark.parametrize("name", VALUES_FILES)
SIDECARS = [name for name in VALUES_FILES if name.startswith("sidecar")]
GATEWAYS = [name for name in VALUES_FILES if name.startswith("gateway")]


def runtime_containers(name: str) -> list[Manifest]:
    return [container for _, container in containers(name) if container["name"] == "runtime"]


def service_containers(name: str) -> list[Manifest]:
    return [container for _, container in containers(name) if container["name"] == "service"]


def balancer_containers(name: str) -> list[Manifest]:
    return [container for _, container in containers(name) if container["name"] == "balancer"]


def secret_references(name: str) -> dict[str, dict[str, Any]]:
    """By variable, over all containers."""
    return {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]
        for _, container in containers(name)
        for variable in container.get("env", [])
        if "valueFrom" in variable
    }


def test_there_are_values_files_for_every_shape() -> None:
    shapes = {
        (values_of(name).get("topology", "sidecar"), values_of(name)["runtime"].get("kind")) for name in VALUES_FILES
    }
    assert shapes == {(topology, kind) for topology in ("sidecar", "gateway") for kind in (None, "LeaderWorkerSet")}


@each_values_file
def test_helm_lints_it_clean(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name), strict=True)
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@each_values_file
def test_kubernetes_takes_it(name: str, kubernetes: str) -> None:
    assert manifests(name)
    for manifest in manifests(name):
        if manifest["kind"] in CUSTOM_KINDS:
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(manifest, kubernetes, strict=True)
        else:
            kubernetes_validate.validate(manifest, kubernetes, strict=True)


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@each_values_file
def test_kubernetes_takes_every_pod(name: str, kubernetes: str) -> None:
    # Also those in resources that there is no schema for.
    for pod_name, template in pods(name):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = template["metadata"] | {"name": pod_name}
        kubernetes_validate.validate(pod, kubernetes, strict=True)


def test_validation_objects() -> None:
    [pod] = [template for _, template in pods("gateway.yaml") if template["spec"]["containers"][0]["name"] == "service"]
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod["spec"] | {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError, match="container"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@each_values_file
def test_names_are_unique(name: str) -> None:
    identities = [(each["kind"], each["metadata"]["name"]) for each in manifests(name)]
    assert len(identities) == len(set(identities))


@each_values_file
def test_services_lead_to_ports_of_pods(name: str) -> None:
    for service in of_kind(name, "Service").values():
        targets = [template for _, template in pods(name) if matches(service["spec"]["selector"], template)]
        assert targets
        for template in targets:
            ports = {port["name"] for each in template["spec"]["containers"] for port in each.get("ports", [])}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@each_values_file
def test_budgets_and_policies_select_pods(name: str) -> None:
    templates = [template for _, template in pods(name)]
    for budget in of_kind(name, "PodDisruptionBudget").values():
        assert any(matches(budget["spec"]["selector"]["matchLabels"], template) for template in templates)
    for policy in of_kind(name, "NetworkPolicy").values():
        selector = policy["spec"]["podSelector"]["matchLabels"]
        # The controller of LeaderWorkerSets labels the pods of a group.
        in_group = selector.get("leaderworkerset.sigs.k8s.io/name") in of_kind(name, "LeaderWorkerSet")
        assert in_group or any(matches(selector, template) for template in templates)


@each_values_file
def test_autoscalers_scale_what_there_is(name: str) -> None:
    for autoscaler in of_kind(name, "HorizontalPodAutoscaler").values():
        target = autoscaler["spec"]["scaleTargetRef"]
        scaled = of_kind(name, target["kind"])[target["name"]]
        assert scaled["apiVersion"] == target["apiVersion"]
        # Otherwise every upgrade would set back what the autoscaler found.
        assert "replicas" not in scaled["spec"]


@each_values_file
def test_monitors_select_services(name: str) -> None:
    for monitor in of_kind(name, "ServiceMonitor").values():
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        [service] = [each for each in of_kind(name, "Service").values() if labels <= each["metadata"]["labels"].items()]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_jobs_have_the_names_they_have_with_compose() -> None:
    jobs = {
        relabeling["replacement"]
        for monitor in of_kind("gateway.yaml", "ServiceMonitor").values()
        for endpoint in monitor["spec"]["endpoints"]
        for relabeling in endpoint["relabelings"]
        if relabeling["targetLabel"] == "job"
    }
    configured = read_yaml("deploy/prometheus/prometheus.yml")["scrape_configs"]
    assert jobs == {job["job_name"] for job in configured} - {"prometheus"}


@each_values_file
def test_pods_are_restricted(name: str) -> None:
    for _, template in pods(name):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        # Its variables would begin with WINNOW_, as settings do.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for _, container in containers(name):
        security = container["securityContext"]
        assert security == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


@each_values_file
def test_what_serves_is_probed(name: str) -> None:
    for pod_name, container in containers(name):
        if pod_name.endswith("-worker"):
            continue
        assert container["startupProbe"]
        assert container["livenessProbe"]
        # Beside the service, the service's readiness is the runtime's.
        assert ("readinessProbe" in container) or (container["name"] == "runtime" and name in SIDECARS)
    for container in service_containers(name):
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


@each_values_file
def test_the_service_understands_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [container] = service_containers(name)
    environment = {variable["name"]: variable.get("value", KEY) for variable in container["env"]}
    settings = check_settings(environment, monkeypatch)
    assert settings.admin_key is not None
    assert not settings.allow_open
    assert check_winnow_arguments(container["args"])["host"] == "0.0.0.0"
    bundled = values_of(name).get("redis", {}).get("mode") != "external"
    assert ("demo-winnow-redis" in settings.store_url.get_secret_value()) == bundled
    assert bundled == ("demo-winnow-redis" in of_kind(name, "Service"))


@each_values_file
def test_the_runtime_understands_its_arguments(name: str) -> None:
    for container in runtime_containers(name):
        assert unknown_to_sglang(container["args"]) == []


@each_values_file
def test_secrets_have_what_is_asked_of_them(name: str) -> None:
    references = secret_references(name)
    secrets = of_kind(name, "Secret")
    existing = values_of(name)["auth"].get("existingSecret")
    assert bool(secrets) == (existing is None)
    for reference in references.values():
        if existing is not None:
            assert reference["name"] == existing
        else:
            assert reference["key"] in secrets[reference["name"]]["stringData"]


@each_values_file
def test_secrets_are_nowhere_else(name: str) -> None:
    auth = values_of(name)["auth"]
    secret = [auth.get("adminKey"), auth.get("runtimeApiKey"), values_of(name).get("redis", {}).get("password")]
    for manifest in manifests(name):
        if manifest["kind"] != "Secret":
            text = yaml.safe_dump(manifest)
            assert not [value for value in secret if value and value in text]


@pytest.mark.parametrize("name", SIDECARS)
def test_beside_the_service_the_runtime_listens_on_loopback(name: str) -> None:
    for container in runtime_containers(name):
        assert "--host=127.0.0.1" in container["args"]
        assert "ports" not in container
    [service] = service_containers(name)
    assert {"name": "WINNOW_RUNTIME_URL", "value": "http://127.0.0.1:30000"} in service["env"]
    assert not any(each.endswith("-runtime") for each in of_kind(name, "Service"))


@pytest.mark.parametrize("name", GATEWAYS)
def test_behind_a_gateway_the_runtime_asks_for_a_key_and_is_shut_off(name: str) -> None:
    for container in runtime_containers(name):
        assert {"--host=0.0.0.0", "--api-key=$(RUNTIME_API_KEY)"} <= set(container["args"])
    references = secret_references(name)
    assert references["RUNTIME_API_KEY"] == references["WINNOW_RUNTIME_API_KEY"]
    [rule] = of_kind(name, "NetworkPolicy")["demo-winnow-runtime"]["spec"]["ingress"]
    allowed, *scrapers = rule["from"]
    assert allowed["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert scrapers == values_of(name).get("networkPolicy", {}).get("scrapers", [])


def test_who_may_scrape_reaches_the_metrics_of_the_service() -> None:
    policy = values_of("gateway.yaml")["networkPolicy"]
    assert policy["clients"]
    assert policy["scrapers"]
    rule, of_balancer = of_kind("gateway.yaml", "NetworkPolicy")["demo-winnow-service"]["spec"]["ingress"]
    assert rule["from"] == [*policy["clients"], *policy["scrapers"]]
    assert of_balancer == {"ports": [{"port": 8405}], "from": policy["scrapers"]}


@each_values_file
def test_a_runtime_outlives_what_it_answers(name: str) -> None:
    [service] = service_containers(name)
    environment = {variable["name"]: variable.get("value") for variable in service["env"]}
    drain = float(environment.get("WINNOW_DRAIN_TIMEOUT_SECONDS") or Settings().drain_timeout_seconds)
    before = float(service["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = before + drain if name in SIDECARS else LOOKED_UP_EVERY_SECONDS
    for container in runtime_containers(name):
        command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        assert needed < float(seconds) < values_of(name).get("runtime", {}).get("terminationGracePeriodSeconds", 120)


@pytest.mark.parametrize("name", GATEWAYS)
def test_a_balancer_outlives_the_streams_of_its_service(name: str) -> None:
    [balancer], [service] = balancer_containers(name), service_containers(name)
    needed = float(service["lifecycle"]["preStop"]["exec"]["command"][1]) + Settings().drain_timeout_seconds
    seconds = float(balancer["lifecycle"]["preStop"]["exec"]["command"][1])
    assert needed < seconds < values_of(name).get("service", {}).get("terminationGracePeriodSeconds", 60)


def test_a_runtime_waits_for_a_service_that_drains_longer() -> None:
    longer = {"service": {"env": {"WINNOW_DRAIN_TIMEOUT_SECONDS": "80"}}}
    rendered = render(merged(values_of("sidecar.yaml"), longer))
    assert any('command: [sleep, "87"]' in text for text in rendered.values())


@pytest.mark.parametrize("name", GATEWAYS)
def test_the_balancer_of_a_gateway_finds_each_runtime(name: str, tmp_path: Path) -> None:
    [service] = service_containers(name)
    [balancer] = balancer_containers(name)
    environment = {variable["name"]: variable["value"] for variable in balancer["env"]}
    address = f"http://{environment['WINNOW_BALANCER_BIND']}"
    assert {"name": "WINNOW_RUNTIME_URL", "value": address} in service["env"]
    files = of_kind(name, "ConfigMap")["demo-winnow-balancer"]["data"]
    assert files["haproxy.cfg"].strip() == (ROOT / "deploy/haproxy/haproxy.cfg").read_text().strip()
    check_haproxy(files, balancer["args"], environment, tmp_path)
    runtime = values_of(name)["runtime"]
    most = runtime["autoscaling"].get("maxReplicas", 4)
    listed = f"server-template runtime {2 * most} demo-winnow-runtime.prod.svc.cluster.local:30000 resolvers dns"
    assert listed in files["runtimes.cfg"]
    assert f"hold valid {LOOKED_UP_EVERY_SECONDS}s" in files["runtimes.cfg"]
    headless = of_kind(name, "Service")["demo-winnow-runtime"]["spec"]
    assert headless["clusterIP"] == "None"
    # Those that are not ready, or about to end, are not in the DNS.
    assert "publishNotReadyAddresses" not in headless
    # Addresses lead to the pods themselves: there the port of the name is what the runtime listens on.
    [port] = headless["ports"]
    [answering] = [each for each in runtime_containers(name) if "ports" in each]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in answering["ports"]


def test_only_the_service_reaches_redis() -> None:
    [rule] = of_kind("sidecar.yaml", "NetworkPolicy")["demo-winnow-redis"]["spec"]["ingress"]
    [allowed] = rule["from"]
    reaching = [name for name, pod in pods("sidecar.yaml") if matches(allowed["podSelector"]["matchLabels"], pod)]
    assert reaching == ["demo-winnow-runtime"]


def test_redis_is_the_one_of_compose() -> None:
    compose = read_yaml("compose.yaml")["services"]["redis"]
    [container] = [each for _, each in containers("sidecar.yaml") if each["name"] == "redis"]
    assert container["image"] == compose["image"]
    assert container["args"][: len(compose["command"])] == compose["command"]


def test_every_node_of_a_group_knows_its_place() -> None:
    [leader, worker] = runtime_containers("sidecar-leaderworkerset.yaml")
    assert leader["args"] == worker["args"]
    place = {"--nnodes=$(LWS_GROUP_SIZE)", "--node-rank=$(LWS_WORKER_INDEX)"}
    place |= {"--dist-init-addr=$(LWS_LEADER_ADDRESS):20000"}
    assert place <= set(leader["args"])
    [group] = of_kind("sidecar-leaderworkerset.yaml", "LeaderWorkerSet").values()
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert len(service_containers("sidecar-leaderworkerset.yaml")) == 1


def test_images_have_the_version_of_the_chart_and_the_project() -> None:
    chart = read_yaml("helm/winnow/Chart.yaml")
    assert chart["version"] == chart["appVersion"] == version()
    images = {container["image"] for _, container in containers("sidecar.yaml")}
    assert {f"winnow-runtime:{version()}-cuda", f"winnow-service:{version()}"} <= images


def test_dashboards_are_those_of_grafana_in_the_repository() -> None:
    dashboards = of_kind("gateway.yaml", "ConfigMap")["demo-winnow-dashboards"]
    files = {path.name: path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    # YAML ends a block of text with one line break.
    assert {name: text.strip() for name, text in (dashboards["data"] or {}).items()} == {
        name: text.strip() for name, text in files.items()
    }


def test_rules_are_those_of_prometheus_in_the_repository() -> None:
    specs = [rule["spec"] for rule in of_kind("gateway.yaml", "PrometheusRule").values()]
    files = [yaml.safe_load(path.read_text()) for path in (ROOT / "deploy/prometheus/rules").glob("*.yml")]
    # Nothing else, such as promtool's tests, is between them.
    assert all(file.keys() == {"groups"} for file in files)
    assert sorted(map(yaml.safe_dump, specs)) == sorted(map(yaml.safe_dump, files))


def merged(base: Manifest, over: Manifest) -> Manifest:
    return base | {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in over.items()
    }


def test_notes_say_how_to_reach_it() -> None:
    notes = render(values_of("sidecar.yaml"))["NOTES.txt"]
    assert "http://demo-winnow.prod:8000" in notes
    assert "get secret demo-winnow " in notes
    assert "WARNING" not in notes
    assert KEY not in notes
    assert "WARNING" in render(values_of("sidecar-cpu.yaml"))["NOTES.txt"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"topology": "mesh"}, "topology"),
        ({"runtimes": 3}, "runtimes"),
        ({"auth": {"adminKey": "short"}}, "adminKey"),
        ({"service": {"port": 0}}, "port"),
        ({"service": {"type": "ExternalName"}}, "type"),
        ({"service": {"replicas": 0}}, "replicas"),
        ({"service": {"env": {"winnow_max_body_bytes": 1}}}, "winnow_max_body_bytes"),
        # Helm writes it as 1e+07.
        ({"service": {"env": {"WINNOW_MAX_BODY_BYTES": 10000000}}}, "WINNOW_MAX_BODY_BYTES"),
        ({"service": {"env": {"WINNOW_ALLOW_OPEN": "true"}}}, "WINNOW_ALLOW_OPEN"),
        ({"runtime": {"kind": "StatefulSet"}}, "kind"),
        ({"runtime": {"args": ["--host=0.0.0.0"]}}, "args"),
        ({"runtime": {"leaderWorkerSet": {"size": 1}}}, "size"),
        ({"runtime": {"sharedMemory": "lots"}}, "sharedMemory"),
        ({"runtime": {"model": {"name": ""}}}, "name"),
        ({"runtime": {"model": {"volume": {"emptyDir": {}, "nfs": {}}}}}, "volume"),
        ({"balancer": {"clusterDomain": "a b"}}, "clusterDomain"),
        ({"redis": {"mode": "none"}}, "mode"),
        ({"redis": {"external": {"url": "http://redis"}}}, "url"),
        ({"redis": {"external": {"url": "redis://:password@redis"}}}, "url"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable"),
        ({"networkPolicy": {"clients": [{"pods": {}}]}}, "clients"),
        ({"serviceMonitor": {"interval": "often"}}, "interval"),
    ],
)
def test_the_schema_refuses(wrong: Manifest, named: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=f"/{named}|'{named}'"):
        render(merged(values_of("sidecar.yaml"), wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"auth": {"adminKey": ""}}, "auth.adminKey"),
        ({"topology": "gateway"}, "auth.runtimeApiKey"),
        ({"redis": {"password": ""}}, "redis.password"),
        ({"redis": {"mode": "external"}}, "redis.external.url"),
        ({"runtime": {"autoscaling": {"enabled": True}}}, "runtime.autoscaling.metrics"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.keySecret.name"),
    ],
)
def test_the_chart_refuses(wrong: Manifest, message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=message):
        render(merged(values_of("sidecar.yaml"), wrong))
