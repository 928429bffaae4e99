"""Tinker's protocol buffers for training: requests, which are checked against the model, their losses, and answers."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import getfullargspec
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from tenant.endpoint.api.errors import ApiError

_MOST_EXAMPLES = 256  # of a request, as the client is told
_KINDS = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64"}


# Losses of the log probabilities `found` of the targets, float32 `[t]`: sums over the tokens of one example, so they do
# not depend on other examples. Keywords with a default are options, the others are inputs, float32 `[t]`.


def _cross_entropy(found: Tensor, *, weights: Tensor) -> Tensor:
    return -(found * weights).sum()


def _importance_sampling(found: Tensor, *, logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -((found - logprobs).exp() * advantages).sum()


def _ppo(
    found: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Tensor:
    ratio = (found - logprobs).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -(ratio * advantages).minimum(clipped * advantages).sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    loss.__name__.removeprefix("_"): loss for loss in (_cross_entropy, _importance_sampling, _ppo)
}


class Example(NamedTuple):
    """One example: token ids and targets, int64 `[t]`, and the loss as a function of the targets' log probabilities."""

    tokens: Tensor
    targets: Tensor
    loss: Callable[[Tensor], Tensor]


def read_request(body: bytes) -> Any:
    """Return the message of a `forward_backward`. Raises `ApiError` if it is none."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception:  # protobuf's
        raise ApiError(400, "the body is not a ForwardBackwardRequest; use the client tinker") from None
    return message


def examples_of(message: Any, *, vocabulary: int, longest: int) -> list[Example]:
    """Return the examples of a message. Raises `ApiError` if the loss cannot take them, or the model, which has a
    `vocabulary` and computes examples of at most `longest` tokens."""
    if (loss := LOSSES.get(message.loss_fn)) is None:
        text = f"loss_fn {message.loss_fn[:80]!a} is not computed here; there are {', '.join(LOSSES)}"
        raise ApiError(400, f"{text}, and forward_backward_custom for other losses", param="loss_fn")
    arguments = getfullargspec(loss)
    known = arguments.kwonlydefaults or {}
    inputs = [name for name in arguments.kwonlyargs if name not in known]
    options: dict[str, float] = dict(message.loss_fn_config)  # all that an earlier client sends
    options |= {name: one.number if one.HasField("number") else nan for name, one in message.loss_fn_config_v2.items()}
    for name, value in options.items():
        if name not in known or not isfinite(value):
            text = f"loss_fn_config.{name[:80]} is no option of this loss with a number"
            raise ApiError(400, f"{text}; it has {', '.join(known) or 'none'}")
    if not 1 <= len(message.data) <= _MOST_EXAMPLES:
        raise ApiError(400, f"data has {len(message.data):,} examples; send 1 to {_MOST_EXAMPLES}", param="data")
    examples = []
    for number, datum in enumerate(message.data):
        try:
            examples.append(_example(datum, partial(loss, **options), inputs, vocabulary, longest))
        except ApiError as error:
            raise ApiError(400, f"data[{number}]: {error}", param="data") from None
    return examples


def _example(datum: Any, loss: Callable[..., Tensor], inputs: Sequence[str], vocabulary: int, longest: int) -> Example:
    if wrong := [kind for one in datum.model_input if (kind := one.WhichOneof("chunk")) != "encoded_text"]:
        raise ApiError(400, f"a chunk of model_input is {wrong[0] or 'empty'}; only text can be trained here")
    packed = b"".join(one.encoded_text.tokens for one in datum.model_input)
    if len(packed) % 4 or not 0 < len(packed) <= 4 * longest:
        raise ApiError(400, f"model_input has {len(packed) // 4:,} tokens; from 1 to {longest:,} can be computed here")
    tokens = torch.from_numpy(np.frombuffer(packed, np.int32).astype(np.int64))
    names = sorted(["target_tokens", *inputs])
    found = {"weights": torch.ones(len(tokens), dtype=torch.float32, device="cpu")}
    for name, message in datum.loss_fn_inputs.items():
        kind = _KINDS.get(message.dtype)
        if name not in names or kind is None or len(message.dense) != len(tokens) * np.dtype(kind).itemsize:
            text = f"loss_fn_inputs.{name[:80]}: this loss has the inputs {', '.join(names)}, each a dense tensor with"
            raise ApiError(400, f"{text} one number for each of the {len(tokens):,} tokens")
        found[name] = torch.from_numpy(np.frombuffer(message.dense, kind).copy())
    if missing := [name for name in names if name not in found]:
        raise ApiError(400, f"loss_fn_inputs.{missing[0]} is missing")
    targets = found.pop("target_tokens")
    if targets.is_floating_point() or any(not 0 <= x < vocabulary for x in (*tokens.aminmax(), *targets.aminmax())):
        raise ApiError(400, f"model_input and target_tokens are integers of a vocabulary of {vocabulary:,}")
    if wrong := [name for name in inputs if not found[name].isfinite().all()]:
        raise ApiError(400, f"loss_fn_inputs.{wrong[0]} has inf or nan")
    return Example(tokens, targets, partial(loss, **{name: found[name].float() for name in inputs}))


def outputs_message(results: Sequence[tuple[Tensor, float]]) -> bytes:
    """Return the answer to `forward_backward`: for each example the log probabilities of its targets, float32, and its
    loss."""
    total, data = sum(loss for _, loss in results), [one.numpy().tobytes() for one, _ in results]
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": total})
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int64).tobytes()
    logprobs = pb.BatchedTensor(data=b"".join(data), offsets=offsets, dtype=pb.DTYPE_FLOAT32)
    message.loss_fn_outputs.add(num_datums=len(data)).fields["logprobs"].CopyFrom(logprobs)
    return bytes(message.SerializeToString())
