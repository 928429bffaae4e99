"""`masking = "lwe"`: products of the row x + e, to the bit, through real providers, and the hints that they need."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.keystream import StreamKey, derive, expand
from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, RoleConflictError, StorageError, VerificationError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import GroupIndex, HintBits
from tenant import RemoteConfig
from tenant.core.pads import PadOrder, SessionSecret
from tenant.masking.lwe import LweSource
from tenant.masking.registry import session_scheme
from tenant.masking.scheme import Materials
from tenant.preparation.hints import MOST_ROWS, Hints, make_hints
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tests.tenant.conftest import NewSession, Scripted
from tests.tenant.scripted import ScriptedProvider, product_of, ring_rows, spoil


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def prepared(store: WeightStore, cache: Path) -> Preparation:
    preparation = prepare(store, digest=store.manifest().digest, cache=cache)
    make_hints(preparation, store, bits=16)
    return preparation


@contextlib.contextmanager
def lwe_source(prepared: Preparation) -> Iterator[tuple[LweSource, SessionSecret]]:
    secret = SessionSecret()
    source = LweSource(Materials(preparation=prepared, secret=secret, holders=lambda *_: (), store=None))
    try:
        yield source, secret
    finally:
        for worker in source.workers:
            worker.stop()
            assert worker.join(20.0)


ONES = torch.ones(1, 64, dtype=torch.int32)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The errors e that are drawn during a test, in order. Only tests ever see them."""
    seen: list[Tensor] = []
    real = lattice.noise

    def revealing(words: Tensor) -> Tensor:
        seen.append(real(words))
        return seen[-1]

    monkeypatch.setattr("symbiosis_priv.arithmetic.lattice.noise", revealing)
    return seen


@pytest.mark.parametrize("bits", [16, 20, 24, 32])
def test_a_product_is_that_of_the_row_and_its_error(
    bits: HintBits, store: WeightStore, tmp_path: Path, noise: list[Tensor], scripted: Scripted
) -> None:
    """To the bit at 32 bits; a rounded hint adds less than the bound, and every row passes the exact check."""
    preparation = prepare(store, digest=store.manifest().digest, cache=tmp_path)
    make_hints(preparation, store, bits=bits)
    session = scripted.new_session("lwe", [scripted.executor], prepared=preparation, pool_memory=0)
    for index in range(len(preparation.facts)):
        for direction in DIRECTIONS:
            width = preparation.facts[index].inputs(direction)
            rows = torch.randint(-9000, 9000, (5, width), generator=torch.Generator().manual_seed(index)).int()
            noise.clear()
            got = session.product(GroupIndex(index), direction, rows)
            error = got - product_of(store, index, direction, rows + noise[0])
            assert int(error.abs().max()) <= lattice.most_error(bits)
            assert bits < 32 or not error.any()
            assert noise[0].any()
    assert session.ledger().answers_verified == 10 * len(preparation.facts)


def test_every_row_in_every_part_is_exact(
    prepared: Preparation, store: WeightStore, noise: list[Tensor], executor: ScriptedProvider, new_session: NewSession
) -> None:
    """Drawn ahead or not, split, in several parts, in a bucket, by a lane or not: x + e comes back, and is verified."""
    session = new_session("lwe", [executor], prepared=prepared, part_bytes=1 << 12, row_bucket=3)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.integers(0, len(prepared.facts) - 1), testing.directions(), st.integers(1, 40), st.integers(0, 2**32))
    def check(index: GroupIndex, direction: Direction, count: int, seed: int) -> None:
        rows = ring_rows(prepared, index, direction, count, seed=seed) // 2
        wanted = product_of(store, index, direction, rows)
        got = session.product(index, direction, rows)
        # e is at most 32, and its own product is far from 0
        weight = store.group(index).weight.abs().long()
        most = 32 * weight.sum(1 if direction == FORWARD else 0) + lattice.most_error(16)
        assert bool(((got - wanted).abs() <= most).all())
        assert not torch.equal(got, wanted)

    check()
    assert session.ledger().answers_rejected == 0
    sent = torch.cat([heard.rows.flatten() for heard in executor.executed])
    assert len(sent.unique()) > 0.99 * len(sent)  # no mask was used twice, also of rows of zeros


def test_a_mask_is_made_of_fresh_secrets_and_errors(prepared: Preparation) -> None:
    """Every row of `c P + e` has the c and the e of its own number, from keystreams of their own."""
    name, width, first = prepared.facts[0].entry.name, prepared.facts[0].inputs(FORWARD), 0
    with lwe_source(prepared) as (source, secret):
        seed = secret.seed_for("lwe")
        for rows in (3, 1, 2, 40):
            pad = source.draw(PadOrder(GroupIndex(0), FORWARD, rows))
            mask = torch.zeros(rows, width, dtype=torch.int32)
            pad.add_mask(mask)

            def stream(label: str, words: int, rows: int = rows, first: int = first) -> Tensor:
                return expand(StreamKey(derive(seed, label, name, FORWARD)), first_row=first, rows=rows, width=words)

            expected = lattice.noise(stream("lwe error", lattice.NOISE_WORDS * width))
            uniform = Hints.find(prepared).matrix(width)
            uniform.add_product(lattice.secrets(stream("lwe secret", lattice.WORDS)), expected)
            assert torch.equal(mask, expected)
            first += rows


def test_a_pad_keeps_no_secret_once_its_effect_is_computed(prepared: Preparation) -> None:
    with lwe_source(prepared) as (source, _):
        pad = source.draw(PadOrder(GroupIndex(0), FORWARD, 5))
        assert pad.shares[0].effect.result(20.0) is not None
    found, new = dict[int, object](), list[object]([pad])
    while new:
        one = new.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType | FunctionType):
            found[id(one)] = one
            new += gc.get_referents(one)
            new += [one.numpy()] if isinstance(one, Tensor) else []
    secrets = [one for one in found.values() if isinstance(one, Tensor) and one.dtype == torch.int16 and len(one)]
    assert len(found) > 20
    assert secrets == []


def test_a_lie_is_found_and_the_executor_is_blamed(prepared: Preparation, scripted: Scripted) -> None:
    liar, other = scripted.new_provider(), scripted.new_provider()
    liar.behaviour = spoil
    kept = replace(prepared, forget_keys=lambda: None)
    session = scripted.new_session("lwe", [liar], prepared=kept)
    with pytest.raises(VerificationError, match=f"an answer of provider {liar.peer('executor').name!r}"):
        session.product(GroupIndex(0), FORWARD, ONES)
    session = scripted.new_session("lwe", [liar, other], prepared=kept)
    for direction in DIRECTIONS:
        for _ in range(4):  # also one that the liar was to answer, under pads that another executor may see as well
            session.product(GroupIndex(0), direction, ring_rows(prepared, 0, direction, 2) // 2)
    assert [p.peer for p in session.routes.executors if p.peer in session.routes.quarantined] == [liar.peer("executor")]


# Hints


def hint_file(preparation: Preparation, place: str = "0.forward") -> Path:
    assert preparation.folder is not None
    return preparation.folder / "lwe-16" / place


@pytest.fixture
def fresh(store: WeightStore, tmp_path: Path) -> Preparation:
    """A preparation with hints of its own, which a test may damage."""
    preparation = prepare(store, digest=store.manifest().digest, cache=tmp_path / "cache")
    make_hints(preparation, store, bits=16)
    return preparation


def test_making_hints_goes_on_where_it_was(
    fresh: Preparation, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete hint stays as it is; one that is missing, cut off or altered is made again, with the same bits."""
    folder = hint_file(fresh).parent
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "0.forward").unlink()
    (folder / "0.backward").write_bytes(before["0.backward"][:-1])
    (folder / "1.forward").write_bytes(bytes([before["1.forward"][0] ^ 1]) + before["1.forward"][1:])
    (folder / "1.backward").write_bytes(b"")
    made, real = list[GroupEntry](), store.quantised

    def quantised(entry: GroupEntry) -> QuantisedGroup:
        made.append(entry)
        return real(entry)

    monkeypatch.setattr(store, "quantised", quantised)
    steps: list[tuple[int, int]] = []
    make_hints(fresh, store, bits=16, progress=lambda done, total: steps.append((done, total)))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert made == list(fresh.manifest.groups[:2])
    assert (steps[0][0], steps[-1]) == (len(before) - 4, (len(before), len(before)))


def test_hints_are_refused_without_room(store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = prepare(store, digest=store.manifest().digest, cache=tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    with pytest.raises(StorageError, match=r"need 0\.\d\d GB .* 0\.01 GB are free"):
        make_hints(preparation, store, bits=16)
    assert not any(hint_file(preparation).parent.iterdir())


@pytest.mark.parametrize("damage", ["bit", "exchanged", "short", "missing", "of other keys"])
def test_only_the_tenants_own_hint_is_used(
    damage: str, fresh: Preparation, prepared: Preparation, executor: ScriptedProvider, new_session: NewSession
) -> None:
    """Also refused: a hint of other weights, which has another seal because the seal covers the weights' digest."""
    file, data = hint_file(fresh), bytearray(hint_file(fresh).read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
    elif damage == "exchanged":
        data = bytearray(hint_file(fresh, "0.backward").read_bytes())
    elif damage == "of other keys":
        data = bytearray(hint_file(prepared).read_bytes())
    file.unlink() if damage == "missing" else file.write_bytes(data[: -(damage == "short") or None])
    session = new_session("lwe", [executor], prepared=fresh)
    with pytest.raises(CheckpointError, match=r"was not prepared|is damaged, or was made for other weights"):
        session.product(GroupIndex(0), FORWARD, ONES)
    assert not executor.executed


def test_a_hint_is_sealed_for_its_place(fresh: Preparation) -> None:
    """Two layers may have equal weights; each has its own R."""
    first, *others = fresh.manifest.groups
    hints = Hints(replace(fresh, manifest=msgspec.structs.replace(fresh.manifest, groups=(first, first, *others))), 16)
    content = np.zeros(8, dtype=np.uint8)
    assert hints._seal((GroupIndex(0), FORWARD), content) != hints._seal((GroupIndex(1), FORWARD), content)


def test_a_hint_that_others_can_read_or_replace_is_refused(fresh: Preparation, scripted: Scripted) -> None:
    for path, mode in ((hint_file(fresh), 0o644), (hint_file(fresh).parent, 0o777), (fresh.folder, 0o777)):
        assert path is not None
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(ConfigError, match="other users can"):
            scripted.new_session("lwe", [scripted.executor], prepared=fresh).product(GroupIndex(0), FORWARD, ONES)
        path.chmod(before)
    hint_file(fresh).rename(hint_file(fresh).parent / "moved")
    hint_file(fresh).symlink_to(hint_file(fresh).parent / "moved")
    with pytest.raises(CheckpointError, match="not prepared"):
        scripted.new_session("lwe", [scripted.executor], prepared=fresh).product(GroupIndex(0), FORWARD, ONES)


def test_damage_to_a_hint_in_use_convicts_no_executor(fresh: Preparation, scripted: Scripted) -> None:
    """The file changes below its map, after it was checked."""
    session = scripted.new_session("lwe", [scripted.executor], prepared=fresh, pool_memory=0)
    session.product(GroupIndex(0), FORWARD, ONES.expand(4, 64))
    with hint_file(fresh).open("r+b") as file:
        file.write(bytes(file.seek(0)) + b"\x55" * 500_000)
    with pytest.raises(CheckpointError, match="No provider is to blame"):
        session.product(GroupIndex(0), FORWARD, ONES.expand(4, 64))
    assert not session.routes.quarantined


def test_a_hint_that_does_not_belong_to_the_weights_is_found(
    fresh: Preparation, executor: ScriptedProvider, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: sealed like the tenant's own, but computed from other weights. No product passes the check."""
    hints = Hints(fresh, 16)
    weight = torch.randint(-511, 512, (sum(fresh.manifest.groups[0].outputs), 64), dtype=torch.int16)
    hint_file(fresh).write_bytes(hints._make((GroupIndex(0), FORWARD), RingMatrix(weight, weight_bits=10)).tobytes())
    session = new_session("lwe", [executor], prepared=replace(fresh, forget_keys=lambda: None))
    with pytest.raises(VerificationError):
        session.product(GroupIndex(0), FORWARD, ONES)


def test_a_hint_on_disk_says_nothing_about_r(fresh: Preparation) -> None:
    """The D of every hint is under the keys' secret, with a keystream of its own."""
    hints, streams = Hints(fresh, 16), set()
    for index in range(len(fresh.facts)):
        for direction in DIRECTIONS:
            stored = hint_file(fresh, f"{index}.{direction}").read_bytes()[-8 * lattice.HEIGHT - 32 : -32]
            used = hints.hint(GroupIndex(index), direction).added
            assert int(used.min()) >= 0  # residues
            streams.add((np.frombuffer(stored, dtype=np.int64) ^ used.numpy()).tobytes())
    assert len(streams) == 2 * len(fresh.facts)
    assert all(len(set(stream)) > 200 for stream in streams)


# Rows under one P


def counted(preparation: Preparation) -> tuple[Path, int, str]:
    """The file of the number of rows, that number, and the draw of P."""
    assert preparation.folder is not None
    path = preparation.folder / "lwe-rows"
    rows, draw = path.read_text().split()
    return path, int(rows), draw


def test_the_count_of_rows_survives_restarts(fresh: Preparation) -> None:
    path, _, draw = counted(fresh)
    Hints(fresh, 16).reserve(5)
    assert counted(fresh)[1] == 1 << 20
    again = Hints(fresh, 16)
    again.reserve(1)
    again.reserve((1 << 20) - 1)  # reserved already
    assert counted(fresh)[1] == 2 << 20
    again.reserve((1 << 20) + 5)
    assert counted(fresh) == (path, (3 << 20) + 5, draw)
    path.write_text(f"{MOST_ROWS - (1 << 20):020} {draw}")
    Hints(fresh, 16).reserve(1)
    with pytest.raises(ConfigError, match="1,099,511,627,776 rows"):
        Hints(fresh, 16).reserve(1)
    for content in ("", "-1", f"{5:020}", f"{'9' * 21} {draw}", f"{'x' * 20} {draw}", f"{5:020} {draw}0"):
        path.write_text(content)
        with pytest.raises(CheckpointError, match="damaged"):
            Hints(fresh, 16).reserve(1)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be counted"):
        Hints(fresh, 16).reserve(1)


def test_without_its_count_a_matrix_is_never_used_again(
    fresh: Preparation, store: WeightStore, executor: ScriptedProvider, new_session: NewSession
) -> None:
    before, open_session = Hints(fresh, 16), new_session("lwe", [executor], prepared=fresh, pool_memory=0)
    open_session.product(GroupIndex(0), FORWARD, ONES)
    matrix = before.matrix(64).rows(0, 8)
    counted(fresh)[0].unlink()
    make_hints(fresh, store, bits=16)
    assert counted(fresh)[1] == 0
    assert not torch.equal(Hints(fresh, 16).matrix(64).rows(0, 8), matrix)
    with pytest.raises(CheckpointError, match="another matrix P was prepared"):
        before.reserve(1 << 20)
    new_session("lwe", [executor], prepared=fresh).product(GroupIndex(0), FORWARD, ONES)


# Refused by name


def test_what_it_does_not_do_is_refused_by_name(
    prepared: Preparation, preparation: Preparation, scripted: Scripted
) -> None:
    with pytest.raises(ConfigError, match=r"'lwe' needs ring_bits = 32, not 24"):
        scripted.new_session("lwe", [scripted.executor], prepared=prepared, ring_bits=24)
    with pytest.raises(RoleConflictError, match=r"'lwe' \(experimental: a lattice assumption, and 6 GB"):
        scripted.new_session("pad", [scripted.executor])
    with pytest.raises(ConfigError, match="has no option 'K'"):
        RemoteConfig(masking="lwe", federation="federation.toml", masking_options={"K": 1536})
    with pytest.raises(CheckpointError, match=r"no hints are prepared .* tenant prepare .* --masking lwe"):
        session_scheme("lwe").facts(preparation)
    with (
        lwe_source(prepared) as (source, _),
        pytest.raises(ConfigError, match="does not mask rows for stacks of experts"),
    ):
        source.draw(PadOrder(GroupIndex(0), FORWARD, 1, counts=(1,)))
