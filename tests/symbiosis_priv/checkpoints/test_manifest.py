"""The manifest: its digest depends on its whole content, and other data is refused. A stack of experts as one dense
matrix: its product contains the products of single experts, or their sum.
"""

import msgspec
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.manifest import MANIFEST_VERSION, GroupEntry, Manifest, separate
from symbiosis_priv.errors import CheckpointError
from tests.experts import join

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


SMALL = st.integers(1, 4)


def stack_of(experts: int, outputs: int, inputs: int, *, transposed: bool) -> Tensor:
    shape = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(experts * outputs + inputs))


@given(SMALL, SMALL, SMALL, st.booleans(), st.sampled_from(["outputs", "inputs"]))
def test_a_matrix_is_separated_into_the_stack_it_was_joined_from(
    e: int, o: int, d: int, transposed: bool, joined: str
) -> None:
    stack = stack_of(e, o, d, transposed=transposed)
    matrix = join(stack, joined=joined, transposed=transposed)
    back = separate(matrix, experts=e, joined=joined, transposed=transposed)  # type: ignore[arg-type]
    assert torch.equal(back, stack)
    group = GroupSpec(("experts.stack",), matrix.shape[1], (matrix.shape[0],), e, joined)  # type: ignore[arg-type]
    assert group.shape(matrix.shape[0], transposed=transposed) == (stack.shape if e > 1 else stack.shape[1:])
