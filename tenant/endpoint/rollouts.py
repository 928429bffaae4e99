"""Generates the completions of TRL's `GRPOTrainer` with the endpoint's engine: all of a step as one batch, in which a
completion leaves when it ends. The engine computes with the trainer's own model, so with the adapter's present
weights; nothing is saved or loaded."""

from concurrent.futures import wait
from typing import Any

import torch

from symbiosis_priv.errors import DeadlineExceededError, UnsupportedMethodError
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.gathered import Gathered
from tenant.endpoint.engine.requests import EngineRequest, Sampling
from tenant.endpoint.engine.single_model import open_packed

_PROGRESS_S = 900.0  # without a step of the engine


def batched_rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Generate one completion for each prompt: `GRPOTrainer(..., rollout_func=batched_rollouts)`.

    The trainer's `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_completion_length` apply. Each
    completion has a seed of its own, which torch's generator draws, so the same run gives the same completions.

    Args:
        prompts: texts, or lists of messages. TRL repeats a prompt for each of its completions.

    Returns:
        For each prompt the token ids of the prompt and of the completion, and the log probabilities of the latter at
        the trainer's temperature, as TRL computes them.

    Raises:
        UnsupportedMethodError: the trainer has environments or `generation_kwargs`, or its method is prompt learning.
        UnsupportedModelError: the engine cannot compute this model's attention.
        ConfigError: a prompt with its completion exceeds the model's context, or has no tokens.
        SymbiosisError: a provider fails.
    """
    model, args, tokenizer = trainer.model, trainer.args, trainer.processing_class
    if args.generation_kwargs or trainer.environment_factories is not None:
        raise UnsupportedMethodError("batched_rollouts takes no generation_kwargs and no environments; leave them out")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedMethodError("prompt learning changes the prompt's tokens; leave out batched_rollouts")
    if isinstance(prompts[0], str):
        tokens = tokenizer(text=prompts)["input_ids"]
    else:
        tokens = tokenizer.apply_chat_template(
            prompts,
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
    seeds = torch.randint(1 << 62, (len(prompts),), dtype=torch.int64, device="cpu").tolist()
    requests = [
        EngineRequest(
            id=f"completion-{number}",
            prompt=tuple(prompt),
            max_tokens=args.max_completion_length,
            stop_tokens=frozenset(trainer.eos_token_ids),
            sampling=Sampling(
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k or 0,
                min_p=args.min_p or 0.0,
                repetition_penalty=args.repetition_penalty,
                seed=seed,
                logprobs=0,
                scaled_logprobs=True,
            ),
        )
        for number, (prompt, seed) in enumerate(zip(tokens, seeds, strict=True))
    ]
    training, found = model.training, [Gathered() for _ in requests]
    model.eval()
    try:
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        # one client may have half of the places for waiting requests
        limits = EngineLimits(waiting=2 * len(requests))
        engine = ContinuousEngine(open_packed(whole), tokenizer, limits=limits)
        try:
            for request, sink in zip(requests, found, strict=True):
                engine.submit(request, sink)
            steps = -1
            while wait([one.done for one in found], timeout=_PROGRESS_S).not_done:
                if steps == (steps := engine.load().steps):
                    raise DeadlineExceededError(f"the engine has made no step for {_PROGRESS_S:g} s")
            for one in found:
                one.done.result()
        finally:
            engine.close()
    finally:
        model.train(training)
    return {
        "prompt_ids": [list(request.prompt) for request in requests],
        "completion_ids": [[token.id for token in one.tokens] for one in found],
        "logprobs": [[each.logprob for each in one.logprobs()] for one in found],
    }
