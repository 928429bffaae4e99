"""Lying providers are caught, and the abort gives them no information. Without verification, aborts leak bits."""

import warnings

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from transformers.quantizers.base import HfQuantizer

from symbiosis_priv.certificates.reading import fingerprint
from symbiosis_priv.federation import Federation
from symbiosis_priv.registry.descriptor import Trust
from symbiosis_priv.system.files import PrivateFolder
from tenant import RemoteConfig
from tenant.model.hf import RemoteQuantizer
from tenant.model.loading import load_language_model
from threat_model.active.manipulated_folders import attack_folders
from threat_model.active.registries import attack_registry
from threat_model.lab import Lab
from threat_model.suite import Suite


def refused(quick: Suite, kind: str) -> bool:
    """Returns True if the report has attacks of this kind, and the tenant as it is has refused all of them."""
    found = [trial for trial in quick.trials("Active adversaries") if trial.labels[0].startswith(f"{kind}: ")]
    return bool(found) and not any(trial.outcome.hits for trial in found)


def fallen(results: dict[str, bool]) -> set[str]:
    """The attacks that the tenant did not refuse."""
    return {name for name, refused in results.items() if not refused}


def test_every_lie_is_caught(quick: Suite) -> None:
    """Four sessions for each lie, and for each valuation of an error."""
    found = {trial.labels[0]: trial.outcome for trial in quick.trials("Active adversaries")}
    assert not any(outcome.hits for outcome in found.values())
    assert found["errors of valuation 0 to 31"].trials == 4 * 32
    assert found["helper: wrong effects"].trials == 4
    assert found["an error that shows the sign of a product"].trials == 32


def test_hostile_folders_are_refused_by_the_checks_of_folders(
    quick: Suite, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a tenant that checks no folder. Then only the seal and the digests refuse attacks."""
    assert refused(quick, "hostile folder")
    for module in (
        "tenant.model.hf",
        "symbiosis_priv.checkpoints.checkpoint",
        "symbiosis_priv.checkpoints.discovery.skeleton",
    ):
        monkeypatch.setattr(f"{module}.vet", lambda folder: {})
    for module in ("symbiosis_priv.checkpoints.checkpoint", "symbiosis_priv.checkpoints.discovery.skeleton"):
        monkeypatch.setattr(f"{module}.form_of", lambda path, config: None)
    monkeypatch.setattr("tenant.model.hf._check_not_redirected", lambda folder, config: None)
    monkeypatch.setattr("tenant.preparation.keys._bind", lambda folder, prepared, model: None)
    monkeypatch.setattr(
        "threat_model.active.manipulated_folders.load_language_model",
        lambda folder, *, remote, tokenizer: load_language_model(folder, remote=remote),
    )
    monkeypatch.setattr(PrivateFolder, "_check_safe", lambda self: None)
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: True)
    monkeypatch.setattr(
        "threat_model.active.manipulated_folders.load_adapter_tensors",
        lambda adapted, folder: adapted.load_adapter(str(folder), "default", is_trainable=True),  # as Trainer does
    )
    monkeypatch.setattr(RemoteConfig, "from_dict", classmethod(lambda cls, values: cls(**values)))
    monkeypatch.setattr(RemoteQuantizer, "__init__", HfQuantizer.__init__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fallen(attack_folders(lab))
    assert {
        "a quantization_config that turns masking off",
        "a norm times 2",
        "a chat template that repeats what a text says",
        "a tokenizer that is replaced before it is confirmed",
        "an index that points to the tensors of another folder",
        "a channel scale in the cache",
        "verification keys of another user",
        "a training checkpoint with a norm of the base model",
    } <= found


def test_lying_registries_are_refused_by_the_checks_of_descriptors(
    quick: Suite, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted faults: a tenant that accepts any signer, one that identifies revoked certificates by all of their
    bytes, and one that ignores companies and its own file."""
    assert refused(quick, "lying registry")
    with monkeypatch.context() as patch:
        patch.setattr(Trust, "check", lambda self, certificate, *, at: None)
        patch.setattr("symbiosis_priv.certificates.reading.is_signed", lambda *_: True)
        found = fallen(attack_registry(lab.federation))
    assert found == {
        "an executor that another authority vouches for",
        "an executor with another port than it has signed",
    }
    with monkeypatch.context() as patch:
        for module in (
            "symbiosis_priv.certificates.revocation",
            "symbiosis_priv.registry.descriptor",
            "tenant.routing.discovery",
        ):
            patch.setattr(f"{module}.mark_of", lambda c: f"tbs-{fingerprint(c.public_bytes(Encoding.DER))}")
        assert fallen(attack_registry(lab.federation)) == {
            "an executor that was revoked, its certificate's signature written another way"
        }
    with monkeypatch.context() as patch:
        patch.setattr("tenant.routing.discovery.is_internal", lambda host: False)
        assert fallen(attack_registry(lab.federation)) == {"an address of the tenant's own machine, link or cloud"}
    monkeypatch.setattr("tenant.routing.discovery.in_common", lambda one, other: [])
    monkeypatch.setattr(Federation, "admissible", lambda self, executor, holders: True)
    assert fallen(attack_registry(lab.federation)) == {
        "an executor of a helper's company",
        "an executor by the name of a pinned one",
        "an executor at the address of a pinned helper",
    }


def test_aborts_tell_a_sign_only_if_answers_are_not_verified(quick: Suite) -> None:
    verified, skipped = (trial.outcome for trial in quick.trials("Selective aborts"))
    assert not verified.broken  # the abort is a constant: see `test_every_lie_is_caught`
    assert skipped.success == 1.0
