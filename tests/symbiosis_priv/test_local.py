"""The launcher: providers come up, go down, come back at the same address, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.local import LocalFederation


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_provider_comes_back_at_its_address_and_all_are_gone_at_the_end(llama_path: Path, tmp_path: Path) -> None:
    with LocalFederation(llama_path, tmp_path / "run", executors=2) as local:
        assert local.names == ("executor-1", "executor-2", "helper")
        federation = load_federation(local.federation)
        assert [f"{peer.host}:{peer.port}" for peer in federation.peers] == [local.address(n) for n in local.names]
        before, address = local.pid("helper"), local.address("helper")
        local.kill("helper")
        assert local.pid("helper") is None
        local.restart("helper")
        assert local.address("helper") == address
        assert local.logs("helper").count('"listening"') == 2
        with pytest.raises(ConfigError, match="executor-1"):
            local.kill("executor")
        pids = [before, *map(local.pid, local.names)]
    assert not any(is_running(pid) for pid in pids if pid is not None)


def test_a_provider_that_ends_at_once_is_an_error_with_its_reason(llama_path: Path, tmp_path: Path) -> None:
    options = {"limits": {"max_rows": 0}}
    with pytest.raises(ConfigError, match="max_rows"), LocalFederation(llama_path, tmp_path, provider_options=options):
        pytest.fail("it started")
