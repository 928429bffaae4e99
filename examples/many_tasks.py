"""Answer one prompt with several adapters in one batch; the base model's linears run at the providers."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from tenant import RemoteConfig, Tasks, backend_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--federation", default="federation.toml")
parser.add_argument("--adapters", nargs="+", default=["my-adapter"], help="PEFT folders, of any methods")
parser.add_argument("--prompt", required=True)
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

remote = RemoteConfig(federation=args.federation, masking="pad")
model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=remote, trust_remote_code=False)
tasks = Tasks(model)
names = ["__base__", *(tasks.register(f"task-{i}", folder) for i, folder in enumerate(args.adapters))]

tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
prompts = tokenizer([args.prompt] * len(names), return_tensors="pt", return_token_type_ids=False)
with tasks.batch(names):
    answers = tasks.model.generate(**prompts, max_new_tokens=args.max_new_tokens)
for name, folder, answer in zip(names, ["without adapter", *args.adapters], answers, strict=True):
    print(f"{name} ({folder}): {tokenizer.decode(answer, skip_special_tokens=True)}")
backend_of(model).close()
