"""Makes methods known to PEFT.

`register_peft_method` takes only names that `PeftType` has, and Python's enums cannot be extended by public means. So
`add` first inserts the member as the enum's metaclass does.
"""

from typing import Any

from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_MIXED_MODEL_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import register_peft_method

from symbiosis_priv.errors import ConfigError


def add(name: str, *, config: type[PeftConfig], tuner: type[BaseTuner]) -> None:
    """Add a method to PEFT. The names of its parameters start with `tuner.prefix`. Raises `ConfigError` if PEFT has a
    method of this name."""
    member = name.upper()
    if member in PeftType.__members__:
        raise ConfigError(f"PEFT has a method {member} of its own; install peft 0.21, which has none")
    peft_type(member)
    register_peft_method(name=name, config_cls=config, model_cls=tuner, prefix=tuner.prefix)


def peft_type(member: str) -> PeftType:
    """Return a member of `PeftType`. Makes it if there is none."""
    if member not in PeftType.__members__:
        new = str.__new__(PeftType, member)
        new._name_ = new._value_ = member
        new.__objclass__ = PeftType  # type: ignore[attr-defined]
        new._sort_order_ = len(PeftType)  # type: ignore[attr-defined]
        PeftType._member_names_.append(member)
        PeftType._member_map_[member] = PeftType._value2member_map_[member] = new
        type.__setattr__(PeftType, member, new)
    return PeftType[member]


def replace(kind: PeftType, tuner: type[BaseTuner]) -> None:
    """Make PEFT use `tuner`, a subclass of PEFT's own class, for one of PEFT's methods."""
    for mapping in (PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_MIXED_MODEL_MAPPING):
        known: Any = mapping.get(kind)
        if known is not None:
            assert issubclass(tuner, known)
            mapping[kind] = tuner
