"""The manifest: its digest depends on its whole content, and other data is refused."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from symbiosis_priv.checkpoints.manifest import MANIFEST_VERSION, GroupEntry, Manifest
from symbiosis_priv.errors import CheckpointError

entries = st.builds(
    GroupEntry,
    members=st.lists(st.text(max_size=5), min_size=1, max_size=3).map(tuple),
    inputs=st.integers(1, 2**20),
    outputs=st.lists(st.integers(1, 2**20), min_size=1, max_size=3).map(tuple),
    digest=st.text("0123456789abcdef", min_size=64, max_size=64),
)
manifests = st.builds(
    Manifest, version=st.just(1), weight_bits=st.integers(4, 12), groups=st.lists(entries, max_size=3).map(tuple)
)


@given(manifests, manifests)
def test_manifests_round_trip_and_differ_in_digest(a: Manifest, b: Manifest) -> None:
    assert Manifest.from_json(a.to_json()) == a
    assert (a == b) is (a.digest == b.digest)


@example(b'{"\xff": 1}')
@example(b'{"later": ' + b"[" * 10_000)
@given(st.binary(max_size=60) | manifests.map(lambda m: m.to_json()[:-1]))
def test_other_data_is_a_checkpoint_error(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_json(data)


def test_a_manifest_of_a_later_version_is_refused() -> None:
    future = Manifest(version=MANIFEST_VERSION + 1, weight_bits=10, groups=())
    with pytest.raises(CheckpointError, match="upgrade"):
        Manifest.from_json(msgspec.json.encode(future))


@pytest.mark.parametrize(
    "change", [{"inputs": 0}, {"inputs": 1 << 30}, {"outputs": ()}, {"outputs": (-1,)}, {"members": ()}]
)
def test_a_group_without_width_is_refused(change: dict[str, object]) -> None:
    entry = {"members": ("a",), "inputs": 1, "outputs": (1,), "digest": "0" * 64}
    document = {"version": MANIFEST_VERSION, "weight_bits": 10, "groups": [entry]}
    assert Manifest.from_json(msgspec.json.encode(document))
    with pytest.raises(CheckpointError):
        Manifest.from_json(msgspec.json.encode(document | {"groups": [entry | change]}))
    with pytest.raises(CheckpointError):
        Manifest.from_json(msgspec.json.encode(document | {"weight_bits": 0}))
