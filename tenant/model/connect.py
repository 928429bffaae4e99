"""Opens what a split model computes with, from the user's options: its backend, and its base weights on disk."""

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import quantise
from symbiosis_priv.checkpoints.checkpoint import Checkpoint, resolve
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedMethodError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from tenant.masking.backend import Backend, RingBackend
from tenant.masking.registry import scheme_named
from tenant.masking.scheme import SessionScheme
from tenant.options import Options, SessionOptions
from tenant.preparation.opening import Opening
from tenant.session.session import Session


def open_backend(options: Options, model: str | Path) -> Backend:
    """Open the backend of the masking scheme in `options`, for the checkpoint `model`. Raises `RoleConflictError`,
    `ConfigError`: the scheme or an option does not fit the federation; `CheckpointError`: the scheme multiplies on the
    tenant, and the tenant lacks the weights."""
    scheme, opening = scheme_named(options.masking), Opening(options, model)
    if scheme.roles:
        # before the checkpoint is read and before any provider is contacted
        scheme.check(opening.federation, ring_bits=opening.ring_bits)
        if options.tied_head and not opening.federation.scope.tied_head:
            raise ConfigError(
                f"RemoteConfig(tied_head=True) asks for the product of a tied LM head, which the providers of "
                f"{options.federation} do not serve; leave it out, or use a federation with tied_head = true under "
                f"[model]"
            )
        if options.round_trips == 2 and opening.federation.scope.round_trips != 2:
            raise ConfigError(
                f"RemoteConfig(round_trips=2) needs composed groups, which the providers of "
                f"{options.federation} do not serve; leave it out, or use a federation with round_trips = 2 under "
                f"[model]"
            )
    if not isinstance(scheme, SessionScheme):
        return scheme.open(opening)
    preparation, store = opening.preparation, opening.full_store
    if scheme.own_weights and (store is None or store.manifest().digest != opening.federation.model_digest):
        raise CheckpointError(
            f"masking = {scheme.name!r} multiplies on the tenant: pass RemoteConfig(checkpoint='FULL_CHECKPOINT')"
        )
    if not scheme.stacks and options.experts != "local" and any(e.experts > 1 for e in preparation.manifest.groups):
        raise ConfigError(
            f"masking = {scheme.name!r} does not mask rows for stacks of experts: keep the experts here with "
            f"RemoteConfig(experts='local'), or choose another masking"
        )
    facts = scheme.facts(preparation, opening.ring_bits)
    composed = any(facts.entry.composed is not None for facts in preparation.facts)
    if composed != (opening.federation.scope.round_trips == 2):
        raise ConfigError(
            f"{options.federation} says round_trips = {opening.federation.scope.round_trips}, and the model of its "
            f"digest has {'composed groups' if composed else 'no composed groups'}; correct round_trips or digest "
            f"under [model]"
        )
    session = Session(
        opening.federation,
        preparation,
        options=SessionOptions(
            masking=scheme.name,
            deadline_s=options.deadline_s,
            pool_memory=options.pool_memory_mib << 20,
            row_bucket=options.row_bucket,
            ring_bits=opening.ring_bits,
            wiretap=options.wiretap,
        ),
        store=store,
    )
    return RingBackend(facts, session)


class BaseWeights:
    """Reads base weights of offloaded layers from the public checkpoint on the tenant's disk. Most methods need no base
    weight. Some need it once, at their start (PiSSA factorises it): they get the checkpoint's weight, as PEFT does with
    the whole model. DoRA and MaskBert compute with it beside the providers' products: they get the rounded weight,
    which the providers multiply by. A weight is used only if it quantises to the integers that the federation's
    manifest pins."""

    def __init__(self, options: Options, model: Path) -> None:
        self._options, self._model = options, model
        self._checked: set[tuple[str, str]] = set()

    def check(self) -> None:
        """Raise `UnsupportedMethodError` if the checkpoint has only the tenant's own tensors."""
        _ = self._store

    def read(self, entry: GroupEntry, member: int, *, rounded: bool = False) -> Tensor:
        """Read the weight `[o, d]` of one linear, in the checkpoint's dtype; with `rounded`, the weight that providers
        multiply by, in float32. Raises `UnsupportedMethodError`: the checkpoint has only the tenant's own tensors;
        `CheckpointError`: the weight is not that of the manifest."""
        with Checkpoint(self._store.path) as checkpoint:
            key = (entry.digest, checkpoint.identity())
        layers = self._store.floats((entry.members[member],) if key in self._checked else entry.members)
        if key not in self._checked:
            if quantise(layers, weight_bits=self._store.weight_bits).digest() != entry.digest:
                raise CheckpointError(
                    f"the weights of {entry.name} in {self._store.path} are not those that providers serve; pass "
                    f"RemoteConfig(checkpoint='FULL_CHECKPOINT') with the federation's base model"
                )
            self._checked.add(key)
            layers = [layers[member]]
        if rounded:
            group = quantise(layers, weight_bits=self._store.weight_bits)
            return (group.weight * group.channel_scale[:, None]).to(torch.float32)
        return layers[0].weight

    @cached_property
    def _store(self) -> WeightStore:
        options = self._options
        if options.federation is not None:
            federation = load_federation(options.federation)
            bits, scope = federation.weight_bits, federation.scope
        else:
            bits = DEFAULT_WEIGHT_BITS if options.weight_bits is None else options.weight_bits
            scope = Scope(tied_head=options.tied_head)
        store = WeightStore(resolve(options.checkpoint or self._model), weight_bits=bits, scope=scope)
        if not store.is_complete():
            raise UnsupportedMethodError(
                f"this method reads base weights, and {store.path} has only the tenant's own tensors; pass "
                f"RemoteConfig(checkpoint='FULL_CHECKPOINT')"
            )
        return store
