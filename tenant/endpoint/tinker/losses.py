"""Tinker's losses. Each is a sum over the tokens of one example, so it does not depend on other examples."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple

from torch import Tensor

from tenant.endpoint.api.errors import ApiError

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


class Loss(NamedTuple):
    """One loss, of the log probabilities of the targets, the inputs, and the options. `inputs`: names of the inputs
    besides `target_tokens`. `defaults`: values of inputs that may be missing."""

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...]
    defaults: Mapping[str, float] = {}
    options: Mapping[str, float] = {}

    def config(self, given: Mapping[str, object]) -> dict[str, float]:
        """Return the options with their defaults. Raises `ApiError` for an option that the loss does not have."""
        for name, value in given.items():
            if name not in self.options or not isinstance(value, int | float) or not isfinite(value):
                known = ", ".join(self.options) or "none"
                text = f"loss_fn_config.{name[:80]} is no option of this loss with a number; it has {known}"
                raise ApiError(400, text)
        return {**self.options, **{name: float(str(value)) for name, value in given.items()}}


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _ratio(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    ratio = (logprobs - inputs["logprobs"]).exp()
    return ratio, ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    (ratio, clipped), advantages = _ratio(logprobs, inputs, config), inputs["advantages"]
    return -(ratio * advantages).minimum(clipped * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    _, clipped = _ratio(logprobs, inputs, config)
    return -(clipped.detach() * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    squares = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * squares).sum()


_SAMPLED = ("logprobs", "advantages")
_CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES = {
    "cross_entropy": Loss(compute=_cross_entropy, inputs=("weights",), defaults={"weights": 1.0}),
    "importance_sampling": Loss(compute=_importance_sampling, inputs=_SAMPLED),
    "ppo": Loss(compute=_ppo, inputs=_SAMPLED, options=_CLIPPED),
    "cispo": Loss(compute=_cispo, inputs=_SAMPLED, options=_CLIPPED),
    "dro": Loss(compute=_dro, inputs=_SAMPLED, options={"beta": 0.05}),
}
