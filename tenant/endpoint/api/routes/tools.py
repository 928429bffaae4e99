"""Calls of tools: finds calls in the text of an answer, and makes grammars that force valid calls."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.api.bodies import Function
from tenant.endpoint.api.running import Json, new_id
from tenant.endpoint.engine.answer import overlap_length

# the white space of calls in the chats that models are trained on
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TAG, _END = "<tool_call>", "</tool_call>"


def tagged(template: str) -> bool:
    """Returns True if models with this chat template write calls between tags, False if they write only JSON. Raises
    `ConfigError` if the template does not support tools, or uses another format."""
    if "tools" in template and "<function=" not in template:
        if _TAG in template:
            return True
        if '"name"' in template and ('"parameters"' in template or '"arguments"' in template):
            return False
    raise ConfigError("this model's chat template has no tools, or calls them in a format that is not known here")


def closed(schema: Any) -> Any:
    """Return a JSON schema whose objects have no properties but those that it names, as `strict: true` promises. A
    schema that says `additionalProperties` is left as it is, and so are the parts of `allOf`, which would exclude each
    other's properties."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(found.get(key), dict):
            found[key] = {name: closed(one) for name, one in found[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(found.get(key), list):
            found[key] = [closed(one) for one in found[key]]
    for key in ("items", "additionalProperties"):
        found |= {key: closed(found[key])} if key in found else {}
    is_object = "object" in (found.get("type") or ()) or "properties" in found
    if is_object and not {"additionalProperties", "unevaluatedProperties", "allOf", "$ref"} & found.keys():
        found["additionalProperties"] = False
    return found


def calling(tools: Sequence[Function], template: str, *, forced: bool, parallel: bool = True) -> str:
    """Return the grammar of an answer with calls of these functions, as the chat template writes calls. `forced`: the
    answer is one call; else it is text with calls, or without tags, a text or a call. `parallel`: it may have several
    calls. Raises `ConfigError` as `tagged` does."""
    in_tags = tagged(template)
    before, after = ("\n", "\n</tool_call>") if in_tags else ("", "")
    key = "arguments" if in_tags or '"parameters"' not in template else "parameters"
    calls = f"({' | '.join(f'call_{i}' for i in range(len(tools)))})"
    if not in_tags:
        rules = [f"start: {calls}"] if forced else [f"start: {calls} | TEXT", "TEXT: /\\s*([^\\s{\\[](.|\\n)*)?/"]
    elif forced:
        rules = [f'start: "{_TAG}" {calls}']
    else:
        rules = [f"start: (begin {calls})* TEXT" if parallel else f"start: begin {calls} | TEXT"]
        rules += [f'begin[lazy]: TEXT "{_TAG}"', "TEXT: /(.|\\n)*/"]
    for i, tool in enumerate(tools):
        begin, end = json.dumps(f'{before}{{"name": "{tool.name}", "{key}": '), json.dumps(f"}}{after}")
        parameters = {"type": "object", **(tool.parameters or {})}
        schema = json.dumps({"x-guidance": _AS_WRITTEN, **(closed(parameters) if tool.strict else parameters)})
        rules += [f"call_{i}: {begin} arguments_{i} {end}", f"arguments_{i}: %json {schema}"]
    return "\n".join(rules)


class ToolText:
    """Separates the calls of an answer from its text. `tagged`: calls are between `<tool_call>` and `</tool_call>`;
    otherwise the whole text is JSON. `names`: the tools of the request. A call of another tool is text."""

    def __init__(self, *, tagged: bool, names: set[str]) -> None:
        self._tagged = tagged
        self._names = names
        self._held = ""
        self._calling = False

    def add(self, text: str) -> str:
        """Add text. Returns the text that is now known not to be part of a call."""
        self._held += text
        if self._calling:
            return ""
        if self._tagged:
            at = self._held.find(_TAG)
            self._calling = at >= 0
            certain = at if at >= 0 else len(self._held) - overlap_length(self._held, _TAG)
        else:
            begins = self._held.lstrip()[:1]
            self._calling = begins in ("{", "[") and begins != ""
            certain = 0 if self._calling or not begins else len(self._held)
            self._tagged = self._tagged or certain > 0  # after other text, JSON is not a call
        found, self._held = self._held[:certain], self._held[certain:]
        return found

    def end(self) -> tuple[str, list[Json]]:
        """Return the rest of the text, and the calls."""
        bodies = _between_tags(self._held) if _TAG in self._held else [self._held]
        calls = []
        try:
            for body in bodies if self._calling else ():
                found = json.loads(body)
                for one in found if isinstance(found, list) else [found]:
                    if one["name"] not in self._names:
                        raise KeyError(one["name"])
                    given = arguments_of(one["arguments"] if "arguments" in one else one["parameters"])
                    # `json.loads` reads 1e999 as inf
                    function = {"name": one["name"], "arguments": json.dumps(given, allow_nan=False)}
                    calls.append({"id": new_id("call"), "type": "function", "function": function})
        except (ValueError, TypeError, KeyError, RecursionError):
            calls = []
        return ("", calls) if calls else (self._held, [])


def arguments_of(given: Any) -> dict[str, Any]:
    """Return the arguments of a call: an object, or JSON of one. Models also write "" and null for none. Raises
    `ValueError` for other values."""
    found = json.loads(given.strip() or "{}") if isinstance(given, str) else given
    if not isinstance(found, dict | None):
        raise ValueError
    return found or {}


def _between_tags(text: str) -> Iterator[str]:
    """Yield the texts between tags. The last may have no end tag. (A regular expression could take quadratic time.)"""
    end = 0
    while (begin := text.find(_TAG, end)) >= 0:
        begin += len(_TAG)
        end = text.find(_END, begin)
        yield (text[begin:] if end < 0 else text[begin:end]).strip()
        if end < 0:
            return
