"""The quantised base model: a store that returns one layer group at a time.

Groups are cached on disk under their digest, packed for products and mapped into memory (`packed`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import Layer, QuantisedGroup, Stack, centred, compose, quantise
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD
from symbiosis_priv.checkpoints import packed
from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.layers import AGAIN, DEFAULT_SCOPE, THROUGH, GroupSpec, LayerRange, Scope, layers_of
from symbiosis_priv.checkpoints.manifest import MANIFEST_VERSION, GroupEntry, Manifest
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.kernels import Choice, Packed, RingMatrix, choose
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, GroupIndex
from symbiosis_priv.system.files import PrivateFolder, default_cache, read_limited, write_atomically

if TYPE_CHECKING:  # importing transformers takes longer than the rest of a provider's start
    from symbiosis_priv.checkpoints.discovery.skeleton import Skeleton, Source

log = logging.getLogger(__name__)

version = functools.cache(metadata.version)  # a package's metadata takes a millisecond to read

_DISCOVERY = 3  # raised when `discover` finds other layer groups than before, so that no old manifest is read
_MAX_MANIFEST = 1 << 30  # bytes; a layer group takes a few hundred bytes
_STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

T = TypeVar("T")

Progress = Callable[[int, int], None]  # called with (groups done, groups in all)


@dataclass(frozen=True)
class _Members:
    """Reads the float members of layer groups; the checkpoint's tensors are in `stored` by parameter. Raises
    `CheckpointError`: a tensor is missing, or is not of the shape and dtype that config.json implies."""

    skeleton: Skeleton
    checkpoint: Checkpoint
    stored: Mapping[str, Source]

    def read(self, name: str) -> Layer | Stack:
        """Read a member. A stack reads its matrices when it is asked for them."""
        group, shape = self.skeleton.members[name]
        if group.composed is not None:
            return self._composed(name, group)
        if group.experts > 1:
            return self._stack(name, group, shape)
        transposed = name in self.skeleton.transposed
        weight, outputs = self._parameter(name, "weight", shape), shape[1:] if transposed else shape[:1]
        bias = self._parameter(name, "bias", outputs) if name in self.skeleton.biased else None
        return Layer(name, weight.t() if transposed else weight, bias)

    def _composed(self, name: str, group: GroupSpec) -> Layer | Stack:
        """One member of a composed group. Its bias is the product of the norm's bias, which the norm's factor does not
        multiply. (The first linear's bias is part of the tenant's other row.)"""
        below, norm = self.read(group.members[0].removesuffix(AGAIN)), group.composed
        if name == group.members[0]:
            return below
        assert norm is not None
        of = {kind: self._parameter(norm.norm, kind, group.outputs[:1]) for kind in norm.parameters}
        ones = torch.ones(group.outputs[0], dtype=torch.float64, device="cpu")
        gain = of["weight"].to(torch.float64) + int(norm.one_plus) if "weight" in of else ones
        above = self.read(name.removesuffix(THROUGH)).weight
        bias = compose(above, ones, of["bias"][:, None]).flatten() if "bias" in of else None
        return Layer(name, compose(above, gain, centred(below.weight) if norm.centred else below.weight), bias)

    def _stack(self, name: str, group: GroupSpec, shape: tuple[int, ...]) -> Stack:
        if name not in self.stored:
            self.checkpoint.tensor(name)  # raises an error that names what is missing
        reads = self.stored[name].matrices(self.checkpoint, name, group.experts)
        matrices = [functools.partial(self._matrix, name, read, shape[1:]) for read in reads]
        return Stack(name, (sum(group.outputs), group.inputs), matrices, group.joined)

    def _matrix(self, name: str, read: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        found = self._checked(read(), name, "weight", shape)
        return found.t() if name in self.skeleton.transposed else found

    def _parameter(self, owner: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        parameter = f"{owner}.{kind}"
        source_of_tie = self.skeleton.tied.get(parameter, parameter)
        if parameter not in self.stored or source_of_tie not in self.stored:  # tenants look up embeddings in the source
            parameter = source_of_tie
        if (source := self.stored.get(parameter)) is None:
            return self.checkpoint.tensor(parameter)  # raises an error that names what is missing
        return self._checked(source.read(self.checkpoint, parameter), owner, kind, shape)

    def _checked(self, tensor: Tensor, owner: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        if tensor.shape != shape:
            raise CheckpointError(
                f"the {kind} of {owner} is {list(tensor.shape)} on disk, not {list(shape)} as config.json says; "
                f"fetch {self.checkpoint.path} again"
            )
        if tensor.dtype not in _STORED:
            raise CheckpointError(
                f"the {kind} of {owner} is stored as {str(tensor.dtype).removeprefix('torch.')}; use a checkpoint in "
                f"float32, bfloat16 or float16"
            )
        return tensor


class WeightStore:
    """Layer groups of one checkpoint folder (`checkpoint.resolve` gives one), quantised once. `layers` are packed for
    products; the manifest always describes the whole model."""

    def __init__(
        self,
        path: Path,
        *,
        weight_bits: int = DEFAULT_WEIGHT_BITS,
        cache: Path | None = None,
        device: str = "cpu",
        layers: LayerRange | None = None,
        scope: Scope = DEFAULT_SCOPE,
    ) -> None:
        self.path, self.scope, self.weight_bits, self.device = path, scope, weight_bits, device
        self._wanted = layers
        self.cache = (cache or default_cache()) / "weights"  # quantised and packed weights
        self._times = self.cache / "tiles.json"
        self._skeleton: Skeleton | None = None
        self._manifest: Manifest | None = None
        self._cache_failed = False
        try:  # other users who can change the cache could replace weights, or truncate a mapped file
            with contextlib.suppress(OSError), PrivateFolder.open(self.cache.parent) as parent:  # there may be no cache
                parent.subfolder(self.cache.name).close()
        except ConfigError:
            log.warning(
                "others can change the weights in %s: chown it, and the folders above it, to this user and chmod go-w "
                "them, or choose another folder (`cache` in provider.toml, SYMBIOSIS_PRIV_CACHE)",
                self.cache,
            )

    @property
    def skeleton(self) -> Skeleton:
        """The model's layer groups, traced on first use."""
        if self._skeleton is None:
            from symbiosis_priv.checkpoints.discovery.skeleton import discover

            self._skeleton = discover(self.path, self.scope)
        return self._skeleton

    def manifest(self, *, progress: Progress | None = None) -> Manifest:
        """The manifest. The first call for a checkpoint quantises all of it, and packs the groups in `served`; later
        calls read the manifest from the cache."""
        if self._manifest is None:
            self._manifest = self.cached_manifest()
        if self._manifest is None:
            served = self._served(layers_of(spec.members[0] for spec in self.skeleton.groups))

            def pack(index: int, entry: GroupEntry, group: QuantisedGroup) -> None:
                if index in served:
                    # this machine lacks the device; a request for products will say so
                    with contextlib.suppress(ConfigError):
                        self._pack(entry, group.weight)

            self.each_group(pack, progress=progress)  # one at a time: tiles are being timed
        assert self._manifest is not None
        return self._manifest

    @property
    def served(self) -> range:
        """The layer groups that are packed for products. Raises `ConfigError`: the model does not have the layers that
        the constructor's `layers` names."""
        return self._served(self.manifest().layers)

    def _served(self, layers: Sequence[int]) -> range:
        return range(len(layers)) if self._wanted is None else self._wanted.groups(layers)

    def is_complete(self) -> bool:
        """Returns True if the checkpoint holds every offloaded tensor, and not only the tenant's own tensors."""
        with Checkpoint(self.path) as checkpoint:
            stored = self.skeleton.names.by_parameter(checkpoint.names())
            groups = [spec for spec in self.skeleton.groups if spec.composed is None]
            # a stack of experts is a parameter itself
            weights = (name + ".weight" * (spec.experts == 1) for spec in groups for name in spec.members)
            return all(weight in stored or weight in self.skeleton.tied for weight in weights)

    def group(self, index: int) -> QuantisedGroup:
        """One group, quantised from the checkpoint. Raises `CheckpointError`: it is not that of its manifest."""
        return self.quantised(self.manifest().groups[index])

    def matrix(self, index: int) -> RingMatrix:
        """One group ready for products: packed weights mapped from the cache, or packed now. Raises `ConfigError`: no
        kernel is exact on this store's device; `CheckpointError`: the checkpoint changed since its manifest was
        made."""
        entry = self.manifest().groups[index]
        if (matrix := self._mapped(entry)) is not None:
            return matrix
        return self._pack(entry, self.quantised(entry).weight)

    def packed(self, index: int) -> tuple[Packed, Choice]:
        """One group's packed weights, mapped and not checked: `matrix` writes and checks the file. A stack whose entry
        is `transposed` is packed transposed. Raises `ConfigError`: there is no file, as `matrix` could not write it."""
        entry = self.manifest().groups[index]
        choice = self._choice(entry)
        found = packed.read(self.cache, _key(entry), choice.few, weight_bits=self.weight_bits)
        if found is None:
            raise ConfigError(
                f"no packed weights of {entry.name} in {self.cache}: make it a folder that can be written"
            )
        return found[0], choice

    def quantised(self, entry: GroupEntry) -> QuantisedGroup:
        """Quantise one group of a manifest. Raises `CheckpointError`: this checkpoint does not hold its weights."""
        with Checkpoint(self.path) as checkpoint:
            group = quantise(self._layers(checkpoint, entry.members), weight_bits=self.weight_bits)
        if group.digest() != entry.digest:
            raise CheckpointError(f"{self.path} changed while it was in use; start again")
        return group

    def _choice(self, entry: GroupEntry) -> Choice:
        # packed outputs of one expert's matrix
        height = entry.by_expert.columns(BACKWARD if entry.transposed else FORWARD).result if entry.experts > 1 else 0
        return choose(weight_bits=self.weight_bits, device=torch.device(self.device), height=height)

    def _mapped(self, entry: GroupEntry) -> RingMatrix | None:
        choice = self._choice(entry)
        found = packed.read(self.cache, _key(entry), choice.few, weight_bits=self.weight_bits)
        if found is None:
            return None
        matrix = RingMatrix.of_packed(found[0], choice, device=self.device, results=self._times)
        if packed.agrees(matrix, found[1]):
            return matrix.as_stack(entry.experts, transposed=entry.transposed)
        log.warning("the packed weights of %s in %s are damaged and are packed again", entry.name, self.cache)
        return None

    def _pack(self, entry: GroupEntry, weight: Tensor) -> RingMatrix:
        """Pack a group and write it to the cache. Returns the mapped copy if the cache can be written."""
        if entry.transposed:
            weight = weight.t()
        choice = self._choice(entry)
        made = choice.few.pack(weight, weight_bits=self.weight_bits)
        products = packed.probe_products(weight, weight_bits=self.weight_bits)
        self._write_to_cache(lambda: packed.write(self.cache, _key(entry), made, products))
        if (matrix := self._mapped(entry)) is not None:
            return matrix
        matrix = RingMatrix.of_packed(made, choice, device=self.device)
        return matrix.as_stack(entry.experts, transposed=entry.transposed)

    def layers(self, index: int) -> list[Layer | Stack]:
        """The float members of a group, as stored in the checkpoint (the float path's weights)."""
        return self.floats(self.manifest().groups[index].members)

    def floats(self, members: tuple[str, ...]) -> list[Layer | Stack]:
        """The float weights and biases of linears, as stored in the checkpoint. A stack reads its matrices when it is
        asked for them, and keeps the checkpoint's files open."""
        return self._layers(Checkpoint(self.path), members)

    def _layers(
        self, checkpoint: Checkpoint, members: tuple[str, ...], stored: Mapping[str, Source] | None = None
    ) -> list[Layer | Stack]:
        if stored is None:
            stored = self.skeleton.names.by_parameter(checkpoint.names())
        reader = _Members(self.skeleton, checkpoint, stored)
        return [reader.read(name) for name in members]

    def _manifest_path(self) -> Path:
        """The manifest's file. Its name covers the checkpoint's files and the version of transformers."""
        with Checkpoint(self.path) as checkpoint:
            identity = checkpoint.identity()
        optional = "-tied-head" * self.scope.tied_head + "-no-experts" * (not self.scope.experts)
        optional += "-two-round-trips" * (self.scope.round_trips == 2)
        how = f"v{MANIFEST_VERSION}.{_DISCOVERY}-{self.weight_bits}{optional}-transformers-{version('transformers')}"
        return self.cache / f"manifest-{how}-{identity}.json"

    def cached_manifest(self) -> Manifest | None:
        """The manifest that an earlier call has written to the cache for these files; None if there is none."""
        try:
            return Manifest.from_json(read_limited(self._manifest_path(), _MAX_MANIFEST))
        except (OSError, CheckpointError):  # a damaged manifest is made again
            return None

    def each_group(
        self,
        work: Callable[[GroupIndex, GroupEntry, QuantisedGroup], T],
        *,
        threads: int = 1,
        progress: Progress | None = None,
    ) -> list[T]:
        """Quantise the checkpoint group by group, and write the manifest to the cache. No group stays in memory. `work`
        is called with every group's index, entry and weights; in order if `threads` is 1. `threads` groups are in
        memory and processed at the same time. Returns the results of `work`, in the order of the groups. Raises
        `CheckpointError`: the checkpoint's files have changed meanwhile."""
        specs, path = self.skeleton.groups, self._manifest_path()
        with Checkpoint(self.path) as checkpoint:
            stored = self.skeleton.names.by_parameter(checkpoint.names())

        def do(index: int) -> tuple[GroupEntry, T]:
            spec = specs[index]
            # one at a time: a stack is most of a layer's memory
            with one_stack if spec.experts > 1 else contextlib.nullcontext():
                with Checkpoint(self.path) as checkpoint:  # a checkpoint's files are for one thread
                    layers = self._layers(checkpoint, spec.members, stored)
                    group = quantise(layers, weight_bits=self.weight_bits)
                del layers
                entry = GroupEntry(digest=group.digest(), **vars(spec))
                return entry, work(GroupIndex(index), entry, group)

        progress = progress or (lambda done, total: None)
        one_stack = threading.Lock()
        results: list[tuple[GroupEntry, T]] = []
        progress(0, len(specs))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="quantise")
        try:
            for result in pool.map(do, range(len(specs))):
                results.append(result)
                progress(len(results), len(specs))
        finally:
            pool.shutdown(cancel_futures=True)
        if path != self._manifest_path():
            raise CheckpointError(f"{self.path} changed while it was in use; start again")
        groups = tuple(entry for entry, _ in results)
        manifest = Manifest(version=MANIFEST_VERSION, weight_bits=self.weight_bits, groups=groups)
        self._write_to_cache(lambda: write_atomically(path, manifest.to_json()))
        self._manifest = manifest
        return [result for _, result in results]

    def _write_to_cache(self, write: Callable[[], None]) -> None:
        """Write to the cache. On a full or read-only disk nothing is cached, and the next start computes it again."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            if not self._cache_failed:
                log.warning(
                    "cannot cache quantised weights in %s (%s): they are quantised again at every start. Make room "
                    "there, or choose another folder (`cache` in provider.toml, SYMBIOSIS_PRIV_CACHE)",
                    self.cache,
                    error,
                )
            self._cache_failed = True


def _key(entry: GroupEntry) -> str:
    return f"{entry.digest}-turned" if entry.transposed else entry.digest
