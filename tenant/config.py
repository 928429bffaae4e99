"""`RemoteConfig`: the one argument that turns a Hugging Face model into a split one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.trust import QUANT_METHOD
from tenant.connections.channel import Wiretap
from tenant.masking.registry import DEFAULT_MASKING, registered, scheme_named
from tenant.masking.scheme import SessionScheme
from tenant.verifier import DEFAULT_COLUMNS


@register_quantization_config(QUANT_METHOD)
@dataclass(kw_only=True)
class RemoteConfig(QuantizationConfigMixin):
    """How to split a model. Pass it as `quantization_config` to `from_pretrained`.

    Args:
        federation: path of `federation.toml`. Not needed for "simulate".
        masking: the scheme's name, and so who can read your rows (`tenant/masking/`):
            "pad" nobody, unless the executor and every helper collude (default);
            "local" nobody at all, but the tenant needs the full checkpoint and does the providers' work ahead of time;
            "none" every executor; for providers you trust;
            "paper-pool" every executor, in practice (opt-in);
            "simulate" nobody: the same arithmetic on this machine, no providers.
        weight_bits: integer bits of a weight, for "simulate" only; otherwise the federation file says it.
        checkpoint: the full base checkpoint, when the model's own folder holds only the tenant's tensors. It is read
            once, to make the verification keys.
        deadline_s: how long one request may take in seconds, reconnecting to a restarted provider included.
        pool_memory_mib: memory for pads drawn ahead.
        row_bucket: row counts are rounded up to a multiple of this before anything is sent, so that providers learn
            batch and prompt sizes only that finely. Costs the added rows (rule 9 of the threat model).
        verify_columns: m, of the keys that say who lied; whether something is wrong does not depend on them.
        cache: folder for quantised weights and verification keys; the user's cache folder if None.
        paper_pool_size: noises per layer of "paper-pool".
        paper_noise_scale: their standard deviation as a multiple of the activations'.
        status: a file that is kept up to date with how each provider is doing, for `symbiosis-priv federation top
            --status`; it holds names, states and counts, and is readable by you alone.
        wiretap: an observer of every frame on the wire, for tests and reviewers.
        surface: how messages name these options: as arguments in "python", or as flags of the "command line".
    """

    federation: str | Path | None = None
    masking: str = DEFAULT_MASKING
    weight_bits: int | None = None
    checkpoint: str | Path | None = None
    deadline_s: float = 120.0
    pool_memory_mib: int = 256
    row_bucket: int = 1
    verify_columns: int = DEFAULT_COLUMNS
    cache: str | Path | None = None
    paper_pool_size: int = 4
    paper_noise_scale: float = 16.0
    status: str | Path | None = None
    wiretap: Wiretap | None = None
    surface: Literal["python", "command line"] = "python"
    quant_method: str = QUANT_METHOD  # type: ignore[assignment]  # by which transformers finds the quantizer

    def __post_init__(self) -> None:
        import tenant.hf  # noqa: F401  # registers the quantizer that transformers will look for

        remote = bool(scheme_named(self.masking).roles)
        alone = " or ".join(repr(scheme.name) for scheme in registered() if not scheme.roles)
        if remote and self.federation is None:
            raise ConfigError(
                f"masking = {self.masking!r} needs federation = 'federation.toml' (masking = {alone} does not)"
            )
        if remote and self.weight_bits is not None:
            raise ConfigError(f"weight_bits is for masking = {alone}; the federation file says it otherwise")
        if self.status is not None and not isinstance(scheme_named(self.masking), SessionScheme):
            raise ConfigError(f"status is for sessions with verified providers; masking = {self.masking!r} has none")
        lowest = {"deadline_s": 0.1, "pool_memory_mib": 0, "row_bucket": 1, "verify_columns": 8, "paper_pool_size": 1}
        for name, low in lowest.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} = {getattr(self, name)} is below {low}")

    def option(self, name: str, example: str | None = None) -> str:
        """What the user would write to set an option, to `example` for instance."""
        if self.surface == "python":
            return f"RemoteConfig({name}={'...' if example is None else repr(example)})"
        return f"--{name.replace('_', '-')}" + (f" {example}" if example else "")

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteConfig:
        """transformers copies its configurations; what is used must be the very object that the user passed."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """What may be written into a folder: a name. Paths, and who masks how, are the tenant's own business."""
        return {"quant_method": self.quant_method}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> NoReturn:
        """Refused: transformers calls this with what a checkpoint's config.json says (rule 10)."""
        raise CheckpointError(
            f"a quantization_config of {QUANT_METHOD} comes from a folder, and a checkpoint does not decide how it is "
            f"masked and verified; delete that entry from its config.json, and pass RemoteConfig(...) yourself"
        )
