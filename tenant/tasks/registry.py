"""`Tasks`: the tasks of one base model."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis_priv.errors import ConfigError, TaskError, UnsupportedMethodError
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks import adapter as adapters
from tenant.tasks.adapter import Adapter, TaskFolder, check_name, memory_of, stored, stored_in
from tenant.tasks.batch import BASE, Batch, Composition
from tenant.tasks.twins import load_as_twin

DEFAULT_MEMORY = 1 << 30
_COMPOSITIONS = 64  # limit of cached compositions, each of a few kilobytes
_active: ContextVar[tuple[tuple[Tasks, Batch], ...]] = ContextVar("active", default=())


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A task's name, its PEFT method in capitals, and the bytes of its loaded adapter; 0 if it is not loaded."""

    name: str
    method: str
    bytes: int


class Tasks:
    """The tasks of one base model: a registry, and a cache of the adapters in use.

    Registering a task reads metadata only. `batch` loads the adapters that it needs, and unloads those that were used
    least recently when `memory_limit` is reached. A task in use or with unsaved parameters is never unloaded to free
    memory. Thread-safe.

    The model itself does not change: without `batch` it computes the base model.

    Args:
        model: a split or whole model from `from_pretrained`, without an adapter.
        memory_limit: bytes of all loaded adapters.

    Raises:
        ConfigError: `model` cannot run tasks, or the limit is below 1.
    """

    def __init__(self, model: PreTrainedModel, *, memory_limit: int = DEFAULT_MEMORY) -> None:
        if not isinstance(model, PreTrainedModel) or any(isinstance(m, BaseTunerLayer) for m in model.modules()):
            raise ConfigError("Tasks takes the base model from `from_pretrained`, before get_peft_model")
        if memory_limit < 1:
            raise ConfigError(f"memory_limit = {memory_limit}: write a number of bytes, at least 1")
        self.model: Any = model
        self.memory_limit = memory_limit
        self._sources: dict[str, TaskFolder | PeftConfig] = {}
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()  # the least recently used one first
        self.bytes = 0  # of all loaded adapters
        self._twins: WeakValueDictionary[Hashable, Adapter] = WeakValueDictionary()
        self._used: Counter[str] = Counter()
        self._names: dict[nn.Module, tuple[str, tuple[str, ...]]] = {}  # with the names of its siblings
        self._hooks: dict[str, list[Any]] = {}
        self._rows_first: set[str] = set()
        self._compositions: dict[tuple[object, ...], Composition] = {}  # of loaded adapters
        self._lock = threading.RLock()

    # The registry

    def register(self, name: str, source: str | Path | PeftConfig, *, within: Path | None = None) -> str:
        """Add a task, and return its name.

        Args:
            name: up to 64 ASCII letters, digits, `.`, `_` and `-`.
            source: a PEFT folder, or a PEFT configuration of an adapter to train.
            within: no symbolic link in `source` may lead out of this folder. None: links may lead anywhere.

        Raises:
            ConfigError: the name is taken or not allowed, or `source` is not a PEFT folder.
            CheckpointError: the folder is refused (`vet_adapter`), or has a link out of `within`.
        """
        found = source if isinstance(source, PeftConfig) else stored(Path(source), within=within)
        return self._add({check_name(name): found})[0]

    def register_all(self, repository: str | Path) -> list[str]:
        """Add every task folder in `repository` under the folder's name, and return the names. If one folder is
        refused, none is added. Raises `ConfigError` and `CheckpointError` as `register` does. A symbolic link out of
        `repository` is refused."""
        return self._add(stored_in(Path(repository)))

    def unregister(self, name: str, *, discard: bool = False) -> None:
        """Unload a task and forget it. Arguments and errors as for `unload`."""
        with self._lock:
            self.unload(name, discard=discard)
            del self._sources[name]

    def infos(self) -> list[TaskInfo]:
        """Return the state of every task, in the order of registration."""
        with self._lock:
            return [self[name] for name in self._sources]

    def __getitem__(self, name: str) -> TaskInfo:
        with self._lock:
            source, loaded = self._source(name), self._loaded.get(name)
            kind = source.method if isinstance(source, TaskFolder) else source.peft_type
            method = str(getattr(kind, "value", kind)).upper()
            return TaskInfo(name=name, method=method, bytes=0 if loaded is None else loaded.bytes)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    # Adapters in memory

    def load(self, name: str, *, trainable: bool = False) -> None:
        """Load a task's adapter ahead of its first batch.

        Args:
            trainable: True to train the adapter of a folder. A task from a configuration is always trainable.

        Raises:
            TaskError: the task is unknown, is in use with another `trainable`, or does not fit the memory limit.
            CheckpointError: the adapter does not fit the model.
            UnsupportedMethodError: the method cannot be used for a task.
        """
        with self._lock:
            loaded = self._loaded.get(name)
            if loaded is not None and trainable and not loaded.trainable:
                self.unload(name)
            self._load(name, trainable=trainable)

    def unload(self, name: str, *, discard: bool = False) -> None:
        """Free the memory of a task's adapter, if it is loaded. `discard`: unload the task even if it has unsaved
        parameters, which are lost. Raises `TaskError` if the task is unknown or in use, or has unsaved parameters."""
        with self._lock:
            self._source(name)
            if self._used[name]:
                raise TaskError(f"the task {name} is in use; unload it after its batches have ended")
            loaded = self._loaded.get(name)
            if loaded is not None and loaded.changed and not discard:
                raise TaskError(
                    f"the task {name} has parameters that were not saved; call tasks.save({name!r}, folder), or pass "
                    f"discard=True to lose them"
                )
            self._drop(name)

    def parameters(self, name: str) -> Iterator[nn.Parameter]:
        """Return the parameters of a task that training changes; loads the task."""
        with self._lock:
            return self._load(name, trainable=True).parameters()

    def save(self, name: str, folder: str | Path) -> None:
        """Write a trained task as a PEFT folder, from which the task is loaded again after it was unloaded. Raises
        `TaskError` if the task is unknown; `UnsupportedMethodError` if the task was loaded for inference."""
        with self._lock:
            self._load(name, trainable=True).save(Path(folder))
            self._sources[name] = stored(Path(folder))

    @contextmanager
    def hold(self, name: str) -> Iterator[int | None]:
        """Context manager: loads a task, which stays loaded in the block. Yields a number that no other load of a task
        has; None if the task is trainable, because its parameters may change. Raises what `load` raises."""
        with self._held([name]) as loaded:
            yield None if loaded[name].trainable else loaded[name].number

    def layers(self, name: str) -> frozenset[str]:
        """Return the names of the model's layers that a task changes; loads the task."""
        with self._lock:
            return frozenset(self._load(name).layers)

    # Batches

    @contextmanager
    def batch(self, names: Sequence[str], *, block: int | None = None) -> Iterator[None]:
        """Context manager: row i of every input of the model belongs to the task `names[i]`.

        Loads missing adapters. Gradient checkpointing recomputes layers with the batch of their forward pass, even if
        `backward()` is called outside the context.

        Args:
            names: the task of each row; "__base__" for a row without an adapter. Without `block`, one name serves any
                number of rows.
            block: compute each task's rows in blocks of this number of rows, where products depend on their shape: then
                what adapters add to a row does not depend, bit for bit, on the other rows and tasks of the batch. None
                computes all rows of several tasks together.

        Raises:
            TaskError: a task is unknown, or the tasks exceed the memory limit; or, at the end of the block, a later
                batch of the model is still open.
            CheckpointError, UnsupportedMethodError: an adapter cannot be loaded (`load`).
        """
        if not names:
            raise TaskError("a batch has at least one row; name the task of each row")
        if block is not None and block < 1:
            raise TaskError(f"block = {block}: write a number of rows, at least 1")
        with self._held([name for name in dict.fromkeys(names) if name != BASE]) as loaded:
            for one in loaded.values():
                one.train(self.model.training)
            for module in self.model.modules() if self.model.training else ():
                checkpoint = vars(module).get("_gradient_checkpointing_func")
                if checkpoint is not None and not isinstance(checkpoint, _CheckpointInBatch):
                    vars(module)["_gradient_checkpointing_func"] = _CheckpointInBatch(checkpoint)
            # cached, unless training can change what a composition depends on
            kept = not self.model.training and not any(one.trainable for one in loaded.values())
            key = tuple(names), block
            with self._lock:
                found = self._compositions.pop(key, None) if kept else None
                composition = found or Composition(names, loaded, block)
                if kept:
                    if len(self._compositions) >= _COMPOSITIONS:
                        del self._compositions[next(iter(self._compositions))]
                    self._compositions[key] = composition  # in the order of last use
            entry = self, Batch(composition, self._rows_first)
            _active.set((*_active.get(), entry))
            try:
                yield
            finally:
                last = self._batch() is entry[1]
                _active.set(tuple(other for other in _active.get() if other is not entry))
            if not last:
                raise TaskError(
                    "another batch of this model was opened after this one and is still open, so rows of this batch "
                    "may have got its tasks; do not yield inside `batch`, or use one thread per batch"
                )

    def close(self) -> None:
        """Unload all adapters and remove the hooks from the model. Unsaved parameters are lost."""
        with self._lock:
            for hooks in self._hooks.values():
                for hook in hooks:
                    hook.remove()
            self._hooks.clear()
            for module in self._names:
                if isinstance(module, RemoteLayer):
                    module.tasks = None
            self._names.clear()
            for name in list(self._loaded):
                self._drop(name)

    @contextmanager
    def _held(self, names: Sequence[str]) -> Iterator[dict[str, Adapter]]:
        with self._lock:
            self._used.update(names)  # marks the adapters as in use, so that loading one does not unload another
        try:
            with self._lock:
                loaded = {name: self._load(name) for name in names}
            yield loaded
        finally:
            with self._lock:
                self._used.subtract(names)
                self._used += Counter()  # drops zeros

    def _add(self, found: dict[str, Any]) -> list[str]:
        with self._lock:
            if taken := sorted(found.keys() & self._sources.keys()):
                raise ConfigError(f"there is a task {taken[0]} already; unregister it first, or choose another name")
            self._sources |= found
            return list(found)

    def _source(self, name: str) -> TaskFolder | PeftConfig:
        try:
            return self._sources[name]
        except KeyError:
            raise TaskError(f"there is no task {name[:80]!a}; call tasks.register(name, folder) first") from None

    def _load(self, name: str, *, trainable: bool = False) -> Adapter:
        source, loaded = self._source(name), self._loaded.get(name)
        if loaded is None:
            if isinstance(source, TaskFolder):
                source = stored(source.folder, within=source.within)  # the folder may have changed
                self._make_room(name, memory_of(source))
                loaded = (
                    adapters.load(self.model, source, trainable=True)
                    if trainable
                    else load_as_twin(self.model, source, self._twins)
                )
            else:
                loaded = adapters.create(self.model, source)
            self._make_room(name, loaded.bytes)
            self._loaded[name] = loaded
            self.bytes += loaded.bytes
            for layer in loaded.layers:
                if layer in self._hooks:
                    continue
                # hooks at the layer and its siblings, which are computed in one request
                module = self.model.get_submodule(layer)
                group = getattr(module, "group", None)
                siblings = [
                    other
                    for other, remote in self.model.named_modules()
                    if isinstance(remote, RemoteLayer) and remote.group is group
                ] or [layer]
                for sibling in siblings:
                    found = self.model.get_submodule(sibling)
                    self._names[found] = sibling, tuple(siblings)
                    if isinstance(found, RemoteLayer):
                        found.tasks = self._output_of
                    before = found.register_forward_pre_hook(self._before, with_kwargs=True)
                    self._hooks[sibling] = [before, found.register_forward_hook(self._after)]
        if trainable and not loaded.trainable:
            raise TaskError(f"the task {name} was loaded for inference; call tasks.load({name!r}, trainable=True)")
        self._loaded.move_to_end(name)
        return loaded

    def _make_room(self, name: str, needed: int) -> None:
        """Unload the least recently used tasks for `needed` bytes; none that is in use or not saved."""
        replaced, missing = [], needed + self.bytes - self.memory_limit
        for other, one in self._loaded.items():
            if missing <= 0:
                break
            if not self._used[other] and not one.changed:
                replaced.append(other)
                missing -= one.bytes
        if missing > 0:
            raise TaskError(
                f"the task {name} needs {needed:,} bytes of memory_limit = {self.memory_limit:,}, and the rest is "
                f"taken by tasks that are in use or not saved; raise the limit, use fewer tasks in one batch, or save "
                f"what was trained"
            )
        for other in replaced:
            self._drop(other)

    def _drop(self, name: str) -> None:
        self._compositions.clear()
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            self.bytes -= loaded.bytes

    # At the model's layers

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch, found = self._batch(), self._names.get(module)
        if batch is None or found is None:
            return None
        name, siblings = found
        if not batch.extends(siblings):
            return None
        if len(args) != 1 or kwargs:
            raise UnsupportedMethodError(
                f"{name} takes more than one input, and a batch of tasks knows the rows of one only; use other "
                f"target_modules (linears)"
            )
        return (batch.before(name, siblings, args[0]),), kwargs

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._output_of(module, output, again=False)

    def _output_of(self, module: nn.Module, y: Tensor, *, again: bool = True) -> Tensor:
        """Return the output of a layer whose product is `y`. `again`: its hook will be called for the same pass."""
        batch, found = self._batch(), self._names.get(module)
        if batch is None or found is None or not batch.extends(found[1]):
            return y
        return batch.after(*found, y, module.forward, again=again)

    def _batch(self) -> Batch | None:
        return next((batch for tasks, batch in reversed(_active.get()) if tasks is self), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tasks:
        return self  # hooks of a copied model still refer to this object: the copy computes the base model


@dataclass(frozen=True)
class _CheckpointInBatch:
    """Gradient checkpointing that recomputes layers with the batches of their forward pass, because `backward()` may
    run in another context (another batch, or torch's thread for a GPU)."""

    checkpoint: Callable[..., Any]

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        active = _active.get()

        def run_in_batch(*args: Any, **kwargs: Any) -> Any:
            token = _active.set(active)
            try:
                return run(*args, **kwargs)
            finally:
                _active.reset(token)

        return self.checkpoint(run_in_batch, *args, **kwargs)
