"""Gathers the events of a request, for callers that need the whole answer."""

from concurrent.futures import Future

from tenant.endpoint.engine.requests import Done, Event, Failed, Started, Token, TokenLogprob


class Gathered:
    """The sink of one request. `done` gets `Done` or the error; then `tokens` are all tokens, a stop token included."""

    def __init__(self) -> None:
        self.prompt: tuple[TokenLogprob | None, ...] = ()
        self.tokens: list[Token] = []
        self.done: Future[Done] = Future()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self.prompt = event.prompt_logprobs
        elif isinstance(event, Token):
            self.tokens.append(event)
        elif isinstance(event, Failed):
            self.done.set_exception(event.error)
        elif isinstance(event, Done):
            self.tokens += [event.stop] if event.stop is not None else []
            self.done.set_result(event)

    def logprobs(self) -> list[TokenLogprob]:
        """Return the log probabilities of all tokens; empty if none were requested."""
        return [one.logprob for one in self.tokens if one.logprob is not None]
