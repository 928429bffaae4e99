"""Tinker's losses. Each is a sum over the tokens of one example, so it does not depend on other examples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from torch import Tensor

from tenant.endpoint.api.errors import ApiError

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss.

    Args:
        compute: returns the loss for the log probabilities of the targets, the inputs, and the options.
        inputs: names of the inputs besides `target_tokens`.
        defaults: values of inputs that may be missing.
        options: the options, with their default values.
    """

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, float] = field(default_factory=dict)

    def config(self, given: Mapping[str, object]) -> dict[str, float]:
        """Return the options with their defaults. Raises `ApiError` for an option that the loss does not have."""
        for name, value in given.items():
            if name not in self.options or not isinstance(value, int | float) or not isfinite(value):
                known = ", ".join(self.options) or "none"
                raise ApiError(
                    400, f"loss_fn_config.{name[:80]} is no option of this loss with a number; it has {known}"
                )
        return {**self.options, **{name: float(str(value)) for name, value in given.items()}}


def loss_named(name: str) -> Loss:
    """Return a loss. Raises `ApiError` for another name."""
    if (found := LOSSES.get(name)) is None:
        raise ApiError(
            400,
            f"loss_fn {name[:80]!a} is not computed here; there are {', '.join(LOSSES)}, and forward_backward_custom "
            f"for other losses",
            param="loss_fn",
        )
    return found


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -(ratio * advantages).minimum(clipped * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp()
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
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
