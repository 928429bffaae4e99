"""A federation's authority, executors and registries with its certificates, and their descriptors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.registry.descriptor import MS, Trust, VerifiedDescriptor, describe, verify
from symbiosis_priv.registry.protocol import RegistryClient

DIGEST = "sha256:" + "7" * 64
DEADLINE_S = 20.0


def newest(verified: Iterable[VerifiedDescriptor]) -> dict[str, VerifiedDescriptor]:
    """The newest descriptor of each key, and the first of equal ones."""
    found: dict[str, VerifiedDescriptor] = {}
    for one in verified:
        if one.key not in found or found[one.key].age < one.age:
            found[one.key] = one
    return found


@dataclass
class Vouching:
    """An authority with executors and registries, and their announcements."""

    folder: Path
    authority: Identity
    began: int = field(default_factory=lambda: round(MS * time.time()))
    known: dict[str, Identity] = field(default_factory=dict)

    @classmethod
    def in_folder(cls, folder: Path) -> Vouching:
        return cls(folder, issuing.create_authority(folder, name="federation"))

    @property
    def trust(self) -> Trust:
        return Trust.load(self.authority.certificate)

    def identity(self, name: str, *, operator: str | None = None) -> Identity:
        """The certificate of an executor or a registry."""
        if name not in self.known:
            self.known[name] = issuing.issue(
                self.folder, authority=self.authority, kind=Kind.PROVIDER, name=name, operator=operator or f"{name} AG"
            )
        return self.known[name]

    def says(self, name: str, *, after_ms: int = 0, layers: str = "0-3", **changes: Any) -> bytes:
        """An executor's signed descriptor, issued `after_ms` milliseconds after the start."""
        values: dict[str, Any] = {
            "address": ("localhost", 7401),
            "model_digest": DIGEST,
            "weight_bits": 10,
            "layers": LayerRange.parse(layers),
            "issued": self.began + after_ms,
            "lifetime_s": 600.0,
        }
        return describe(self.identity(name), **(values | changes))

    def said(self, name: str, **changes: Any) -> VerifiedDescriptor:
        """The descriptor of `says`, verified at its time of issue."""
        issued = changes.get("issued", self.began + changes.get("after_ms", 0))
        return verify(self.says(name, **changes), self.trust, now=issued / MS)

    def client(self, address: str) -> RegistryClient:
        """A client for a registry; use it as a context manager."""
        return RegistryClient(address, self.trust, deadline_s=DEADLINE_S)
