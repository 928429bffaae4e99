"""A quarantined provider stays quarantined after changes of its name, key, address or layers."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given, strategies as st

from symbiosis_priv.certificates.reading import load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.federation import Peer
from tenant.core.masked import Quarantine
from tests.vouching import Vouching


def found(vouching: Vouching, who: str, **changes: object) -> Peer:
    """An executor as a registry lists it."""
    certificate = load_certificates(vouching.identity(who, operator="Liar AG").certificate)[0]
    peer = Peer(who, "Liar AG", "executor", "liar.example", 7401, certificate, layers=LayerRange(0, 3))
    return replace(peer, **changes)  # type: ignore[arg-type]


@given(name=st.booleans(), key=st.booleans(), address=st.booleans(), layers=st.integers(3, 5))
def test_one_unchanged_trait_identifies_a_quarantined_provider(
    vouching: Vouching, name: bool, key: bool, address: bool, layers: int
) -> None:
    """A provider can change each trait with the help of its authority; one unchanged trait is enough."""
    quarantine = Quarantine()
    quarantine.add(found(vouching, "liar"))
    again = found(
        vouching,
        "liar" if key else "fresh",
        name="LIAR" if name else "somebody",
        port=7401 if address else 7402,
        layers=LayerRange(0, layers),
    )
    assert (again in quarantine) == (name or key or address)


def test_another_executor_of_its_operator_is_judged_by_its_own_answers(vouching: Vouching) -> None:
    quarantine = Quarantine()
    quarantine.add(found(vouching, "liar"))
    assert found(vouching, "fresh", port=7402) not in quarantine


def test_changes_of_a_pinned_file_make_no_difference(vouching: Vouching, tmp_path: Path) -> None:
    pinned = tmp_path / "liar.pem"
    pinned.write_bytes(vouching.identity("liar").certificate.read_bytes())
    peer = found(vouching, "liar", certificate=pinned)
    quarantine = Quarantine()
    quarantine.add(peer)
    pinned.unlink()
    assert peer in quarantine
