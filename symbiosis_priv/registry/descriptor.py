"""What an executor says of itself, signed: where it is, which layers of which model it serves, and until when.

A registry passes descriptors on, and nobody believes it (`statements`). What it can do is to hold one back, or to show
an older one that has not expired. A reader remembers the newest of each key, so an older one does not come back; asks
several registries, and takes the newest; and a descriptor lives for minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import Identity, hosts_of, load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import ConfigError, DescriptorError
from symbiosis_priv.limits import MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.registry import statements
from symbiosis_priv.registry.statements import CLOCK_TOLERANCE_S, MS, Milliseconds, Statement, Trust, Vouched

MAX_LIFETIME_S: Final = 86_400
MAX_LAYERS: Final = 1 << 16

_DOMAIN: Final = b"descriptor 1"

Digest = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]


class Descriptor(Statement, frozen=True):
    """An executor in its own words. Of two descriptors of one key, the one that was issued later counts.

    Args:
        host: where it listens: one of the hosts of its certificate, spelled as there.
        port: likewise.
        model_digest: of the whole model.
        weight_bits: of its weights.
        first_layer: that it serves.
        last_layer: that it serves, included.
        capacity: what it can do, relative to others.
        expires: when it is not true any more unless it is said again.
        draining: it is about to leave: nobody should begin anything there.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    model_digest: Digest
    weight_bits: Annotated[int, msgspec.Meta(ge=MIN_WEIGHT_BITS, le=MAX_WEIGHT_BITS)]
    first_layer: _Layer
    last_layer: _Layer
    capacity: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    expires: Milliseconds
    draining: bool

    def __post_init__(self) -> None:
        if self.first_layer > self.last_layer:
            raise ValueError("its first layer comes after its last")
        if not 0 < self.expires - self.issued <= MS * MAX_LIFETIME_S:
            raise ValueError(f"it does not live for up to {MAX_LIFETIME_S} seconds")

    @property
    def layers(self) -> LayerRange:
        """What it serves."""
        return LayerRange(self.first_layer, self.last_layer)

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Announced = Vouched[Descriptor]
"""A descriptor that has passed `verify`."""


def describe(
    identity: Identity,
    *,
    address: tuple[str, int],
    model_digest: str,
    weight_bits: int,
    layers: LayerRange,
    capacity: float,
    issued: int,
    lifetime_s: float,
    draining: bool = False,
) -> bytes:
    """A signed descriptor of an executor, in its own name.

    Args:
        identity: its certificate, that the federation's authority has issued, and its key.
        issued: milliseconds since 1970.

    Raises:
        CertificateError: the files cannot be used.
        ConfigError: a value is out of its bounds.
    """
    host, port = address
    fields = {
        "issued": issued,
        "certificate": load_certificates(identity.certificate)[0].public_bytes(Encoding.DER),
        "host": host,
        "port": port,
        "model_digest": model_digest,
        "weight_bits": weight_bits,
        "first_layer": layers.first,
        "last_layer": layers.last,
        "capacity": capacity,
        "expires": issued + round(MS * lifetime_s),
        "draining": draining,
    }
    try:
        descriptor = msgspec.convert(fields, Descriptor)
    except msgspec.ValidationError as error:
        raise ConfigError(f"nothing that a descriptor may say: {error}") from error
    return sign(descriptor, identity.private_key())


def sign(descriptor: Descriptor, key: PrivateKeyTypes) -> bytes:
    """A descriptor, signed with the key of its certificate; errors as `statements.sign` has them."""
    return statements.sign(descriptor, key, domain=_DOMAIN)


def verify(data: bytes, trust: Trust, *, now: float | None, after: tuple[int, bytes] | None = None) -> Announced:
    """Everything that makes a descriptor believable, whoever has passed it on.

    Args:
        data: from anywhere.
        trust: who vouches for executors.
        now: seconds since 1970; None for a descriptor of the past, as it was when it was issued.
        after: the `age` of the newest one that is known of the same key, if the caller has seen one: an older one is
            a replay. The same one is none.

    Raises:
        DescriptorError: says what is wrong. The message quotes nothing that was received.
    """
    vouched = statements.verify(data, _decoder, domain=_DOMAIN, trust=trust, now=now)
    said = vouched.said
    if not vouched.operator:
        raise DescriptorError("its certificate does not say who runs it (`symbiosis-priv keys sign --operator`)")
    if said.host not in hosts_of(vouched.certificate):
        raise DescriptorError("it claims a host that its certificate does not name")
    if now is not None and said.expires / MS < now - CLOCK_TOLERANCE_S:
        raise DescriptorError("it has expired: compare the clocks if it is new")
    if after is not None and vouched.age < after:
        raise DescriptorError("a newer one of the same key is known")
    return vouched


def verify_past(data: bytes, trust: Trust, *, now: float) -> Announced:
    """A descriptor of a log: as `verify` has it for when it was issued, which must have been.

    Raises:
        DescriptorError: as `verify`, and for one of the future, which a log would have to keep until then.
    """
    announced = verify(data, trust, now=None)
    if announced.said.issued / MS > now + CLOCK_TOLERANCE_S:
        raise DescriptorError("it comes from the future: compare the clocks")
    return announced


def newest(announced: Iterable[Announced]) -> dict[str, Announced]:
    """The newest of each key, by key."""
    found: dict[str, Announced] = {}
    for one in announced:
        if one.key not in found or found[one.key].age < one.age:
            found[one.key] = one
    return found


_decoder = msgspec.msgpack.Decoder(Descriptor)
