"""One process per card, with two processes on a CPU in place of two cards."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from transformers import TrainerCallback
from typer.testing import CliRunner

from provider.cli import app
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import LocalFederation, ProviderOptions
from tenant import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of
from tests.end_to_end.conftest import Open, Train
from tests.waiting import until

STEPS = 6


def events(local: LocalFederation, name: str, event: str) -> list[dict[str, Any]]:
    lines = [line for line in local.logs(name).split("\n") if f'"event": "{event}"' in line]
    return [json.loads(line) for line in lines]


class KillsTheSecondCard(TrainerCallback):
    """After half of the steps, of the executor and of the helper."""

    def __init__(self, local: LocalFederation) -> None:
        self.local = local

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STEPS // 2:
            for name in self.local.names:
                (pid,) = (event["pid"] for event in events(self.local, name, "card_started") if event["card"] == 1)
                os.kill(pid, signal.SIGKILL)


def test_a_card_that_is_killed_in_mid_training_changes_no_bit_and_no_other_card(
    llama: Path, open_model: Open, train: Train, tmp_path: Path
) -> None:
    """Executor and helper have two processes each, with a layer each: one entry and certificate, and one bill."""
    expected = train(open_model(llama, RemoteConfig(masking="simulate", checkpoint=llama)), steps=STEPS)
    options: ProviderOptions = {"executor": {"processes": 2}, "quota": {"rows_per_s": 1e9}}
    with LocalFederation(llama, tmp_path / "run", provider_options=options) as local:
        entries = {peer.name: peer for peer in load_federation(local.federation).peers}
        assert [len(peer.addresses) for peer in entries.values()] == [2, 2]
        for name in local.names:  # the cards start at the same time
            started = {event["card"]: event["layers"] for event in events(local, name, "card_started")}
            assert started == {0: "0", 1: "1"}
        model = open_model(llama, RemoteConfig(federation=local.federation))
        trained = train(model, steps=STEPS, callbacks=[KillsTheSecondCard(local)])
        losses = [[entry.get("loss") for entry in one.state.log_history] for one in (trained, expected)]
        assert losses[0] == losses[1]
        weights = [get_peft_model_state_dict(one.model) for one in (trained, expected)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
        for name in local.names:
            until(lambda: len(events(local, name, "listening")) == 3)  # noqa: B023  # a card may come back later
            assert [event["card"] for event in events(local, name, "card_ended")] == [1]
            assert sorted(event["card"] for event in events(local, name, "card_started")) == [0, 1, 1]
            addresses = [event["address"] for event in events(local, name, "listening")]
            assert sorted(set(addresses)) == sorted(map("{0[0]}:{0[1]}".format, entries[name].addresses))
        # another tenant, while no card is lost: its rows are on one bill, to the row
        second = local.directory / "second.toml"
        names = local.issue_tenant("second"), local.federation.read_text(encoding="utf-8")
        second.write_text(names[1].replace("/tenant.", "/second."), encoding="utf-8")
        model = open_model(llama, RemoteConfig(federation=second))
        with torch.no_grad():
            model(input_ids=torch.arange(3, 9)[None])
        ledger = ledger_of(model)
        backend_of(model).close()
        local.stop()
        shown = CliRunner().invoke(app, ["usage", "--config", str(local.directory / "executor.toml")])
        assert ledger is not None
        assert {line["tenant"]: line["rows"] for line in json.loads(shown.stdout)}["second"] == ledger.rows > 0
