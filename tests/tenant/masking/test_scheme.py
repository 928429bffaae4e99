"""A scheme's check of its promises with the given providers."""

from dataclasses import replace
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer, Registries
from tenant.masking.registry import registered, scheme_named

EXECUTOR = Peer("alpha", "A", "executor", "alpha.example", 7401, Path("alpha.pem"))
HELPER = Peer("beta", "B", "helper", "beta.example", 7402, Path("beta.pem"))
ALONE = Federation("sha256:" + "0" * 64, 10, Path("t.pem"), Path("t.key"), (EXECUTOR, HELPER))


def test_executors_from_registries_see_no_unmasked_rows() -> None:
    federation = replace(ALONE, registries=Registries(("r.example:7500",), Path("federation.pem")))
    for scheme in registered():
        scheme.check(ALONE)
        if not scheme.roles:
            continue
        if scheme.name in ("pad", "local"):
            scheme.check(federation)
        else:
            with pytest.raises(ConfigError, match=r"remove \[registry\]"):
                scheme.check(federation)


def test_a_scheme_that_needs_a_helper_is_refused_without_one() -> None:
    for scheme in registered():
        if "helper" in scheme.roles:
            with pytest.raises(RoleConflictError, match=r"needs a .* with role = 'helper'"):
                scheme.check(replace(ALONE, peers=(EXECUTOR,)))
        else:
            scheme.check(replace(ALONE, peers=(EXECUTOR,)))


def test_unmasked_rows_are_warned_about_if_a_helper_exists(caplog: pytest.LogCaptureFixture) -> None:
    scheme_named("none").check(replace(ALONE, peers=(EXECUTOR,)))
    scheme_named("pad").check(ALONE)
    assert not caplog.records
    scheme_named("none").check(ALONE)
    assert "masking = 'pad'" in caplog.text
