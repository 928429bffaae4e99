"""Tinker's protocol buffers for training: requests, which are checked against the model, their losses, and answers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from tenant.endpoint.api.errors import ApiError

_MOST_EXAMPLES = 256  # of a request, as the client is told
_KINDS = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64"}

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


class Loss(NamedTuple):
    """A loss of the log probabilities of the targets, its inputs and options. It is a sum over the tokens of one
    example, so it does not depend on other examples."""

    compute: Callable[..., Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    options: Options = MappingProxyType({})


def _cross_entropy(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -(ratio * advantages).minimum(clipped * advantages).sum()


LOSSES = {
    "cross_entropy": Loss(_cross_entropy, inputs=("weights",)),
    "importance_sampling": Loss(_importance_sampling),
    "ppo": Loss(_ppo, options={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
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
    options = {name: one.number for name, one in message.loss_fn_config_v2.items()} or dict(message.loss_fn_config)
    for name, value in options.items():
        if name not in loss.options or not isfinite(value):
            known = ", ".join(loss.options) or "none"
            raise ApiError(400, f"loss_fn_config.{name[:80]} is no option of this loss with a number; it has {known}")
    if not 1 <= len(message.data) <= _MOST_EXAMPLES:
        raise ApiError(400, f"data has {len(message.data):,} examples; send 1 to {_MOST_EXAMPLES}", param="data")
    whole = {**loss.options, **options}
    examples = []
    for number, datum in enumerate(message.data):
        try:
            tokens, targets, inputs = _tensors(datum, loss, vocabulary, longest)
        except ApiError as error:
            raise ApiError(400, f"data[{number}]: {error}", param="data") from None
        examples.append(Example(tokens, targets, partial(loss.compute, inputs=inputs, options=whole)))
    return examples


def _tensors(datum: Any, loss: Loss, vocabulary: int, longest: int) -> tuple[Tensor, Tensor, Inputs]:
    if wrong := [kind for one in datum.model_input if (kind := one.WhichOneof("chunk")) != "encoded_text"]:
        raise ApiError(400, f"a chunk of model_input is {wrong[0] or 'empty'}; only text can be trained here")
    packed = b"".join(one.encoded_text.tokens for one in datum.model_input)
    if len(packed) % 4 or not 0 < len(packed) <= 4 * longest:
        raise ApiError(400, f"model_input has {len(packed) // 4:,} tokens; from 1 to {longest:,} can be computed here")
    tokens = torch.from_numpy(np.frombuffer(packed, np.int32).astype(np.int64))
    names = {"target_tokens", *loss.inputs}
    found = {"weights": torch.ones(len(tokens), dtype=torch.float32, device="cpu")}
    for name, message in datum.loss_fn_inputs.items():
        kind = _KINDS.get(message.dtype)
        if name not in names or kind is None or len(message.dense) != len(tokens) * np.dtype(kind).itemsize:
            text = f"loss_fn_inputs.{name[:80]}: this loss has the inputs {', '.join(sorted(names))}, each a dense"
            raise ApiError(400, f"{text} tensor with one number for each of the {len(tokens):,} tokens")
        found[name] = torch.from_numpy(np.frombuffer(message.dense, kind).copy())
    if missing := sorted(names - found.keys()):
        raise ApiError(400, f"loss_fn_inputs.{missing[0]} is missing")
    targets = found.pop("target_tokens")
    if targets.is_floating_point() or any(not 0 <= x < vocabulary for x in (*tokens.aminmax(), *targets.aminmax())):
        raise ApiError(400, f"model_input and target_tokens are integers of a vocabulary of {vocabulary:,}")
    inputs = {name: found[name].float() for name in loss.inputs}
    if wrong := [name for name, one in inputs.items() if not one.isfinite().all()]:
        raise ApiError(400, f"loss_fn_inputs.{wrong[0]} has inf or nan")
    return tokens, targets, inputs


def outputs_message(results: Sequence[tuple[Tensor, float]]) -> bytes:
    """Return the answer to `forward_backward`: for each example the log probabilities of its targets, float32, and its
    loss."""
    total = sum(loss for _, loss in results)
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": total})
    for one, _ in results:
        data = one.numpy().tobytes()
        offsets = np.array([0, len(data)], np.int64).tobytes()
        record = message.loss_fn_outputs.add(num_datums=1)
        record.fields["logprobs"].CopyFrom(pb.BatchedTensor(data=data, offsets=offsets, dtype=pb.DTYPE_FLOAT32))
    return bytes(message.SerializeToString())
