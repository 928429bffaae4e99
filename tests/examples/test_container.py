"""The container file: not root, only packages from the builder's folder, and a health check."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "examples/deploy/Containerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if re.match(r"[A-Z]+ ", line)]


def arguments(step: str) -> list[str]:
    return [words for name, words in STEPS if name == step]


def test_the_container_runs_without_root_and_has_only_installed_packages() -> None:
    last = max(i for i, (name, _) in enumerate(STEPS) if name == "FROM")
    assert [words for name, words in STEPS[last:] if name == "COPY"] == [
        "--from=build /opt/symbiosis-priv /opt/symbiosis-priv"
    ]
    (user,) = arguments("USER")
    assert user == "symbiosis"
    assert "pip" not in " ".join(words for _, words in STEPS[last:])


def test_files_that_the_build_copies_exist_and_are_named() -> None:
    sources = [word for words in arguments("COPY") if "--from" not in words for word in words.split()[:-1]]
    assert "." not in sources
    assert all((ROOT / source).exists() for source in sources)


def test_packages_are_pinned_and_there_is_a_health_check() -> None:
    assert any("--constraint /src/constraints.txt" in words for words in arguments("RUN"))
    (check,) = arguments("HEALTHCHECK")
    path = re.findall(r"http://127\.0\.0\.1:9464(/\w+)", check)[0]
    assert f'"{path}"' in (ROOT / "provider/operations/metrics.py").read_text(encoding="utf-8")


def test_the_gpu_build_can_compile_kernels() -> None:
    """A compiler on request, and a folder for compiled kernels that the service can write to."""
    last = "\n".join(words for name, words in STEPS if name in ("ARG", "ENV", "RUN"))
    assert "GPU" in last
    assert "TRITON_CACHE_DIR=/var/cache/symbiosis-provider/" in last
    unit = (ROOT / "examples/deploy/symbiosis-provider.service").read_text(encoding="utf-8").splitlines()
    assert "PrivateDevices=true" not in unit
    assert {"DevicePolicy=closed", "DeviceAllow=char-nvidia* rw", "CacheDirectory=symbiosis-provider"} <= set(unit)
    assert "Environment=TRITON_CACHE_DIR=/var/cache/symbiosis-provider/triton" in unit
