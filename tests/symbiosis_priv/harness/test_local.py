"""The launcher: providers start, stop, restart at the same address, and leave nothing behind."""

from pathlib import Path

import pytest
from psutil import pid_exists

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import LocalFederation


def test_providers_restart_at_their_address_others_join_and_all_end_with_the_block(
    llama_path: Path, tmp_path: Path
) -> None:
    layers = {"executor-1": "0", "executor-2": "1", "helper-1": "0-1"}
    local = LocalFederation(llama_path, tmp_path / "run", executors=2, helpers=2, layers=layers, pad_helpers=1)
    with local:
        assert local.names == ("executor-1", "executor-2", "helper-1", "helper-2")
        federation = load_federation(local.federation)
        assert [f"{peer.host}:{peer.port}" for peer in federation.peers] == [local.address(n) for n in local.names]
        assert {peer.name: str(peer.layers) for peer in federation.peers if peer.layers} == layers
        assert federation.pad_helpers == 1
        one, two = federation.executors
        assert 'layers = "1"' in (tmp_path / "run" / "executor-2.toml").read_text()

        before, address = local.pid("helper-1"), local.address("helper-1")
        local.kill("helper-1")
        assert local.pid("helper-1") is None
        local.restart("helper-1")
        assert local.address("helper-1") == address
        assert local.logs("helper-1").count('"event": "started"') == 2
        with pytest.raises(ConfigError, match="executor-1"):
            local.kill("executor")

        with pytest.raises(ConfigError, match="there is a provider 'helper-1' here"):
            local.add("helper-1", "helper")
        with pytest.raises(ConfigError, match="'7' goes beyond this model, whose layers are 0-1"):
            local.add("late", layers="7")
        local.add("late", layers="1")
        assert "late" in local.names
        assert load_federation(local.federation).executors[:2] == (one, two)
        assert load_federation(local.federation).executors[2].layers == two.layers
        pids = [before, *map(local.pid, local.names)]
    assert not any(pid_exists(pid) for pid in pids if pid is not None)
