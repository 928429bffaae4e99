"""Experiment trackers, by the names that transformers knows them by. They see losses and options, never data."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.integrations import get_reporting_integration_callbacks, integration_utils

from symbiosis_priv.errors import ConfigError


def check_trackers(names: Sequence[str]) -> None:
    """Find out before anything takes long.

    Raises:
        ConfigError: transformers does not know one, or its package is not installed.
    """
    known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            raise ConfigError(f"--report-to {name} is unknown; choose from {', '.join(known)}")
        (callback,) = get_reporting_integration_callbacks([name])
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"--report-to {name}: {error}") from error
