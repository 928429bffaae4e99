"""The quantised base model: a manifest that fixes it, and a store that hands out one layer group at a time.

The manifest lists every layer group with the SHA-256 of its integers, scales and bias; the manifest's own digest is
what `federation.toml` pins. Quantising is deterministic, so tenants and providers get the same digest from the
same checkpoint. Quantised groups are kept on disk under their digest, and checked against it when read back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from symbiosis_priv.checkpoint import Checkpoint
from symbiosis_priv.discovery import GroupSpec, Skeleton, discover
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.quantise import DEFAULT_WEIGHT_BITS, Layer, QuantisedGroup, quantise
from symbiosis_priv.ring import FORWARD, Direction

log = logging.getLogger(__name__)

MANIFEST_VERSION = 1
Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all)."""


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One layer group of a manifest. `outputs` are the members' widths, in order."""

    members: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    digest: str

    @property
    def name(self) -> str:
        """Readable and unique, as in `discovery.GroupSpec.name`."""
        return GroupSpec(self.members, self.inputs, self.outputs).name

    @property
    def stacked_outputs(self) -> int:
        """Output features of all members together."""
        return sum(self.outputs)

    def columns(self, direction: Direction) -> tuple[int, int]:
        """(columns of a request's rows, columns of its answer's)."""
        inputs, outputs = self.inputs, self.stacked_outputs
        return (inputs, outputs) if direction == FORWARD else (outputs, inputs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a quantised base model is. Two parties with equal digests hold the same bits."""

    version: int
    weight_bits: int
    groups: tuple[GroupEntry, ...]

    @property
    def digest(self) -> str:
        """`sha256:` and the hash of the canonical JSON."""
        return "sha256:" + hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Canonical bytes: fields in declared order, no white space."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse; CheckpointError if it is not a manifest of this version."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"not a manifest: {error}") from error
        if manifest.version != MANIFEST_VERSION:
            raise CheckpointError(f"manifest version {manifest.version} is not {MANIFEST_VERSION}; upgrade both sides")
        return manifest


def default_cache() -> Path:
    """Where quantised weights and verification keys are kept: `$SYMBIOSIS_PRIV_CACHE` or the user's cache folder."""
    if override := os.environ.get("SYMBIOSIS_PRIV_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symbiosis-priv"


class WeightStore:
    """Layer groups of one checkpoint, quantised once.

    Args:
        path: a local checkpoint folder (`checkpoint.resolve` gives one).
        weight_bits: b.
        cache: folder for quantised groups; `default_cache()` if None.
    """

    def __init__(self, path: Path, *, weight_bits: int = DEFAULT_WEIGHT_BITS, cache: Path | None = None) -> None:
        self.path = path
        self.weight_bits = weight_bits
        self._cache = (cache or default_cache()) / "weights"
        self._skeleton: Skeleton | None = None
        self._manifest: Manifest | None = None
        self._cache_failed = False

    @property
    def skeleton(self) -> Skeleton:
        """The model's layer groups, traced on first use."""
        if self._skeleton is None:
            self._skeleton = discover(self.path)
        return self._skeleton

    def manifest(self, *, progress: Progress | None = None) -> Manifest:
        """The manifest; the first call for a checkpoint reads and quantises all of it, later ones only look it up."""
        if self._manifest is None:
            self._manifest = self._cached_manifest() or self._quantise_all(progress)
        return self._manifest

    def is_complete(self) -> bool:
        """Whether the checkpoint holds every offloaded tensor, and not only the tenant's own."""
        with Checkpoint(self.path) as checkpoint:
            stored = self.skeleton.names.by_parameter(checkpoint.names())
            return all(f"{name}.weight" in stored for spec in self.skeleton.groups for name in spec.members)

    def group(self, index: int) -> QuantisedGroup:
        """One quantised group, from the cache or from the checkpoint.

        Raises:
            CheckpointError: the checkpoint changed since its manifest was made.
        """
        entry = self.manifest().groups[index]
        cached = self._read(entry.digest)
        if cached is not None:
            return cached
        with Checkpoint(self.path) as checkpoint:
            group = quantise(list(self._layers(checkpoint, entry.members)), weight_bits=self.weight_bits)
        if group.digest() != entry.digest:
            raise CheckpointError(f"{self.path} changed while it was in use; start again")
        self._cache_group(entry.digest, group)
        return group

    def layers(self, index: int) -> list[Layer]:
        """The float members of a group, as stored in the checkpoint (the float path's weights)."""
        with Checkpoint(self.path) as checkpoint:
            return list(self._layers(checkpoint, self.manifest().groups[index].members))

    def _layers(self, checkpoint: Checkpoint, members: tuple[str, ...]) -> Iterator[Layer]:
        stored = self.skeleton.names.by_parameter(checkpoint.names())

        def read(parameter: str) -> Tensor:
            return checkpoint.tensor(stored.get(parameter, parameter))  # which names what is missing

        for name in members:
            weight = read(f"{name}.weight")
            bias = read(f"{name}.bias") if name in self.skeleton.biased else None
            yield Layer(name, weight.t() if name in self.skeleton.transposed else weight, bias)

    def _manifest_path(self) -> Path:
        """By what decides it: the files, and transformers, whose code says which layers share an input."""
        with Checkpoint(self.path) as checkpoint:
            signature = checkpoint.signature()
        how = f"v{MANIFEST_VERSION}-{self.weight_bits}-transformers-{transformers.__version__}"
        return self._cache / f"manifest-{how}-{signature}.json"

    def _cached_manifest(self) -> Manifest | None:
        try:
            return Manifest.from_json(self._manifest_path().read_bytes())
        except (OSError, CheckpointError):  # a damaged one is made again
            return None

    def stream(self, *, progress: Progress | None = None) -> Iterator[tuple[GroupEntry, QuantisedGroup]]:
        """Quantise the checkpoint group by group, keeping none: the tenant's pass before its first session."""
        specs = self.skeleton.groups
        with Checkpoint(self.path) as checkpoint:
            for done, spec in enumerate(specs):
                if progress:
                    progress(done, len(specs))
                group = quantise(list(self._layers(checkpoint, spec.members)), weight_bits=self.weight_bits)
                if group.weight.shape != (sum(spec.outputs), spec.inputs):
                    raise CheckpointError(f"{spec.name} is {list(group.weight.shape)} on disk, not as config.json says")
                digest = group.digest()
                yield GroupEntry(members=spec.members, inputs=spec.inputs, outputs=spec.outputs, digest=digest), group
        if progress:
            progress(len(specs), len(specs))

    def assemble(self, entries: Sequence[GroupEntry]) -> Manifest:
        """The manifest of streamed entries, remembered for the next start."""
        manifest = Manifest(version=MANIFEST_VERSION, weight_bits=self.weight_bits, groups=tuple(entries))
        self._remember(lambda: write_atomically(self._manifest_path(), manifest.to_json()))
        self._manifest = manifest
        return manifest

    def _quantise_all(self, progress: Progress | None) -> Manifest:
        entries = []
        for entry, group in self.stream(progress=progress):
            self._cache_group(entry.digest, group)
            entries.append(entry)
        return self.assemble(entries)

    def _read(self, digest: str) -> QuantisedGroup | None:
        path = self._cache / f"{digest}.safetensors"
        try:
            tensors = load_file(path)
            group = QuantisedGroup(tensors["weight"], tensors["channel_scale"], tensors.get("bias"))
        except (OSError, SafetensorError, KeyError):
            return None
        return group if group.digest() == digest else None

    def _cache_group(self, digest: str, group: QuantisedGroup) -> None:
        tensors = {"weight": group.weight, "channel_scale": group.channel_scale}
        if group.bias is not None:
            tensors["bias"] = group.bias
        self._remember(
            lambda: _replace_atomically(self._cache / f"{digest}.safetensors", lambda file: save_file(tensors, file))
        )

    def _remember(self, write: Callable[[], None]) -> None:
        """Write to the cache. It only saves time: on a full or read-only disk everything is computed again instead."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            if not self._cache_failed:
                log.warning(
                    "cannot cache quantised weights in %s (%s): they are quantised again at every start. Make room "
                    "there, or choose another folder (`cache` in provider.toml, SYMBIOSIS_PRIV_CACHE)",
                    self._cache,
                    error,
                )
            self._cache_failed = True


def _replace_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        write(partial)
        partial.replace(path)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that readers see the old one or the whole new one, with permission bits `mode` from the start."""

    def write(partial: Path) -> None:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    _replace_atomically(path, write)
