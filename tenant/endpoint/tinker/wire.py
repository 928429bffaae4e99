"""Tinker's protocol buffers: requests to train, which are checked against the model, and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.engine.requests import TokenLogprob
from tenant.endpoint.tinker.losses import Loss, loss_named

PROTOBUF = "application/x-protobuf"
_MOST_TARGETS = 128  # target tokens per position
_KINDS: Mapping[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
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
    loss = loss_named(message.loss_fn)
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


def checked_tokens(tokens: np.ndarray[Any, Any], sizes: Sizes, *, name: str) -> None:
    """Refuse token ids that the model does not have, and more of them than it can take. Raises `ApiError`."""
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= sizes.vocabulary:
        raise ApiError(400, f"{name} has no tokens, or one outside the vocabulary of {sizes.vocabulary:,}")
    if len(tokens) > sizes.tokens:
        raise ApiError(400, f"{name} has {len(tokens):,} tokens, and at most {sizes.tokens:,} can be computed here")


def _example(datum: Any, loss: Loss, sizes: Sizes) -> Example:
    chunks = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise ApiError(400, f"a chunk of model_input is {kind or 'empty'}; only text can be trained here")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(chunks or [np.zeros(0, np.int32)]).astype(np.int64)
    checked_tokens(tokens, sizes, name="model_input")
    names = {"target_tokens", *loss.inputs}
    if others := sorted(datum.loss_fn_inputs.keys() - names):
        raise ApiError(
            400, f"loss_fn_inputs.{others[0][:80]} is no input of this loss; it has {', '.join(sorted(names))}"
        )
    found = {name: _tensor(one, name, len(tokens)) for name, one in datum.loss_fn_inputs.items()}
    if missing := sorted(names - found.keys() - loss.defaults.keys()):
        raise ApiError(400, f"loss_fn_inputs has no {missing[0]}, which this loss needs")
    targets = found.pop("target_tokens")
    checked_tokens(targets.reshape(-1), Sizes(vocabulary=sizes.vocabulary, tokens=targets.size), name="target_tokens")
    if targets.dtype != np.int64:
        raise ApiError(400, "target_tokens are no integers")
    for name, default in loss.defaults.items():
        found.setdefault(name, np.full(targets.shape, default, np.float32))
    inputs = {name: torch.from_numpy(one.astype(np.float32)) for name, one in found.items()}
    for name, one in inputs.items():
        if one.shape != targets.shape or not one.isfinite().all():
            raise ApiError(400, f"loss_fn_inputs.{name} has another shape than target_tokens, or inf or nan")
    return Example(tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets), inputs=inputs)


def _tensor(message: Any, name: str, rows: int) -> np.ndarray[Any, Any]:
    """Return a tensor `[rows]` or `[rows, k]`. Its bytes are compared with its shape before it is made."""
    kind, shape = _KINDS.get(message.dtype), tuple(message.shape) or (rows,)
    wrong = ApiError(400, f"loss_fn_inputs.{name} is no tensor of {rows:,} rows, one per token of model_input")
    if kind is None or len(shape) > 2 or shape[0] != rows or not 1 <= (*shape, 1)[1] <= _MOST_TARGETS:
        raise wrong
    size = np.dtype(kind).itemsize
    if not message.HasField("sparse_csr"):
        if len(message.dense) != int(np.prod(shape)) * size:
            raise wrong
        return np.frombuffer(message.dense, kind).reshape(shape).copy()
    csr = message.sparse_csr
    if (
        len(csr.values) % size
        or len(csr.col_indices) * size != len(csr.values) * 8
        or len(csr.crow_indices) != 8 * (rows + 1)
    ):
        raise wrong
    starts, columns = np.frombuffer(csr.crow_indices, np.int64), np.frombuffer(csr.col_indices, np.int64)
    counts = np.diff(starts)
    if len(shape) != 2 or starts[0] != 0 or starts[-1] != len(columns) or (counts < 0).any():
        raise wrong
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise wrong
    dense = np.zeros(shape, kind)
    dense[np.repeat(np.arange(rows), counts), columns] = np.frombuffer(csr.values, kind)
    return dense


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sampled sequence. `stopped`: it did not end because of its length."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    stopped: bool


def sample_message(
    samples: Sequence[Sample], prompt: Sequence[TokenLogprob | None] | None, *, top_prompt: int, top: int, cached: int
) -> bytes:
    """Return the answer to `asample`. `prompt`: log probabilities of the prompt, or None; `top`, `top_prompt`: numbers
    of most probable tokens per position."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=cached)
    for one in samples:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if one.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.array(one.tokens, np.int32).tobytes(),
            logprobs=_floats(one.logprobs),
        )
        if top:
            sequence.topk_sampled_logprobs.CopyFrom(_table(one.logprobs, top))
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
