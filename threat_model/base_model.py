"""The base model of a recording: pretrained for seconds, on public text."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv.harness.text import public_text

_PAD = "<pad>"


def make_base_model(*, tied: bool) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A Llama with grouped queries, its own byte-level BPE, and a few seconds of pretraining on public text."""
    text = public_text(seed=0, sentences=1500)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        text.split("\n\n"),
        BpeTrainer(
            vocab_size=320,
            special_tokens=[_PAD],
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=tokenizer.token_to_id(_PAD),
        )
    )
    tokens = torch.tensor(tokenizer.encode(text).ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        starts = torch.randint(len(tokens) - 48, (8,))
        ids = torch.stack([tokens[s : s + 48] for s in starts.tolist()])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, tokenizer
