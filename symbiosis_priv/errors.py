"""The errors that this project raises on purpose.

All of them derive from `SymbiosisError`; a branch of the tree stands for one kind of trouble. Each message says what
happened and what to do next. No message contains activations, masks, scales or keys.
"""

_NEXT_STEP = {
    "bad_frame": "run the same release of symbiosis-priv on both sides",
    "bad_request": "run the same release of symbiosis-priv on both sides",
    "too_large": "send fewer rows at once (smaller batches), or ask its operator for higher [limits]",
    "wrong_model": "pin your own copy's digest (`symbiosis-priv federation init --model`) and use a provider of it",
    "role_refused": "use another provider for this role, or ask its operator; no tenant is served in both roles",
    "not_served": "use a provider that serves these layers (`symbiosis-priv federation check` shows which); float "
    "products are for masking = 'paper-pool' only: choose masking = 'pad', or ask its operator to set float_memory_mib "
    "under [executor]",
    "revoked": "for a new certificate, run `symbiosis-priv keys request` and have its operator sign the request",
    "refused": "correct the descriptor and announce it again",
    "busy": "try again later",
    "stopping": "try again once its operator has started it",
    "internal": "ask its operator",
}
"""The advice for a tenant about each `wire.ErrorCode`."""


class SymbiosisError(Exception):
    """Base class of all errors of this project."""


class ConfigError(SymbiosisError, ValueError):
    """A configuration file or option is wrong; the message names the key and the fix."""


class FinishedError(ConfigError):
    """The run to resume has made all its steps."""


class RoleConflictError(ConfigError):
    """An operator would be executor and helper of the same rows, and could unmask them (rule 8)."""


class StorageError(SymbiosisError, OSError):
    """A file could not be written: full disk, read-only folder. A file that was to be replaced is unchanged."""


class CertificateError(SymbiosisError):
    """A certificate is missing, expired, of the wrong kind, or not the pinned one."""


class DescriptorError(SymbiosisError):
    """A descriptor from a registry is not valid; it is dropped."""


class CheckpointError(SymbiosisError):
    """A checkpoint lacks tensors, is not the model that the federation pins, or has a damaged packed copy."""


class UnsupportedModelError(SymbiosisError):
    """The architecture cannot be split; the message names the module."""


class UnsupportedMethodError(SymbiosisError):
    """The method needs base weights in every step, or merges adapters into them. The tenant has no base weights."""


class TaskError(SymbiosisError, ValueError):
    """A task is unknown or in use, its adapter does not fit the memory limit, or a batch does not fit its tasks."""


class OverloadedError(SymbiosisError):
    """The endpoint has too many requests waiting; the message says how many. Try again later."""


class NonFiniteError(SymbiosisError, ValueError):
    """An activation or gradient holds inf or nan. Raised before a byte is sent."""

    def __init__(self) -> None:
        super().__init__(
            "an activation or gradient holds inf or nan; nothing was sent. If training diverges, "
            "start again with a lower learning rate; a bfloat16 model may overflow in float16"
        )


class RangeError(SymbiosisError, ValueError):
    """A tensor has the wrong shape or dtype, or a layer is too wide for the ring's range."""


class BurntRowError(SymbiosisError):
    """A mask row would be used a second time, or a mask outlived the process that drew it."""


class RankLostError(SymbiosisError):
    """A rank of a sharded executor did not take part; the message names it. The group is started again."""


class DeviceLostError(SymbiosisError):
    """The device cannot compute any more until a new process uses it: CUDA answers every call with an error."""


class TransportError(SymbiosisError):
    """The bytes did not arrive. Sending the same bytes again is safe."""


class ConnectionLostError(TransportError):
    """The peer closed or refused the connection."""


class DeadlineExceededError(TransportError, TimeoutError):
    """No answer within the deadline; the message names the option that raises it."""


class ProtocolError(SymbiosisError):
    """A frame breaks the protocol: wrong type, wrong count, truncated, or not an answer to its request."""


class FrameTooLargeError(ProtocolError):
    """A frame announces more bytes than the limit. No memory was allocated for it."""


class ProviderError(SymbiosisError):
    """A provider answered with an error. The message shows the provider's own text, `detail`, which is not trusted."""

    def __init__(self, *, code: str, provider: str, detail: str) -> None:
        next_step = f"; {_NEXT_STEP[code]}" if code in _NEXT_STEP else ""
        super().__init__(f"provider {provider!r} answered {code}: {one_line(detail)}{next_step}")
        self.code = code
        self.provider = provider


class VerificationError(SymbiosisError):
    """An answer or an effect is not the correct product. The message names the provider, so that the user can ask its
    operator. Nothing about the failure is sent to the provider."""

    def __init__(self, *, provider: str, group_name: str, direction: str, what: str) -> None:
        super().__init__(
            f"{what} of provider {provider!r} for {group_name} ({direction}) is not the product of the pinned weights; "
            f"the provider is quarantined for this session. Remove it from the federation file or ask its operator."
        )
        self.provider = provider
        self.group_name = group_name
        self.direction = direction


class UncoveredError(SymbiosisError):
    """No executor of the federation serves some layers of the model; the message says which."""


class QuarantinedError(SymbiosisError):
    """Every provider of a role has been quarantined; nothing more is sent."""


def one_line(text: str) -> str:
    """`text` without line breaks or escape sequences, because parts of it may come from a provider."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
