"""Experiment trackers, by their names in transformers. A tracker sees losses and options, never data."""

from collections.abc import Sequence

from transformers.integrations import get_reporting_integration_callbacks, integration_utils

from symbiosis_priv.errors import ConfigError


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers can be used, before the model is loaded. Raises `ConfigError`: transformers does not know a
    tracker, or the tracker's package is not installed."""
    known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            raise ConfigError(f"--report-to {name} is unknown; choose from {', '.join(known)}")
        (callback,) = get_reporting_integration_callbacks([name])
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"--report-to {name}: {error}") from error
