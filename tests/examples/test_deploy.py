"""`examples/deploy`: the container, compose.yaml and its dashboard, and the Kubernetes manifests.

No container engine is needed. The services of compose.yaml run as processes, with the paths of the container replaced.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind
from tests import warm
from tests.cases import cases
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
CONTAINERFILE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes/provider.yaml").read_text(encoding="utf-8")))
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text(encoding="utf-8"))

STEPS = [
    line.split(maxsplit=1) for line in CONTAINERFILE.replace("\\\n", " ").splitlines() if re.match(r"[A-Z]+ ", line)
]


def arguments(step: str) -> list[str]:
    return [words for name, words in STEPS if name == step]


def image(step: str) -> list[str]:
    """The words of the image's ENTRYPOINT or CMD."""
    [words] = arguments(step)
    return list(json.loads(words))


def command(service: dict[str, Any], folders: dict[str, Path]) -> list[str]:
    """What a service's container runs, with folders of this machine in place of the container's."""
    words = [*service.get("entrypoint", image("ENTRYPOINT")), *service.get("command", image("CMD"))]
    assert words[0] == "/opt/symbiosis-priv/bin/symbiosis-priv"
    for inside, folder in folders.items():
        words = [word.replace(inside, str(folder)) for word in words]
    words = [word.replace("0.0.0.0:7500", "127.0.0.1:0") for word in words]
    return [sys.executable, "-m", "symbiosis_priv.cli", *words[1:], "--ready-file", str(folders["ready"])]


def projected(folder: Path, *files: Path) -> None:
    """Files as Kubernetes mounts a Secret: links through a folder that is replaced when the Secret changes."""
    (folder / "..2026").mkdir(parents=True)
    (folder / "..data").symlink_to("..2026")
    for file in files:
        shutil.copy(file, folder / "..2026")
        (folder / file.name).symlink_to(Path("..data") / file.name)


def provider_folders(folder: Path, model: Path, identity: Identity, authority: Identity, role: str) -> dict[str, Path]:
    """The volumes of one provider; its provider.toml is as compose.yaml describes it."""
    folders = {
        "/etc/symbiosis-provider": folder / "etc",
        "/var/cache/symbiosis-provider": folder / "cache",
        "/var/lib/symbiosis-provider": folder / "data",
        "ready": folder / "ready",
    }
    projected(folder / "etc/keys", identity.certificate, identity.key, authority.certificate)
    (folder / "data").mkdir()
    shutil.copytree(model, folder / "etc/model")
    (folder / "etc/provider.toml").write_text(
        f'name = "{role}"\nroles = ["{role}"]\nlisten = "127.0.0.1:0"\n[model]\ncheckpoint = "model"\n'
        f'[tls]\ncertificate = "keys/{role}.pem"\nkey = "keys/{role}.key"\n'
        f'tenant_authority = "keys/{authority.certificate.name}"\n[executor]\nthreads = 1\n'
        f'[usage]\ndatabase = "{folder}/data/usage.sqlite"\n[metrics]\nlisten = "127.0.0.1:0"\nhosts = ["{role}"]\n'
    )
    return folders


def test_the_services_of_compose_run_and_have_the_figures_of_the_dashboard(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    authority = issuing.create_authority(keys)
    federation = issuing.create_authority(keys, name="federation")
    running: list[warm.Popen] = []
    figures = ""
    try:
        for role in ("executor", "helper"):
            identity = issuing.issue(keys, authority=None, kind=Kind.PROVIDER, name=role)
            folders = provider_folders(tmp_path / role, tiny, identity, authority, role)
            cache = {"SYMBIOSIS_PRIV_CACHE": str(folders["/var/cache/symbiosis-provider"])}
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | cache
            process = warm.Popen(command(COMPOSE["services"][role], folders), env=environment, stdout=subprocess.PIPE)
            running.append(process)
            assert process.stdout is not None
            metrics = json.loads(process.stdout.readline())["metrics"]
            with urllib.request.urlopen(f"http://{metrics}/readyz", timeout=20) as answer:
                assert answer.status == 200
            by_name = urllib.request.Request(f"http://{metrics}/metrics", headers={"Host": f"{role}:9464"})
            with urllib.request.urlopen(by_name, timeout=20) as answer:
                figures += answer.read().decode()
        registry = tmp_path / "registry"
        identity = issuing.issue(keys, authority=federation, kind=Kind.PROVIDER, name="registry", operator="R")
        projected(registry / "etc/keys", identity.certificate, identity.key, federation.certificate)
        (registry / "etc/keys/revoked.txt").write_text("")
        folders = {"/etc/symbiosis-registry": registry / "etc", "ready": registry / "ready"}
        running.append(warm.Popen(command(COMPOSE["services"]["registry"], folders)))
        until((registry / "ready").exists)
    finally:
        for process in running:
            process.terminate()
        assert [process.wait(60) for process in running] == [0] * len(running)
        for process in running:
            if process.stdout is not None:
                process.stdout.close()
    dashboard = json.loads((DEPLOY / "monitoring/dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    monitoring = DEPLOY / "monitoring"
    (rules,) = yaml.safe_load((monitoring / "prometheus.yml").read_text(encoding="utf-8"))["rule_files"]
    assert f"./monitoring/{rules}:/etc/prometheus/{rules}:ro" in COMPOSE["services"]["prometheus"]["volumes"]
    (group,) = yaml.safe_load((monitoring / rules).read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert set(alerts) == {"ProviderNotReady", "ReloadFailed", "UsageUnwritten", "CertificateExpires"}
    queries += alerts.values()
    asked = {name for query in queries for name in re.findall(r"symbiosis_provider_\w+", query)}
    assert len(asked) > 20
    for name in asked:  # a family without values yet has its description only
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert f"# TYPE {name} " in figures or f"# TYPE {base} " in figures, name


@cases(__file__, "missing")
def test_a_container_without_its_files_ends_and_says_what_is_missing(
    tiny: Path, tmp_path: Path, missing: str, said: str
) -> None:
    keys = tmp_path / "keys"
    authority = issuing.create_authority(keys)
    identity = issuing.issue(keys, authority=None, kind=Kind.PROVIDER, name="executor")
    folders = provider_folders(tmp_path / "executor", tiny, identity, authority, "executor")
    (tmp_path / "executor/etc" / missing).rename(tmp_path / "away")
    done = warm.run(command(COMPOSE["services"]["executor"], folders), stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr


def test_prometheus_asks_the_services_of_compose() -> None:
    scraped = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = [target for job in scraped for group in job["static_configs"] for target in group["targets"]]
    assert {target.rpartition(":")[0] for target in targets} <= set(COMPOSE["services"])
    mounted = [volume.split(":")[0] for volume in COMPOSE["services"]["grafana"]["volumes"][:-1]]
    assert all((DEPLOY / path).is_file() for path in mounted)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_takes_the_configuration() -> None:
    subprocess.run(["promtool", "check", "config", str(DEPLOY / "monitoring/prometheus.yml")], check=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one["kind"])
def test_a_manifest_fits_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest | {"spec": {**manifest["spec"], "replica": 2}}, "1.31", strict=True)


def test_manifests_name_what_exists() -> None:
    """Objects that a manifest refers to, and paths and arguments that the image and the provider have."""
    pod = MANIFESTS[0]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert ["provider", *container["args"]] == [*image("ENTRYPOINT")[1:], *image("CMD")]
    assert pod["securityContext"]["runAsUser"] == int(re.findall(r"--uid (\d+)", CONTAINERFILE)[0])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in MANIFESTS[0]["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claims | set(volumes)
    generated = [one["name"] for kind in ("configMap", "secret") for one in KUSTOMIZATION[f"{kind}Generator"]]
    assert generated == [volumes["config"]["configMap"]["name"], volumes["keys"]["secret"]["secretName"]]
    served = (ROOT / "provider/operations/metrics.py").read_text(encoding="utf-8")
    probes = [container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")]
    assert all(f'"{probe["path"]}"' in served for probe in probes)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_renders_the_kustomization(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path, dirs_exist_ok=True)
    (tmp_path / "keys").mkdir()
    for generator in (*KUSTOMIZATION["configMapGenerator"], *KUSTOMIZATION["secretGenerator"]):
        for file in generator["files"]:
            (tmp_path / file).write_text("-")
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == ["ConfigMap", "PodDisruptionBudget", "Secret", "Service", "StatefulSet"]


def test_tunnels_of_providers_behind_nat_end_where_haproxy_forwards_their_names() -> None:
    """And the key of a tunnel allows one port on loopback only."""
    nat = {path.name: path.read_text(encoding="utf-8") for path in (DEPLOY / "behind-nat").iterdir()}
    restricted = r'^restrict,port-forwarding,permitlisten="127.0.0.1:(\d+)",command="/bin/false" ssh-ed25519 \S+ (\w+)$'
    allowed = {name: port for port, name in re.findall(restricted, nat["authorized_keys"], re.MULTILINE)}
    assert allowed == {"alpha": "7411", "beta": "7412"}
    assert len(re.findall(r"^[^#]", nat["authorized_keys"], re.MULTILINE)) == len(allowed)
    backends = re.findall(r"^backend (\w+)\n    server tunnel 127.0.0.1:(\d+)$", nat["haproxy.cfg"], re.MULTILINE)
    assert dict(backends) == allowed
    names = re.findall(r"use_backend (\w+) if { req.ssl_sni -i (\S+) }", nat["haproxy.cfg"])
    assert names == [(name, f"{name}.example") for name in allowed]
    for setting in ("AllowTcpForwarding remote", "GatewayPorts no", "PasswordAuthentication no"):
        assert f"    {setting}\n" in nat["sshd_config"]
    unit = nat["symbiosis-tunnel.service"]
    for option in (
        "StrictHostKeyChecking=yes",
        "ExitOnForwardFailure=yes",
        f"-R 127.0.0.1:{allowed['alpha']}:127.0.0.1:",
    ):
        assert option in unit


def test_the_container_runs_without_root_and_has_only_installed_packages() -> None:
    last = max(i for i, (name, _) in enumerate(STEPS) if name == "FROM")
    assert [words for name, words in STEPS[last:] if name == "COPY"] == [
        "--from=build /opt/symbiosis-priv /opt/symbiosis-priv"
    ]
    (user,) = arguments("USER")
    assert user == "symbiosis"
    assert "pip" not in " ".join(words for _, words in STEPS[last:])
