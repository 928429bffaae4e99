"""Models that take images or sound. `tests/compatibility` compares their split models with plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from symbiosis_priv.errors import ConfigError, UnsupportedModelError
from tenant.cli import app as cli
from tenant.model.loading import check_runs_on_text
from tests.compatibility.families import build, inputs_of


def output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    found = model(**inputs)
    tensor: Tensor = found.logits_per_image if "logits_per_image" in found else found.logits
    return tensor


def test_check_compares_outputs_on_the_inputs_of_a_processor(tmp_path: Path) -> None:
    vit = build("ViTForImageClassification")
    vit.save_pretrained(tmp_path)
    file = tmp_path / "inputs.safetensors"
    save_file(inputs_of(vit), file)
    check = CliRunner().invoke(cli.app, ["check", "--model", str(tmp_path), "--inputs", str(file)])
    assert check.exception is None, check.exception
    (line,) = [line for line in check.output.splitlines() if "smallest cosine of outputs" in line]
    assert float(line.split()[-2]) > 0.999  # the ring's cosine; bf16's is the last one
    save_file({"input_ids": torch.zeros(1, 1, dtype=torch.long)}, file)
    error = CliRunner().invoke(cli.app, ["check", "--model", str(tmp_path), "--inputs", str(file)]).exception
    assert isinstance(error, ConfigError)
    assert "processor" in str(error)


def test_check_says_which_models_it_cannot_compare_on_text(tmp_path: Path) -> None:
    """A folder without a tokenizer is not asked for one that it does not need."""
    build("ViTForImageClassification").save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("a text")
    arguments = ["check", "--model", str(tmp_path), "--text", str(tmp_path / "text.txt")]
    error = CliRunner().invoke(cli.app, arguments).exception
    assert isinstance(error, UnsupportedModelError)
    assert "pixel_values" in str(error)
    with pytest.raises(UnsupportedModelError, match="CLIPModel does not run on text alone"):
        check_runs_on_text(build("CLIPModel"), [1, 5, 6])
    check_runs_on_text(build("LlavaForConditionalGeneration"), [1, 5, 6])
