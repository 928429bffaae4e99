"""`symbiosis-priv tenant`: finetune, generate, prepare, check."""

import typer

from tenant.cli.check import check
from tenant.cli.finetune import finetune
from tenant.cli.generate import generate
from tenant.cli.prepare import prepare

app = typer.Typer(no_args_is_help=True, help="Fine-tune adapters and generate with a base model that providers serve.")
for command in (finetune, generate, prepare, check):
    app.command()(command)
