"""Fine-tune a LoRA adapter on private text; the base model's linears run at the providers of federation.toml."""

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from tenant import RemoteConfig, backend_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--federation", default="federation.toml")
parser.add_argument("--text", type=Path, required=True, help="one document per line")
parser.add_argument("--output", default="my-adapter")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

remote = RemoteConfig(federation=args.federation, masking="pad")
base = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=remote, trust_remote_code=False)
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8))

tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
documents = [line for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
trainer = Trainer(
    model=model,
    args=TrainingArguments(output_dir=args.output, max_steps=args.steps, logging_steps=10, report_to="none"),
    train_dataset=[{"input_ids": ids} for ids in tokenizer(documents, truncation=True, max_length=256)["input_ids"]],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
model.save_pretrained(args.output)  # an ordinary PEFT folder
backend_of(model).close()
