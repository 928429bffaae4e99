"""`symbiosis-priv tenant` with its commands finetune, generate, chat, serve, prepare and check."""

import typer

from tenant.cli.chat import chat
from tenant.cli.check import check
from tenant.cli.finetune import finetune
from tenant.cli.generate import generate
from tenant.cli.prepare import prepare
from tenant.cli.serve import serve

app = typer.Typer(no_args_is_help=True, help="Fine-tune adapters and generate with a base model that providers serve.")
for command in (finetune, generate, chat, serve, prepare, check):
    app.command()(command)
