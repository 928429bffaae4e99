"""The store of a registry: the newest descriptor of each key, durable, limited, shared by operators."""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from provider.registry.store import Store
from symbiosis_priv.errors import ConfigError, DescriptorError, StorageError
from symbiosis_priv.registry.descriptor import MAX_LIFETIME_S, MEMORY_S, MS, VerifiedDescriptor
from tests.vouching import DIGEST, Vouching, newest

NAMES = ("gamma", "delta", "epsilon")


@given(announcements=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5)), max_size=12))
def test_the_newest_of_every_key_is_listed(vouching: Vouching, announcements: list[tuple[str, int]]) -> None:
    """Announcements may come in any order: an older descriptor is refused, and a repeated one changes nothing."""
    store, now = Store(None), vouching.began / MS
    taken: list[VerifiedDescriptor] = []
    for name, step in announcements:
        said = vouching.said(name, issued=vouching.began + step)
        known = newest(taken).get(said.key)
        if known is not None and known.age > said.age:
            with pytest.raises(DescriptorError, match="newer"):
                store.put(said, now=now)
        else:
            store.put(said, now=now)
            taken.append(said)
        assert set(store.listed(DIGEST, now=now)) == {one.data for one in newest(taken).values()}
    store.close()


def test_an_older_descriptor_is_refused_after_the_newest_has_expired(vouching: Vouching, tmp_path: Path) -> None:
    """A long lifetime is announced and then a short one, also with a restart between. Both are forgotten after both
    lifetimes."""
    began, database = vouching.began / MS, tmp_path / "registry.sqlite"
    long = vouching.said("gamma", lifetime_s=float(MAX_LIFETIME_S))
    short = vouching.said("gamma", after_ms=1, lifetime_s=1.0, draining=True)
    store = Store(database)
    for said in (long, short):
        store.put(said, now=began)
    for hours in (1, 12, 23):
        store.close()
        store = Store(database)
        with pytest.raises(DescriptorError, match="newer"):
            store.put(long, now=began + 3600 * hours)
        assert store.listed(DIGEST, now=began + 3600 * hours) == []
    assert began + MEMORY_S > long.descriptor.expires / MS
    store.put(vouching.said("delta"), now=began + MEMORY_S + 1)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM newest").fetchone() == (1,)
    store.close()


def test_only_live_executors_of_the_model_are_listed(vouching: Vouching) -> None:
    store, now = Store(None), vouching.began / MS
    gamma, epsilon = vouching.said("gamma"), vouching.said("epsilon", after_ms=2, lifetime_s=5.0)
    other = vouching.said("delta", after_ms=1, model_digest="sha256:" + "8" * 64)
    for said in (gamma, other, epsilon):
        store.put(said, now=now)
    assert store.listed(DIGEST, now=now) == [gamma.data, epsilon.data]
    assert store.listed(None, now=now) == [gamma.data, other.data, epsilon.data]
    assert store.listed(DIGEST, now=now + 10) == [gamma.data]
    store.close()


def test_operators_share_the_limit_of_executors(vouching: Vouching) -> None:
    """One operator's certificates, however many, leave room for others; the operator with the most executors loses
    one."""
    store, now = Store(None, limit=4), vouching.began / MS
    for number in range(6):
        vouching.identity(f"mass{number}", operator="Mass AG" if number % 2 else "MASS  ag")
        said = vouching.said(f"mass{number}", after_ms=number)
        with contextlib.suppress(DescriptorError):
            store.put(said, now=now)
    taken = {"Mass AG": 4}
    for name, expected in (("gamma", 3), ("delta", 2)):
        store.put(vouching.said(name), now=now)
        taken = Counter(_operators(store, vouching, now))
        assert taken["massag"] == expected
    with pytest.raises(DescriptorError, match="4 executors already"):
        store.put(vouching.said("mass5", after_ms=9), now=now)
    store.put(vouching.said("epsilon"), now=now)
    with pytest.raises(DescriptorError, match="4 executors already"):
        store.put(vouching.said("zeta"), now=now)  # as many operators as places: the present executors stay
    store.put(vouching.said("gamma", after_ms=9), now=now)  # and they can continue to announce
    store.close()


def _operators(store: Store, vouching: Vouching, now: float) -> list[str]:
    from symbiosis_priv.federation.parties import plain
    from symbiosis_priv.registry.descriptor import verify

    return [plain(verify(data, vouching.trust, now=now).operator) for data in store.listed(DIGEST, now=now)]


def test_descriptors_that_are_no_longer_valid_are_dropped(vouching: Vouching) -> None:
    store, now = Store(None), vouching.began / MS
    gamma, delta = vouching.said("gamma"), vouching.said("delta", after_ms=1)
    for said in (gamma, delta):
        store.put(said, now=now)
    issued = {gamma.data: now, delta.data: (vouching.began + 1) / MS}
    assert store.drop_unless(lambda data, at: issued[data] == at and data == delta.data) == 1
    assert store.listed(DIGEST, now=now) == [delta.data]
    store.close()


def test_another_file_is_refused_as_database(tmp_path: Path) -> None:
    other, older = tmp_path / "other.sqlite", tmp_path / "older.sqlite"
    other.write_bytes(b"not a database, and longer than its header would be" * 9)
    with contextlib.closing(sqlite3.connect(older)) as connection:
        connection.execute("CREATE TABLE log (number INTEGER)")
        connection.execute("PRAGMA user_version = 1")
    for path in (other, older):
        before = path.read_bytes()
        with pytest.raises(ConfigError, match="--database"):
            Store(path)
        assert path.read_bytes()[100:] == before[100:]


def test_failures_of_the_disk_are_errors_of_the_tree(vouching: Vouching) -> None:
    store = Store(None)
    store.close()  # like a disk that fails
    with pytest.raises(StorageError, match="database fails"):
        store.listed(DIGEST, now=0.0)
    with pytest.raises(StorageError, match="database fails"):
        store.put(vouching.said("gamma"), now=0.0)


def test_a_refusal_leaves_the_store_as_it_was(vouching: Vouching) -> None:
    store, now = Store(None), vouching.began / MS

    def refuse() -> None:
        raise StorageError("too often")

    with pytest.raises(StorageError, match="too often"):
        store.put(vouching.said("gamma"), now=now, admit=refuse)
    assert store.listed(None, now=now) == []
    store.put(vouching.said("gamma"), now=now)
    store.close()
