"""The facts (public) and verification keys (secret) that a tenant keeps instead of a base model's weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from symbiosis_priv.checkpoints.manifest import GroupFacts, Manifest
from tenant.core.blame import BlameKeys
from tenant.core.verifier import VerificationKeys


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Facts and keys of a base model whose weights the tenant does not hold (`preparation.prepare` makes them).

    Args:
        keys: keys that verify products.
        second: reads a second set of verification keys, which confirms corrections in narrow rings
            (`symbiosis_priv.arithmetic.wraps`).
        blame: keys that attribute faults after a product was refused.
        own_digest: digest of the checkpoint's other tensors and config.json (`own_tensors`).
        tokenizer: SHA-256 of the checkpoint's tokenizer files and chat templates, by name; empty if it has none.
        checkpoint: the checkpoint that was prepared; for messages.
        forget_keys: deletes the cached verification keys, so that the next session draws new ones.
    """

    manifest: Manifest
    facts: tuple[GroupFacts, ...]
    keys: VerificationKeys
    second: Callable[[], VerificationKeys] = field(repr=False)
    blame: BlameKeys
    own_digest: str
    tokenizer: Mapping[str, str]
    checkpoint: str
    forget_keys: Callable[[], None] = field(repr=False)
