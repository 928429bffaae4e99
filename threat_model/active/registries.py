"""An adversary that runs a registry: it may list any executors, and may withhold descriptors.

The adversary wants the tenant to send rows to an executor that the tenant should refuse: an executor without an
authority's certificate, of a helper's company, in place of a pinned provider, no longer running, or revoked. Or the
adversary wants the tenant to connect to its own machine.

A twin is a second valid certificate for a key, made without the issuer: if (r, s) is an ECDSA signature, so is
(r, n - s). The holder of a certificate that an elliptic-curve authority has signed can replace the signature by the
other one. Every verifier accepts the result, and its fingerprint differs. Code that identifies certificates by their
fingerprint treats it as an unknown certificate.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Identity, Kind, load_certificates
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Federation, Registries
from symbiosis_priv.registry.descriptor import MS, describe
from tenant.routing.discovery import Discovery

_NOW = 2_000_000_000.0  # seconds since 1970; certificates are valid for longer than that
_DAYS = 9000
_LIFE_S = 600.0
_PORT = 7001
_SEQUENCE, _BIT_STRING = 0x30, 0x03
_LONG = 0x80  # DER encodes lengths of at least this value in additional bytes
_INTERNAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "169.254.169.254", "fe80::1", "100.100.100.200", "224.0.0.1")


def attack_registry(federation: Federation) -> dict[str, bool]:
    """Attack a tenant with dishonest listings. Returns True for each attack that the tenant refused, by name.
    `federation`: a tenant's federation with a pinned executor and a helper. Raises `SymbiosisError`: the tenant refused
    an honest listing, so refused attacks would prove nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        authority, own = (create_authority(folder / name, name="federation", days=_DAYS) for name in ("real", "own"))

        def identity(name: str, *, operator: str, signer: Identity = authority, **more: Any) -> Identity:
            where = folder / operator
            return issue(where, authority=signer, kind=Kind.PROVIDER, name=name, operator=operator, days=_DAYS, **more)

        def descriptor(identity: Identity, host: str = "localhost", port: int = _PORT, **more: Any) -> bytes:
            """A descriptor of an executor, `after_s` seconds from now."""
            return describe(
                identity,
                address=(host, port),
                model_digest=federation.model_digest,
                weight_bits=federation.weight_bits,
                layers=LayerRange(0, 0),
                issued=round(MS * (_NOW + more.pop("after_s", 0))),
                lifetime_s=_LIFE_S,
                **more,
            )

        executor, revoked = (identity(name, operator=f"{name} AG") for name in ("newcomer", "leaver"))
        steering = identity("steering", operator="St", hosts=_INTERNAL)
        revoked_list = folder / "revoked.txt"
        revoke(revoked_list, [revoked.certificate])
        registries = Registries(("localhost:7500",), authority.certificate, revoked_list)
        asking = replace(federation, registries=registries)
        remote = replace(asking, registries=msgspec.structs.replace(registries, addresses=("registry.example:7500",)))
        if _accepted(asking, [descriptor(executor)]) != {"newcomer"}:
            raise SymbiosisError("an honest registry's executor was not accepted")
        steered = any(_accepted(remote, [descriptor(steering, host)]) for host in _INTERNAL)

        pinned, helper = federation.executors[0], federation.helpers[0]
        good = descriptor(executor)
        # the certificate and the signature may contain the two bytes of the port, too
        port = good.rindex(_PORT.to_bytes(2, "big"), 0, good.index(federation.model_digest.encode()))
        altered = good[:port] + (_PORT + 1).to_bytes(2, "big") + good[port + 2 :]
        forged = identity("newcomer", operator="Nobody", signer=own)
        impostor = identity("impostor", operator="Impostor AG")
        twin_revoked = twin_of(revoked, folder / "twin")
        listings = {
            "an executor that another authority vouches for": [descriptor(forged)],
            "an executor with another port than it has signed": [altered],
            "an executor of a helper's company": [descriptor(identity("innocent", operator=helper.operator))],
            "an executor by the name of a pinned one": [descriptor(identity(pinned.name, operator="Impostor AG"))],
            # another name of the same machine
            "an executor at the address of a pinned helper": [descriptor(impostor, port=helper.port)],
            "an executor that was revoked": [descriptor(revoked)],
            "an executor that was revoked, its certificate's signature written another way": [descriptor(twin_revoked)],
            "a host that the executor's certificate does not name": [descriptor(executor, "elsewhere.example")],
            "a descriptor of an hour ago": [descriptor(executor, after_s=-3600)],
            "a descriptor of the future": [descriptor(executor, after_s=3600)],
            "an executor that has left, by what it said before": [
                descriptor(executor, after_s=1, draining=True),
                descriptor(executor),
            ],
        }
        refused = {name: not _accepted(asking, listed) for name, listed in listings.items()}
        return refused | {"an address of the tenant's own machine, link or cloud": not steered}


def _accepted(federation: Federation, listed: list[bytes]) -> set[str]:
    """The names of the executors that a tenant accepts from these descriptors, received one after the other."""
    discovery = Discovery(federation, clock=lambda: _NOW)
    for data in listed:
        discovery.add([data])
    return {peer.name for peer in discovery.update()}


def twin_of(identity: Identity, folder: Path) -> Identity:
    """An identity with the same key and the twin of its certificate: the second valid signature of its issuer, whose
    key is on P-256, in place of the first one."""
    certificate = load_certificates(identity.certificate)[0]
    whole, signed = certificate.public_bytes(Encoding.DER), certificate.tbs_certificate_bytes
    signature = certificate.signature
    algorithm = whole[whole.index(signed) + len(signed) : -len(_tlv(_BIT_STRING, b"\0" + signature))]
    r, s = decode_dss_signature(signature)
    other = _tlv(_BIT_STRING, b"\0" + encode_dss_signature(r, ec.SECP256R1().group_order - s))
    twin = x509.load_der_x509_certificate(_tlv(_SEQUENCE, signed + algorithm + other))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / identity.certificate.name
    path.write_bytes(twin.public_bytes(Encoding.PEM))
    return Identity(path, identity.key)


def _tlv(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = b"" if size < _LONG else size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, _LONG | len(length) if length else size]) + length + content
