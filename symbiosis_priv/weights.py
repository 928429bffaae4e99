"""The quantised base model: a manifest that fixes it, and a store that hands out one layer group at a time.

The manifest lists every layer group with the SHA-256 of its integers, scales and bias; the manifest's own digest is
what `federation.toml` pins. Quantising is deterministic, so tenants and providers get the same digest from the
same checkpoint. Quantised groups are kept on disk under their digest, and checked against it when read back.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from symbiosis_priv.checkpoint import Checkpoint
from symbiosis_priv.discovery import GroupSpec, Skeleton, discover
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.quantise import DEFAULT_WEIGHT_BITS, Layer, QuantisedGroup, quantise

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
    def width(self) -> int:
        """Output features of all members together."""
        return sum(self.outputs)


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
            members = (name for spec in self.skeleton.groups for name in spec.members)
            return all(f"{self._stored_name(checkpoint, name)}.weight" in checkpoint for name in members)

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
        self._write(entry.digest, group)
        return group

    def layers(self, index: int) -> list[Layer]:
        """The float members of a group, as stored in the checkpoint (the float path's weights)."""
        with Checkpoint(self.path) as checkpoint:
            return list(self._layers(checkpoint, self.manifest().groups[index].members))

    def _layers(self, checkpoint: Checkpoint, members: tuple[str, ...]) -> Iterator[Layer]:
        for name in members:
            key = self._stored_name(checkpoint, name)
            weight = checkpoint.tensor(f"{key}.weight")
            bias = checkpoint.tensor(f"{key}.bias") if f"{key}.bias" in checkpoint else None
            yield Layer(name, weight.t() if name in self.skeleton.transposed else weight, bias)

    def _stored_name(self, checkpoint: Checkpoint, name: str) -> str:
        """Some published checkpoints leave out the base model's prefix (`h.0` for `transformer.h.0`) or add it."""
        prefix = self.skeleton.base_prefix + "."
        for key in (name, name.removeprefix(prefix), prefix + name):
            if f"{key}.weight" in checkpoint:
                return key
        return name  # Checkpoint.tensor names what is missing

    def _manifest_path(self) -> Path:
        with Checkpoint(self.path) as checkpoint:
            signature = checkpoint.signature()
        return self._cache / f"manifest-v{MANIFEST_VERSION}-{self.weight_bits}-{signature}.json"

    def _cached_manifest(self) -> Manifest | None:
        try:
            return Manifest.from_json(self._manifest_path().read_bytes())
        except (FileNotFoundError, CheckpointError):  # a damaged one is made again
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
        write_atomically(self._manifest_path(), manifest.to_json())
        self._manifest = manifest
        return manifest

    def _quantise_all(self, progress: Progress | None) -> Manifest:
        entries = []
        for entry, group in self.stream(progress=progress):
            self._write(entry.digest, group)
            entries.append(entry)
        return self.assemble(entries)

    def _read(self, digest: str) -> QuantisedGroup | None:
        path = self._cache / f"{digest}.safetensors"
        try:
            tensors = load_file(path)
            group = QuantisedGroup(tensors["weight"], tensors["channel_scale"], tensors.get("bias"))
        except (FileNotFoundError, SafetensorError, KeyError):
            return None
        return group if group.digest() == digest else None

    def _write(self, digest: str, group: QuantisedGroup) -> None:
        path = self._cache / f"{digest}.safetensors"
        tensors = {"weight": group.weight, "channel_scale": group.channel_scale}
        if group.bias is not None:
            tensors["bias"] = group.bias
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            save_file(tensors, partial)
            partial.replace(path)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that readers see the old one or the whole new one, with permission bits `mode` from the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        partial.replace(path)
