"""Tinker's protocol buffers: requests to train, which are checked against the model, and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.engine.gathered import Gathered
from tenant.endpoint.engine.requests import TokenLogprob
from tenant.endpoint.tinker.losses import LOSSES, Loss

PROTOBUF = "application/x-protobuf"
_MOST_TARGETS = 128  # target tokens per position
_KINDS = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64"}
_NO_LOGPROB = -99999.0  # what the client takes for an empty place in a table of most probable tokens


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a model can take: number of token ids, and largest number of tokens of an example or a prompt."""

    vocabulary: int
    tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One example: token ids int64 `[t]`, target tokens int64 `[t]` or `[t, k]`, and the loss's other inputs, float32
    of the targets' shape."""

    tokens: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """The examples of one `forward` or `forward_backward`."""

    loss: Loss
    config: Mapping[str, float]
    examples: Sequence[Example]
    backward: bool


def read_request(body: bytes) -> Any:
    """Return the message of a `forward_backward`. Raises `ApiError` if it is none."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception:  # protobuf's
        raise ApiError(400, "the body is not a ForwardBackwardRequest; use the client tinker") from None
    return message


def steps_of(message: Any, sizes: Sizes) -> Steps:
    """Return the examples of a message. Raises `ApiError` if the model or the loss cannot take them."""
    if (loss := LOSSES.get(message.loss_fn)) is None:
        text = f"loss_fn {message.loss_fn[:80]!a} is not computed here; there are {', '.join(LOSSES)}"
        raise ApiError(400, f"{text}, and forward_backward_custom for other losses", param="loss_fn")
    given: dict[str, object] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        given[name] = value.number if value.HasField("number") else value.text
    if not message.data:
        raise ApiError(400, "there is no example in data", param="data")
    examples = []
    for number, datum in enumerate(message.data):
        try:
            examples.append(_example(datum, loss, sizes))
        except ApiError as error:
            raise ApiError(400, f"data[{number}]: {error}", param="data") from None
    return Steps(loss=loss, config=loss.config(given), examples=examples, backward=not message.forward_only)


def _example(datum: Any, loss: Loss, sizes: Sizes) -> Example:
    chunks = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise ApiError(400, f"a chunk of model_input is {kind or 'empty'}; only text can be trained here")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = torch.from_numpy(np.concatenate(chunks or [np.zeros(0, np.int32)]).astype(np.int64))
    if not 0 < len(tokens) <= sizes.tokens:
        raise ApiError(400, f"model_input has {len(tokens):,} tokens; from 1 to {sizes.tokens:,} can be computed here")
    names, given = {"target_tokens", *loss.inputs}, set(datum.loss_fn_inputs)
    if wrong := sorted(given - names) + sorted(names - given - loss.defaults.keys()):
        raise ApiError(400, f"loss_fn_inputs.{wrong[0][:80]}: this loss has the inputs {', '.join(sorted(names))}")
    found = {name: _tensor(one, name, len(tokens)) for name, one in datum.loss_fn_inputs.items()}
    targets = found.pop("target_tokens")
    if targets.is_floating_point() or any(
        not 0 <= x < sizes.vocabulary for one in (tokens, targets) for x in one.aminmax()
    ):
        raise ApiError(400, f"model_input and target_tokens are integers of a vocabulary of {sizes.vocabulary:,}")
    inputs = {
        name: torch.full(targets.shape, value, dtype=torch.float32, device="cpu")
        for name, value in loss.defaults.items()
    }
    inputs |= {name: one.float() for name, one in found.items()}
    for name, one in inputs.items():
        if one.shape != targets.shape or not one.isfinite().all():
            raise ApiError(400, f"loss_fn_inputs.{name} has another shape than target_tokens, or inf or nan")
    return Example(tokens=tokens, targets=targets, inputs=inputs)


def _tensor(message: Any, name: str, rows: int) -> Tensor:
    """Return a tensor `[rows]` or `[rows, k]`. Its shape is checked before a tensor is made."""
    shape = [*message.shape] or [rows]
    try:
        if len(shape) > 2 or shape[0] != rows or not 1 <= (*shape, 1)[1] <= _MOST_TARGETS:
            raise ValueError
        kind, csr, sparse = _KINDS[message.dtype], message.sparse_csr, message.HasField("sparse_csr")
        data = np.frombuffer(csr.values if sparse else message.dense, kind)
        places = [np.frombuffer(one, np.int64).tolist() for one in (csr.crow_indices, csr.col_indices) if sparse]
        found: Tensor = types.TensorData(data, kind, shape, *places).to_torch()
        return found
    except (ValueError, KeyError, RuntimeError):  # torch checks the columns
        text = f"loss_fn_inputs.{name} is no tensor of {rows:,} rows, one per token of model_input"
        raise ApiError(400, text) from None


def outputs_message(logprobs: Sequence[Tensor], loss: float) -> bytes:
    """Return the answer to `forward_backward`: the log probabilities of the targets of each example, float32."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
    for one in logprobs:
        data = one.numpy().tobytes()
        record = message.loss_fn_outputs.add(num_datums=1)
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=data,
                offsets=np.array([0, len(data)], np.int64).tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=list(one.shape[1:]),
            )
        )
    return bytes(message.SerializeToString())


def sample_message(
    samples: Sequence[Gathered],
    stopped: Sequence[bool],
    prompt: Sequence[TokenLogprob | None] | None,
    *,
    top_prompt: int,
    top: int,
    cached: int,
) -> bytes:
    """Return the answer to `asample`. `stopped`: False for samples that ended because of their length. `prompt`: its
    log probabilities. `top`, `top_prompt`: numbers of most probable tokens per position."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=cached)
    for one, stop in zip(samples, stopped, strict=True):
        logprobs = one.logprobs()
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stop else pb.STOP_REASON_LENGTH,
            tokens=np.array([token.id for token in one.tokens], np.int32).tobytes(),
            logprobs=_floats(logprobs),
        )
        if top:
            sequence.topk_sampled_logprobs.CopyFrom(_table(logprobs, top))
    if prompt is not None:
        message.prompt_logprobs = _floats(prompt)
        if top_prompt:
            message.topk_prompt_logprobs.CopyFrom(_table(prompt, top_prompt))
    return bytes(message.SerializeToString())


def _floats(logprobs: Sequence[TokenLogprob | None]) -> bytes:
    return np.array([np.nan if one is None else one.logprob for one in logprobs], np.float32).tobytes()


def _table(logprobs: Sequence[TokenLogprob | None], k: int) -> Any:
    tokens, values = np.zeros((len(logprobs), k), np.int32), np.full((len(logprobs), k), _NO_LOGPROB, np.float32)
    for row, one in enumerate(logprobs):
        for place, (token, value) in enumerate(() if one is None else one.top[:k]):
            tokens[row, place], values[row, place] = token, value
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=values.tobytes(), k=k, length=len(logprobs))
