"""`tenant serve`: the model and its adapters behind the API of OpenAI, on this machine."""

import logging
import signal
import sys
from contextlib import ExitStack

from symbiosis_priv.checkpoints.checkpoint import hub_name, resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.network.addresses import bound_address
from tenant.cli.options import Model, Remote, loading, takes
from tenant.endpoint.options import Serving, check_installed


@takes
def serve(*, model: Model, remote: Remote, options: Serving) -> None:
    """Serve the model and its adapters to clients of OpenAI's and Anthropic's APIs, with a page for chats at /. A model
    that classifies texts has /classify, /score and /rerank instead.

    Ctrl-C and SIGTERM let the answers in progress end.
    """
    check_installed(tinker=options.tinker is not None)
    folder = resolve(model)
    name = options.model_name(model, folder)
    adapters, keys = options.adapters(), options.keys()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with ExitStack() as opened:
        listener = opened.enter_context(options.listener())
        remote.check()
        with loading():
            from tenant.endpoint import serving

        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as usual, so that the session is closed
        with terminal.working(f"loading {name}"):
            service = opened.enter_context(
                serving.opened(model, remote.config(), name=name, adapters=adapters, options=options, clients=len(keys))
            )
        server = serving.server(service, listener, keys=keys, masking=remote.masking, options=options)
        address = bound_address(listener)
        served_at = f"http://{address}/{'classify' if service.labels else 'v1'}"
        terminal.say(f"serving {', '.join(one['id'] for one in service.models())} at {served_at}")
        for served, source in {name: folder, **adapters}.items():
            if (pinned := hub_name(source)) is not None:
                terminal.say(f"{served} is {'@'.join(pinned)}")
        if options.api_key_file is None and service.labels:
            terminal.say(f"key: {keys[0]}")
        elif options.api_key_file is None:  # the key is shown only here
            terminal.say(f"page: http://{address}/#key={keys[0]}")
            terminal.say(f"export OPENAI_BASE_URL=http://{address}/v1 OPENAI_API_KEY={keys[0]}")
            if options.tinker is not None:
                terminal.say(f"export TINKER_BASE_URL=http://{address} TINKER_API_KEY={keys[0]}")
        server.run()
