"""The process of an endpoint."""

import gc
from pathlib import Path

from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tenant.model.hf import RemoteConfig


def test_modules_are_not_examined_again_while_an_endpoint_serves(tiny: Path) -> None:
    gc.unfreeze()
    with serving.opened(tiny, RemoteConfig(masking="simulate"), name="tiny", adapters={}, options=Serving()):
        assert gc.get_freeze_count() > len(gc.get_objects())  # most of torch's and transformers' objects
    assert not gc.get_freeze_count()
