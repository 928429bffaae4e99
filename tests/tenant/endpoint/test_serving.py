"""The process of an endpoint."""

import gc
import shutil
from pathlib import Path

from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tenant.model.hf import RemoteConfig


def test_modules_are_not_examined_again_while_an_endpoint_serves(tiny: Path) -> None:
    gc.unfreeze()
    with serving.opened(tiny, RemoteConfig(masking="simulate"), name="tiny", adapters={}, options=Serving()):
        assert gc.get_freeze_count() > len(gc.get_objects())  # most of torch's and transformers' objects
    assert not gc.get_freeze_count()


def test_the_base_model_is_named_with_its_commit_on_the_hub(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "models--owner--tiny" / "snapshots" / "0123abc")
    remote, options = RemoteConfig(masking="simulate"), Serving()
    with serving.opened(folder, remote, name="tiny", adapters={}, options=options) as service:
        assert [one["root"] for one in service.models()] == ["owner/tiny@0123abc"]
