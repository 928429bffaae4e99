"""Opens the backend for the user's options."""

from pathlib import Path

from symbiosis_priv.errors import CheckpointError, ConfigError
from tenant.masking.backend import Backend, RingBackend
from tenant.masking.registry import scheme_named
from tenant.masking.scheme import SessionScheme
from tenant.options import Options, SessionOptions
from tenant.preparation.opening import Opening
from tenant.session.session import Session


def open_backend(options: Options, model: str | Path) -> Backend:
    """Open the backend of the masking scheme in `options`, for the checkpoint `model`.

    Raises:
        RoleConflictError, ConfigError: the scheme or an option does not fit the federation.
        CheckpointError: the scheme multiplies on the tenant, and the tenant lacks the weights.
    """
    scheme, opening = scheme_named(options.masking), Opening(options, model)
    if scheme.roles:
        scheme.check(opening.federation)  # before the checkpoint is read and before any provider is contacted
        if options.tied_head and not opening.federation.scope.tied_head:
            raise ConfigError(
                f"{options.option('tied_head')} asks for the product of a tied LM head, which the providers of "
                f"{options.federation} do not serve; leave it out, or use a federation with tied_head = true under "
                f"[model]"
            )
    if not isinstance(scheme, SessionScheme):
        return scheme.open(opening)
    preparation, store = opening.preparation, opening.full_store
    if scheme.own_weights and (store is None or store.manifest().digest != opening.federation.model_digest):
        raise CheckpointError(
            f"masking = {scheme.name!r} multiplies on the tenant: "
            f"pass {options.option('checkpoint', 'FULL_CHECKPOINT')}"
        )
    session = Session(
        opening.federation,
        preparation,
        options=SessionOptions(
            masking=scheme.name,
            deadline_s=options.deadline_s,
            deadline_option=options.option("deadline_s"),
            pool_memory=options.pool_memory_mib << 20,
            row_bucket=options.row_bucket,
            ring_bits=opening.ring_bits,
            wiretap=options.wiretap,
        ),
        store=store,
    )
    bits, headroom = opening.ring_bits, scheme.headroom_bits
    return RingBackend([facts.narrowed(bits, headroom_bits=headroom) for facts in preparation.facts], session)
