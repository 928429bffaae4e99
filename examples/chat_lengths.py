"""Asks a model the questions of threat_model/evidence/chats.toml, and prints how many tokens it reads and writes.

    python examples/chat_lengths.py ~/.cache/symbiosis-priv/demo/SmolLM2-135M-Instruct

The attack on topics and languages of chats (`symbiosis-priv threat-model`) uses these numbers of SmolLM2, which
`symbiosis-priv serve-demo` fetches. Put the output at the end of the file. Sampled at temperature 0.7;
answers end at 128 tokens.
"""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from threat_model.evidence import chats

_BATCH, _LONGEST = 96, 128


def questions(table: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (language, topic, text) of every question of the file."""
    found = []
    for language, asked in table.items():
        for topic in (name for name in asked if f"{name}_words" in asked):
            words = asked[f"{topic}_words"]
            found += [(language, topic, text.replace("%", word)) for text in asked[topic] for word in words]
    return found


parser = argparse.ArgumentParser()
parser.add_argument("model")
path = parser.parse_args().model
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False)
model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, trust_remote_code=False)
ends = tokenizer.eos_token_id
torch.manual_seed(0)
asked = questions(tomllib.loads(Path(chats.FILE).read_text(encoding="utf-8")))
texts = [
    tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    for _, _, text in asked
]
order = torch.randperm(len(texts)).tolist()
lengths: dict[int, list[int]] = {}
for first in range(0, len(order), _BATCH):
    batch = order[first : first + _BATCH]
    ids = tokenizer([texts[i] for i in batch], return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**ids, max_new_tokens=_LONGEST, do_sample=True, temperature=0.7, top_k=50)
    answers = output[:, ids["input_ids"].shape[1] :].tolist()
    for i, prompt, answer in zip(batch, ids["attention_mask"].sum(dim=1).tolist(), answers, strict=True):
        lengths[i] = [prompt, answer.index(ends) + 1 if ends in answer else _LONGEST]
    print(f"# {len(lengths)} of {len(texts)}", flush=True)
print("[lengths]  # pairs (prompt, answer), in the order of the questions")
for i, (language, topic, _) in enumerate(asked):
    if i == 0 or asked[i - 1][:2] != (language, topic):
        same = [lengths[j] for j, one in enumerate(asked) if one[:2] == (language, topic)]
        print(f"{language}-{topic} = {same}")
