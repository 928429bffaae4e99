"""Errors in the format of OpenAI's API."""

import logging
import re
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from symbiosis_priv import errors
from symbiosis_priv.errors import SymbiosisError

log = logging.getLogger(__name__)

_PATH = re.compile(r"(?<![\w.:/])~?/[^\s'\",;:()]*")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error that is sent as the answer to a request. `message`: what is wrong and what to do, without data of other
    requests. `code`: OpenAI's code of the error. `param`: the field of the request."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.code = code
        self.param = param

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict[str, Any]:
        """Return the body; `type` is of Anthropic's form, `error` of both."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"type": "error", "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status in (408, 413):
            headers["Connection"] = "close"  # otherwise the server would read the rest of the body
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def invalid(error: ValidationError, named: Callable[[str], str] = str) -> ApiError:
    """Return the answer to a converted request whose first wrong field is named. `named`: the request's name of a
    field."""
    first = error.errors()[0]
    where = named(".".join(map(str, first["loc"])))
    return ApiError(400, f"{where}: {first['msg']}"[:500], param=where[:200])


def public(text: str) -> str:
    """Return the text of an error without paths of this machine."""
    return _PATH.sub("(a path of the endpoint)", text)


def refused(error: SymbiosisError) -> ApiError:
    """Return the answer to a request that the engine has not taken."""
    if isinstance(error, errors.OverloadedError):
        return ApiError(429, str(error), code="overloaded")
    if isinstance(error, errors.TaskError):
        return ApiError(404, str(error), code="model_not_found", param="model")
    return failed(error)


def failed(error: SymbiosisError) -> ApiError:
    """Return the answer to a request that the engine could not finish. Details of providers' errors are only logged."""
    if isinstance(
        error, errors.TaskError | errors.CheckpointError | errors.UnsupportedMethodError | errors.UnsupportedModelError
    ):
        return ApiError(400, f"the adapter cannot be used: {public(str(error))}", code="adapter", param="model")
    if isinstance(error, errors.NonFiniteError):
        return ApiError(500, "the model computes inf or nan for this prompt")
    if isinstance(error, errors.ConfigError):
        return ApiError(400, public(str(error)))
    if type(error) is SymbiosisError:  # not of a provider; the engine has written its text
        return ApiError(500, f"{error}; see the log of the endpoint")
    kind = type(error).__name__
    return ApiError(503, f"the providers gave no answer ({kind}): see the log of the endpoint", code="providers")


def shown(error: Exception) -> ApiError:
    """Return the answer to a request that failed with any error, which is logged. The text of an error of another
    library may quote a prompt, so only its type and place are logged."""
    if isinstance(error, ApiError):
        return error
    name = type(error).__name__
    if isinstance(error, SymbiosisError):
        log.error("a request failed: %s: %s", name, error)
        return failed(error)
    log.error("%s\n%s", name, "".join(traceback.format_tb(error.__traceback__)))
    return ApiError(500, f"an error in the endpoint ({name}); see its log")
