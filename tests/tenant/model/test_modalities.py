"""Models that take images or sound. `tests/compatibility` compares their split models with plain ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from typer.testing import CliRunner

from symbiosis_priv.errors import UnsupportedModelError
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tenant.cli import app as cli
from tenant.model.hf import backend_of
from tenant.model.loading import check_runs_on_text
from tests.compatibility.families import build


def output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    found = model(**inputs)
    tensor: Tensor = found.logits_per_image if "logits_per_image" in found else found.logits
    return tensor


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


def of_a_processor(family: str, folder: Path) -> dict[str, Tensor]:
    """Write a model of pictures or of sounds, and return what its processor makes of one with a text."""
    kind = "audio" if family == "Qwen2Audio" else "image"
    place = f"<{kind}>"
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {f"{kind}_token": place, "begin": "<|audio_bos|>", "end": "<|audio_eos|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, extra_special_tokens=special)
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    config: dict[str, Any] = {f"{kind}_token_index": tokenizer.convert_tokens_to_ids(place), "text_config": text}
    generator = np.random.default_rng(0)
    if kind == "image":
        pytest.importorskip("PIL")
        reader: Any = transformers.CLIPImageProcessorPil(size={"height": 16, "width": 16}, do_center_crop=False)
        settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor: Any = transformers.LlavaProcessor(reader, tokenizer, **settings)
        given: Any = {"images": [generator.integers(0, 256, (30, 20, 3), dtype=np.uint8)]}
    else:
        config["audio_config"] = {"max_source_positions": 50}
        reader = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        processor = transformers.Qwen2AudioProcessor(reader, tokenizer, audio_token=place)
        given = {"audio": [generator.standard_normal(8_000).astype(np.float32)], "sampling_rate": 16_000}
    build(f"{family}ForConditionalGeneration", **config).save_pretrained(folder)
    return dict(processor(text=[place + "what is it?"], return_tensors="pt", **given))


@pytest.mark.parametrize("family", ["Llava", "Qwen2Audio"])
def test_pictures_and_sounds_are_read_with_generate_and_the_processor(family: str, tmp_path: Path) -> None:
    inputs = of_a_processor(family, tmp_path / "model")
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    options: Any = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with LocalFederation(tmp_path / "model", tmp_path, provider_options={"executor": {"threads": 1}}) as local:
        split = kind.from_pretrained(tmp_path / "model", quantization_config=RemoteConfig(federation=local.federation))
        found = split.generate(**inputs, **options)
        backend_of(split).close()
    simulated = kind.from_pretrained(tmp_path / "model", quantization_config=RemoteConfig(masking="simulate"))
    expected = simulated.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))
    plain = kind.from_pretrained(tmp_path / "model").generate(**inputs, **options)
    assert torch.cosine_similarity(found.logits[0], plain.logits[0]).item() > 0.999
