"""Generate with an adapter; the base model's linears run at the providers of federation.toml."""

import argparse

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from tenant import RemoteConfig, backend_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--federation", default="federation.toml")
parser.add_argument("--adapter", default="my-adapter")
parser.add_argument("--prompt", required=True)
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

remote = RemoteConfig(federation=args.federation, masking="pad")
base = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=remote, trust_remote_code=False)
model = PeftModel.from_pretrained(base, args.adapter)

tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
prompt = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
model.generate(**prompt, max_new_tokens=args.max_new_tokens, streamer=TextStreamer(tokenizer))
backend_of(model).close()
