"""Opens Tinker's API over a model that an endpoint serves."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fastapi import APIRouter

from tenant.endpoint.api.service import Service
from tenant.endpoint.engine.queued import Turn
from tenant.endpoint.options import Serving
from tenant.endpoint.tinker.checkpoints import Checkpoints
from tenant.endpoint.tinker.routes import Tinker, files_router, tinker_router
from tenant.endpoint.tinker.together import Together
from tenant.endpoint.tinker.training import Training
from tenant.masking.backend import Backend
from tenant.tasks import Tasks


@contextmanager
def opened(
    service: Service, tasks: Tasks, backend: Backend, turn: Turn, *, options: Serving, clients: int
) -> Iterator[list[APIRouter]]:
    """Context manager: the routes. Raises `ConfigError` and `StorageError`: the folder cannot be used."""
    assert options.tinker is not None
    with ExitStack() as running:
        checkpoints = Checkpoints(options.tinker, owners=clients)
        running.callback(checkpoints.close)
        Together(service.model, backend, turn)
        training = Training(service.model, tasks, checkpoints, name=service.name, clients=clients)
        running.callback(training.close)
        tinker = Tinker(service, training, checkpoints, own=options.api_key_file is None)
        yield [tinker_router(tinker), files_router(tinker)]
