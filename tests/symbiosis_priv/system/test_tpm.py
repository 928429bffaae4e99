"""The key of the cache comes out of a TPM, as docs/enclave.md says, and out of no other one. Needs swtpm, a TPM in
software (Debian: swtpm, libtss2-tcti-swtpm0, systemd), or is skipped."""

import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError
from tests.waiting import until

ENCRYPT = "systemd-creds encrypt --with-key=tpm2 $TPM --name=symbiosis-priv.cache-key KEY SEALED"
DECRYPT = "systemd-creds decrypt $TPM --name=symbiosis-priv.cache-key SEALED -"
SHOW = (
    "import hashlib; from symbiosis_priv.system.cache_key import cache_key as k; print(hashlib.sha256(k()).hexdigest())"
)

NewTpm = Callable[[], Path]


@pytest.fixture
def new_tpm(tmp_path: Path) -> Iterator[NewTpm]:
    """Start a TPM, and return its socket."""
    with ExitStack() as stack:

        def start() -> Path:
            state = tmp_path / f"tpm-{len(list(tmp_path.iterdir()))}"
            state.mkdir()
            socket = state / "socket"
            server = "--server", f"type=unixio,path={socket}", "--ctrl", f"type=unixio,path={socket}.ctrl"
            flags = "--flags", "not-need-init,startup-clear"
            process = subprocess.Popen(["swtpm", "socket", "--tpm2", "--tpmstate", f"dir={state}", *server, *flags])
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            until(socket.exists, within_s=20)
            return socket

        yield start


def test_a_tpm_gives_the_key_of_the_cache_to_a_descriptor(new_tpm: NewTpm, tmp_path: Path) -> None:
    missing = [name for name in ("swtpm", "systemd-creds") if shutil.which(name) is None]
    if missing or ctypes.util.find_library("tss2-tcti-swtpm") is None:
        pytest.skip(f"no software TPM: {' and '.join(missing) or 'libtss2-tcti-swtpm0'} missing")
    (tmp_path / "KEY").write_bytes(key := os.urandom(32))

    def run(command: str, tpm: Path) -> subprocess.CompletedProcess[str]:
        variables = {"TPM": f"--tpm2-device=swtpm:path={tpm}", "SYMBIOSIS_PRIV_CACHE_KEY_FD": "3"}
        variables |= {"PYTHON": sys.executable, "SHOW": SHOW}
        return subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=60
        )

    tpm, tenant = new_tpm(), f'{DECRYPT} | "$PYTHON" -c "$SHOW" 3<&0'
    run(ENCRYPT, tpm).check_returncode()
    (tmp_path / "KEY").unlink()
    assert key not in (tmp_path / "SEALED").read_bytes()
    shown = run(tenant, tpm)
    assert shown.stdout.strip() == hashlib.sha256(key).hexdigest(), shown.stderr
    other = run(tenant, new_tpm())
    assert other.returncode
    assert f"{ConfigError.__name__}: the key of the cache has 32 bytes, and not 0" in other.stderr
