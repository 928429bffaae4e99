"""The store of a registry: the newest descriptor of each key, limited, shared by operators."""

import contextlib
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from provider.registry.store import Store
from symbiosis_priv.errors import DescriptorError
from symbiosis_priv.registry.descriptor import MAX_LIFETIME_S, MEMORY_S, MS, VerifiedDescriptor
from tests.vouching import DIGEST, Vouching, newest

NAMES = ("gamma", "delta", "epsilon")


@given(announcements=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5)), max_size=12))
def test_the_newest_of_every_key_is_listed(vouching: Vouching, announcements: list[tuple[str, int]]) -> None:
    """Announcements may come in any order: an older descriptor is refused, and a repeated one changes nothing."""
    store, now = Store(), vouching.began / MS
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


def test_an_older_descriptor_is_refused_after_the_newest_has_expired(vouching: Vouching) -> None:
    """A long lifetime is announced and then a short one. Both are forgotten after both lifetimes."""
    began, store = vouching.began / MS, Store()
    long = vouching.said("gamma", lifetime_s=float(MAX_LIFETIME_S))
    for said in (long, vouching.said("gamma", after_ms=1, lifetime_s=1.0, draining=True)):
        store.put(said, now=began)
    for hours in (1, 12, 23):
        with pytest.raises(DescriptorError, match="newer"):
            store.put(long, now=began + 3600 * hours)
        assert store.listed(DIGEST, now=began + 3600 * hours) == []
    assert began + MEMORY_S > long.descriptor.expires / MS
    store.put(vouching.said("delta"), now=began + MEMORY_S + 1)
    assert len(store._newest) == 1


def test_operators_share_the_limit_of_executors(vouching: Vouching) -> None:
    """One operator's certificates, however many, leave room: the operator with the most executors loses one."""
    store, now = Store(limit=4), vouching.began / MS
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


def _operators(store: Store, vouching: Vouching, now: float) -> list[str]:
    from symbiosis_priv.federation.parties import plain
    from symbiosis_priv.registry.descriptor import verify

    return [plain(verify(data, vouching.trust, now=now).operator) for data in store.listed(DIGEST, now=now)]


def test_a_refusal_leaves_the_store_as_it_was(vouching: Vouching) -> None:
    store, now = Store(), vouching.began / MS

    def refuse() -> None:
        raise DescriptorError("too often")

    with pytest.raises(DescriptorError, match="too often"):
        store.put(vouching.said("gamma"), now=now, admit=refuse)
    assert store.listed(None, now=now) == []
    store.put(vouching.said("gamma"), now=now)
