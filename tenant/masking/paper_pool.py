"""The paper's own masking (Symbiosis §3.8), kept so that it can be measured and attacked. Do not rely on it.

Each (layer group, direction) has a few float Gaussian noise rows. The executor computes their effects once, without the
bias, so it knows all noise rows. Each row is sent as `x + n` for one noise row n, and the tenant subtracts `n @ W.T`
from the answer. Four attacks recover the rows: subtraction of candidates, differencing, projection, and the rounding of
float32 (docs/threat-model.md). Float answers cannot be verified exactly. `masking = "pad"` resists all four attacks and
verifies answers.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import expand, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.errors import ConfigError, NonFiniteError
from symbiosis_priv.federation import Federation
from symbiosis_priv.limits import DEFAULT_RING_BITS
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask
from tenant.core.pads import SessionSecret
from tenant.masking.backend import Backend, Product
from tenant.masking.scheme import BackendScheme
from tenant.options import Options
from tenant.preparation.opening import Opening
from tenant.preparation.prepared import Preparation

WARNING = (
    "masking = 'paper-pool' reuses a few float noises that the executor knows: it can read every row "
    "(`symbiosis-priv threat-model` shows how), and its answers are not verified. Use masking = 'pad'."
)


@dataclass(frozen=True, kw_only=True)
class PaperPoolOptions:
    """The number of noise rows per (layer group, direction), at least 1, and their standard deviation as a multiple of
    the activations', above 0. Otherwise raises `ConfigError`."""

    pool_size: int = 4
    noise_scale: float = 16.0

    def __post_init__(self) -> None:
        if not self.pool_size >= 1:
            raise ConfigError(f"pool_size = {self.pool_size} is below 1")
        if not 0 < self.noise_scale < math.inf:  # without noise, rows would go out in clear
            raise ConfigError(f"noise_scale = {self.noise_scale}: write a number above 0")


class PaperPool(BackendScheme):
    """Broken: an executor that attacks recovers the rows. Right to a floating-point bound, and not verified."""

    name = "paper-pool"
    summary = "every executor, in practice (opt-in)"
    roles = frozenset({"executor"})
    hides_from = frozenset()
    assumption = "the executor does not attack"
    error = "to float32 rounding"
    verified = False
    options_type = PaperPoolOptions

    def open(self, opening: Opening) -> Backend:
        options = opening.options
        if opening.ring_bits != DEFAULT_RING_BITS:
            raise ConfigError(
                f"masking = {self.name!r} sends float32 rows, not integers of {opening.ring_bits} bits: set "
                f"RemoteConfig(ring_bits={DEFAULT_RING_BITS}), or choose another masking"
            )
        pool = self.read_options(options.masking_options)
        return PaperPoolBackend(opening.federation, opening.preparation, pool, options)


class PaperPoolBackend(Backend):
    """A float path with a reused pool of noise. It uses the first executor of the file that has all layers, because
    each that is asked learns the noise. Raises `ConfigError` if there is none."""

    def __init__(
        self, federation: Federation, preparation: Preparation, pool: PaperPoolOptions, options: Options
    ) -> None:
        executor = next((peer for peer in federation.executors if peer.layers is None), None)
        if executor is None:
            raise ConfigError(
                "masking = 'paper-pool' asks one executor for all layers, and each of this federation's is listed with "
                "a part of them: add one without `layers`, or choose masking = 'pad', which goes from one to the next"
            )
        warnings.warn(WARNING, UserWarning, stacklevel=2)
        self.facts = preparation.facts
        self._options, self._row_bucket = pool, options.row_bucket
        self._secret = SessionSecret()
        self._seed = self._secret.seed_for("paper-pool")
        self._pools: dict[tuple[int, Direction], tuple[Tensor, Tensor]] = {}
        self._channel = Channel(
            executor,
            context=federation.tls_context(executor),
            model_digest=federation.model_digest,
            deadline_s=options.deadline_s,
            wiretap=options.wiretap,
        )

    def compute(self, product: Product) -> None:
        index, direction, inputs, outputs, counts = product
        if counts is not None:
            raise ConfigError(
                "masking = 'paper-pool' has no products by expert; choose experts = 'all', or another masking"
            )
        rows = torch.cat([part.detach() for part in inputs], dim=1)
        if not len(rows):
            return
        if not bool(torch.isfinite(rows).all()):
            raise NonFiniteError
        x = rows.to(device="cpu", dtype=torch.float32)
        if (index, direction) not in self._pools:
            spread = self._options.noise_scale * (float(x.double().square().mean().sqrt()) or 1.0)
            words = self._words(index, direction, "noise", rows=self._options.pool_size, width=2 * x.shape[1])
            noise = (gaussian(words) * spread).to(torch.float32)
            self._pools[index, direction] = noise, self._ask(index, direction, noise, "float_bias_free")
        noise, effect = self._pools[index, direction]
        x = padded(x, bucket=self._row_bucket)
        words = self._words(index, direction, "pick", rows=len(x), width=1)
        picks = (words[:, 0].to(torch.int64) & 0xFFFFFFFF) % self._options.pool_size
        # the online request adds the bias; only the request for the noise's product does not
        answer = self._ask(index, direction, x + noise[picks], "float" if direction == FORWARD else "float_bias_free")
        y = (answer - effect[picks])[: len(rows)].split([out.shape[1] for out in outputs], dim=1)
        for part, out in zip(y, outputs, strict=True):
            out.copy_(part)

    def close(self) -> None:
        self._channel.close()

    def _words(self, index: int, direction: Direction, purpose: str, *, rows: int, width: int) -> Tensor:
        stream = f"{purpose} {self.facts[index].entry.name}"
        first = self._secret.burn(group_name=stream, direction=direction, rows=rows)
        key = mask_key(self._seed, group_name=stream, direction=direction)
        return expand(key, first_row=first, rows=rows, width=width)

    def _ask(self, index: int, direction: Direction, rows: Tensor, arithmetic: wire.Arithmetic) -> Tensor:
        welcome = self._channel.welcome()
        facts = self.facts[index]
        widest = wire.FLOAT32.size(1, max(facts.entry.inputs, facts.entry.stacked_outputs))
        parts = []
        for part in rows.split(max(1, min(welcome.max_rows, welcome.max_payload // widest))):
            request = wire.Execute(
                nonce=fresh_nonce(), group=index, direction=direction, arithmetic=arithmetic, rows=len(part)
            )
            sent = mask(part, UNMASKED_BY_CHOICE)  # a float noise row is not a one-time pad
            parts.append(self._channel.request(request, sent, outputs=facts.outputs(direction)))
        return torch.cat(parts)


def padded(rows: Tensor, *, bucket: int) -> Tensor:
    """Append rows of zeros to `rows`, up to a multiple of `bucket`."""
    missing = -len(rows) % bucket
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def gaussian(words: Tensor) -> Tensor:
    """Make standard normal float64 `[r, d]` from uniform int32 words `[r, 2 d]` (Box-Muller)."""
    uniform = (words.to(torch.float64) + 2.0**31 + 0.5) / 2.0**32
    radius, angle = uniform.chunk(2, dim=1)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)
