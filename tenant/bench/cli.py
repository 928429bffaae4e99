"""`symbiosis-priv bench`: what the split costs, beside what it replaces."""

from __future__ import annotations

import typer

from tenant.bench.commands.bits import bits
from tenant.bench.commands.kernels import gpu, kernels
from tenant.bench.commands.linear import linear
from tenant.bench.commands.network import network
from tenant.bench.commands.report import report
from tenant.bench.commands.scale import scale
from tenant.bench.commands.start import start
from tenant.bench.commands.step import step, token
from tenant.bench.commands.tenants import provider

app = typer.Typer(no_args_is_help=True, help="Measure what the split costs, beside what it replaces, in one run.")
for command in (step, token, start, linear, network, kernels, gpu, provider, bits, scale, report):
    app.command()(command)
