"""The official client's own loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [  # the client leaves a connection open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def datum(tinker: Any, tokens: list[int], **inputs: Any) -> Any:
    inputs.setdefault("weights", torch.ones(len(tokens) - 1))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(tokens[1:]), **inputs},
    )


def test_a_loop_trains_samples_and_saves(tinker: Any, connect: Callable[..., Any]) -> None:
    service = connect()
    training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    data = [datum(tinker, [5, 9, 7, 11, 3]), datum(tinker, [8, 2, 4])]
    losses = []
    for _ in range(8):
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
        losses.append(forward.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < losses[0] / 2
    sampler = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    answer = sampler.sample(tinker.ModelInput.from_ints([5, 9]), 2, params, include_prompt_logprobs=True).result()
    assert [list(one.tokens) for one in answer.sequences] == [[7, 11, 3]] * 2
    assert answer.prompt_logprobs[0] is None
    assert training.save_state("first").result().path.endswith("/weights/first")
