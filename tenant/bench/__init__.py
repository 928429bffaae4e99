"""`symbiosis-priv bench`: measures the cost of split execution (docs/benchmarks.md).

Each module has the command of its benchmark, its goals and its measurement; `pyproject.toml` lists the commands, so
that `--help` does not wait for torch. Read in this order:

report            the file of --json, its tables, and goals for its figures; `bench report`
measured_models   the measured models, providers of them, and a tenant process
processes         child processes, and what processes cost
options           options of the commands, and `benchmark`, which makes a command of a function that measures
steps_and_tokens  `bench step` and `bench token`
masked_linear     `bench linear`
link, network     `bench network` (over an emulated link) and `bench bytes`
many_tenants      `bench provider`
many_tasks        `bench tasks`
many_requests     `bench endpoint`
real_size         `bench size`
many_adapters     `bench adapters`
"""

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the cost of split execution, compared with whole-model execution in the same run.",
)
