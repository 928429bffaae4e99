"""`provider.toml` as a file: one to begin with, and how it is read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from provider.config.schema import DEFAULT_LISTEN, ProviderConfig
from symbiosis_priv.certificates import check_name
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.system.toml import load_toml


def load(path: str | Path, *, whole: bool = False) -> ProviderConfig:
    """Read a provider.toml; relative paths are relative to the file.

    Args:
        whole: refuse a file that ends in the middle of a line. Half a file may be a valid one, with fewer limits.

    Raises:
        ConfigError: unreadable, an unknown or missing key, a value out of its range; the message names the key.
    """
    path = Path(path)
    config = load_toml(path, ProviderConfig, whole=whole)
    if config.usage.database is None:
        usage = msgspec.structs.replace(config.usage, database=path.with_suffix(".usage.sqlite"))
        config = msgspec.structs.replace(config, usage=usage)
    folder = path.parent / Path(config.model.checkpoint).expanduser()
    if not folder.is_dir():  # a name on the hub, or `checkpoint.resolve` says what is wrong
        return config
    model = msgspec.structs.replace(config.model, checkpoint=str(folder.resolve()))
    return msgspec.structs.replace(config, model=model)


def template(
    *,
    name: str = "alpha",
    roles: Sequence[Role] = ("executor",),
    checkpoint: str = "model",
    layers: str | None = None,
    listen: str = DEFAULT_LISTEN,
) -> str:
    """A provider.toml with these values, and every other key commented out with its default.

    Raises:
        ConfigError: a value that a provider.toml may not have.
    """
    check_name(name)  # of its key's file too
    text = _TEMPLATE.format(
        name=json.dumps(name),  # JSON's strings, and lists of them, are TOML
        roles=json.dumps(list(roles)),
        checkpoint=json.dumps(checkpoint, ensure_ascii=False),
        layers='# layers = "0-15"' if layers is None else f"layers = {json.dumps(layers)}",
        listen=json.dumps(listen),
        certificate=json.dumps(f"keys/{name}.pem"),
        key=json.dumps(f"keys/{name}.key"),
    )
    try:
        msgspec.convert(tomllib.loads(text), ProviderConfig, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return text


_TEMPLATE = """\
# symbiosis-priv provider serve --config provider.toml
# Paths are relative to this file. What is commented out shows its default.

name = {name}
listen = {listen:<23} # port 0 takes a free one
roles = {roles:<24} # one tenant is served in one role at a time
# log_level = "info"             # "debug" adds a line per request, without content

[model]
checkpoint = {checkpoint:<19} # a Hugging Face safetensors folder, or a name on the hub
# weight_bits = 10               # tenants pin the digest, which depends on it
# cache = "cache"                # quantised weights; the user's cache folder if left out
{layers:<32} # the first and the last layer that are served; all of them if left out; "auto" for
                                 # those that the federation lacks most

[tls]                            # made by `symbiosis-priv keys`
certificate = {certificate}
key = {key}
tenant_authority = "keys/authority.pem"
# revoked = "keys/revoked.txt"   # made by `symbiosis-priv keys revoke`

[limits]
# max_rows = 16384               # rows of one request
# max_payload_mib = 256          # one request's or one reply's matrix
# max_inflight_mib = 2048        # all matrices in the gateway; a quarter of it for small requests
# max_inflight_mib_per_tenant = 1024
# max_connections = 256
# max_connections_per_tenant = 64
# max_handshakes = 1024          # not authenticated yet; one more closes the oldest of the busiest network
# handshake_share = 0.25         # of one core's time; whoever connects beyond that waits
# handshake_share_serving = 0.05 # and while products are answered
# min_transfer_mib_per_s = 1.0   # of a large matrix, either way
# handshake_timeout_s = 10.0
# frame_timeout_s = 60.0         # to finish a frame once begun
# idle_timeout_s = 900.0         # between two frames
# request_timeout_s = 120.0      # for the executor to answer
# stop_timeout_s = 10.0          # for requests in flight when stopping

[executor]
# endpoint = "inproc://executor" # or ipc:///run/symbiosis-priv/executor.sock: a process of its own
# device = "cpu"                 # or "cuda"
# kernel = "auto"                # the fastest exact one for each shape
# threads = 8                    # torch threads
# warm_up = true                 # load all layers in idle moments; false: each when it is first asked for
# ranks = 1                      # processes that hold the model together, each its shard
# sharding = "auto"              # "columns" or "gathered": how they share a product out
# group_timeout_s = 30.0         # how long they wait for one that does not answer
# hang_timeout_s = 60.0          # a process that says nothing for so long is started again
# float = false                  # float products too, for tenants with masking = "paper-pool"
# float_memory_mib = 2048        # their weights in memory; the least recently used layers go first

[scheduler]
# policy = "opportunistic"       # or "none", "lockstep": to compare with
# few_rows = 16                  # a forward request of so many rows goes ahead if its tenant does not train
# inference_weight = 4.0         # of the executor, beside fine-tuning
# slice_ms = 20.0                # larger products are cut: nobody waits longer for one of somebody else
# max_batch_rows = 16384         # rows of one product
# wait_share = 0.5               # of its own product's time, a request waits for company at most
# max_wait_ms = 5.0              # and never longer than this
# lockstep_wait_ms = 100.0       # for the slowest, with policy "lockstep"

[quota]                          # of each tenant; read again on SIGHUP or when this file changes
# requests_per_s = 1000.0        # no limit if left out, like the others here
# rows_per_s = 100000.0
# giga_multiply_adds_per_s = 50.0   # the work that requests cause, effects included
# max_rows_in_flight = 65536

# [tenants.alice]                # one tenant's own; or [tenants."alice@sha256:0123456789abcdef"]
# weight = 2.0                   # twice the share of the others when all want more than there is

[usage]
# database = "provider.usage.sqlite"   # what each tenant has used: `symbiosis-priv provider usage`
# max_unwritten_s = 3600.0       # tenants are served for so long while it cannot be written, and then told to wait

[metrics]
# listen = "127.0.0.1:9464"      # Prometheus, health, readiness, `provider top`; nothing listens if left out
# hosts = ["gpu1.internal"]      # names by which operators ask for it, as Prometheus' targets; addresses need none

[registry]
# announce = ["registry.example:7500"]   # registries that list this executor; nobody is told if left out
# authority = "keys/federation.pem"      # who has issued this provider's certificate, with its operator's name
# revoked = "keys/revoked.txt"
# address = "alpha.example:7401" # as tenants reach it; listen if left out
# capacity = 1.0                 # what it can do, relative to others
# capacity_layers = 16           # how many it has room for, with layers = "auto"
# lifetime_s = 900.0             # how long an announcement counts; it is renewed after a third of that
"""
