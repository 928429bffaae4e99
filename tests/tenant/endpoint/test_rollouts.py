"""TRL's GRPO with completions of the endpoint's engine.

python -m tests.tenant.endpoint.test_rollouts MODEL    # tokens per second, by turns with TRL's own generation
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from datasets import Dataset
from openai import OpenAI
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig, backend_of, batched_rollouts
from tenant.endpoint.options import Serving
from tenant.model.loading import load_tokenizer
from tests.tenant.endpoint.conftest import served_at

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")]
PROMPTS = [{"prompt": text} for text in ("The report", "The patient has", "A", "Two pages are long and")]
Rollout = Callable[[list[Any], Any], dict[str, Any]]


@contextmanager
def trainer_for(
    model: Path, folder: Path, rollout: Rollout | None = batched_rollouts, remote: Any = None, **options: Any
) -> Iterator[Any]:
    split: Any = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=remote or RemoteConfig(masking="simulate")
    )
    arguments: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 12,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    with closing(backend_of(split)):
        yield GRPOTrainer(
            split,
            reward_funcs=rewards,
            args=GRPOConfig(str(folder), **arguments | options),
            train_dataset=Dataset.from_list(PROMPTS),
            processing_class=load_tokenizer(model),
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4),
            rollout_func=rollout,
        )


def rewards(completions: list[str], **_: object) -> list[float | None]:
    return [float(len(text) % 7) for text in completions]


def adapter(trainer: Any) -> list[Tensor]:
    return [one.detach().clone() for one in trainer.model.parameters() if one.requires_grad]


def test_the_adapter_is_what_trl_computes_from_these_completions(tiny: Path, tmp_path: Path) -> None:
    """With real providers. The same trainer over the simulation, given the same completions, has the same bits; and the
    simulation's engine gives the same completions."""
    seen: list[dict[str, Any]] = []

    def kept(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append(batched_rollouts(prompts, trainer))
        return seen[-1]

    with (
        LocalFederation(tiny, tmp_path / "federation", helpers=1) as local,
        trainer_for(tiny, tmp_path, kept, RemoteConfig(federation=local.federation)) as trainer,
    ):
        start = adapter(trainer)
        trainer.train()
        found = adapter(trainer)
    assert len(seen) == 3
    assert not all(torch.equal(a, b) for a, b in zip(start, found, strict=True))
    replayed, again = iter(seen), list[dict[str, Any]]()

    def replay(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        again.append(batched_rollouts(prompts, trainer))
        return next(replayed)

    with trainer_for(tiny, tmp_path, replay) as trainer:
        trainer.train()
        assert all(torch.equal(a, b) for a, b in zip(found, adapter(trainer), strict=True))
    assert again == seen


def test_completions_are_those_of_the_endpoint_for_the_same_seeds(tiny: Path, tmp_path: Path) -> None:
    """After training, with the adapter that is saved then, over HTTP; log probabilities are those that TRL computes."""
    with trainer_for(tiny, tmp_path, temperature=0.7, top_k=50, min_p=0.01) as trainer:
        trainer.train()
        torch.manual_seed(7)
        texts = [one["prompt"] for one in PROMPTS]
        found = batched_rollouts(texts, trainer)
        torch.manual_seed(7)
        seeds = torch.randint(1 << 62, (len(texts),), dtype=torch.int64).tolist()
        trainer.model.save_pretrained(tmp_path / "adapter")
        assert trainer.model.training
        for prompt, completion, logprobs in zip(*found.values(), strict=True):
            with torch.no_grad():
                logits = trainer.model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-3, atol=1e-3)
    remote, adapters = RemoteConfig(masking="simulate"), {"a": tmp_path / "adapter"}
    with (
        served_at(tiny, remote, key="key", adapters=adapters, options=Serving()) as (service, address),
        OpenAI(base_url=address + "/v1", api_key="key", max_retries=0) as client,
    ):
        for text, completion, seed in zip(texts, found["completion_ids"], seeds, strict=True):
            asked: Any = {"temperature": 0.7, "max_tokens": 12, "extra_body": {"top_k": 50, "min_p": 0.01}}
            answer = client.completions.create(model="a", prompt=text, seed=seed, **asked)
            assert answer.choices[0].text == service.tokenizer.decode(completion, skip_special_tokens=True)


def test_what_cannot_be_generated_is_refused(tiny: Path, tmp_path: Path) -> None:
    with trainer_for(tiny, tmp_path, max_completion_length=100_000) as trainer:
        with pytest.raises(ConfigError, match="context"):
            batched_rollouts(["The report"], trainer)
        trainer.args.generation_kwargs = {"num_beams": 2}
        with pytest.raises(UnsupportedMethodError, match="generation_kwargs"):
            batched_rollouts(["The report"], trainer)
        assert trainer.model.training


def _measure(model: Path, *, masking: str = "pad", completions: int = 16, tokens: int = 32, turns: int = 4) -> None:
    """Print tokens per second of TRL's own generation and of the engine, by turns, with an executor and a helper."""
    spent: dict[str, list[float]] = {"generate()": [], "batched_rollouts": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        local = stack.enter_context(LocalFederation(model, folder / "federation", helpers=1))
        remote = RemoteConfig(federation=local.federation, masking=masking)
        size: Any = {"per_device_train_batch_size": completions, "max_completion_length": tokens, "num_generations": 4}
        trainer = stack.enter_context(trainer_for(model, folder, remote=remote, **size))
        prompts = [one["prompt"] for one in PROMPTS for _ in range(completions // 4)]
        for _ in range(turns + 1):  # the first turn warms up
            for name, rollout in (("generate()", None), ("batched_rollouts", batched_rollouts)):
                trainer.rollout_func, begin = rollout, time.perf_counter()
                generated = trainer._generate(prompts)[1]
                spent[name].append(sum(map(len, generated)) / (time.perf_counter() - begin))
    print(json.dumps({name: [round(one, 1) for one in rates[1:]] for name, rates in spent.items()}))


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
