"""Errors as OpenAI's clients expect them: a status and {"error": {message, type, param, code}}."""

import logging
import math
import re
import secrets

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.errors import KVRelayError, Overloaded
from common.log import get_logger, log_event, request_id
from router.metrics import RouterMetrics
from router.openai.replies import ErrorBody, ErrorDetail
from router.openai.strict_json import cut

log = get_logger("http")
USABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
RETRY_AFTER_S = 1.0  # of a 503
CLIENT_LEFT = 499  # nobody gets this status; it is counted


def errors_as_json(metrics: RouterMetrics) -> Middleware:
    """Names each request, turns whatever it raises into a reply, and counts the outcome."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        name_request(request)
        status = CLIENT_LEFT  # stays, if the handler is cancelled
        try:
            response = await handler(request)
            status = response.status
        except web.HTTPException as error:
            response = http_error(request, error)
            status = response.status
        except Exception as error:
            response = _error_reply(known_error(error))
            status = response.status
        finally:
            resource = request.match_info.route.resource
            metrics.on_http(resource.canonical if resource is not None else "other", status)
        return response

    return middleware


def name_request(request: web.BaseRequest) -> None:
    """For its reply and for logs."""
    given = request.headers.get("X-Request-Id", "")
    request_id.set(given if USABLE_ID.fullmatch(given) else secrets.token_hex(16))


async def add_request_id(_: web.Request, response: web.StreamResponse) -> None:
    """For app.on_response_prepare, so that streams have it too."""
    if name := request_id.get():  # none, where aiohttp refuses a request by itself
        response.headers["X-Request-Id"] = name


def known_error(error: Exception) -> KVRelayError:
    """What clients may not hear is in the log, under the request's id; what is no error of ours is a defect."""
    if not isinstance(error, KVRelayError):
        log_event(log, logging.ERROR, "request failed", exc_info=error)
        return KVRelayError(KVRelayError.public)
    if error.told != error.message:
        log_event(log, logging.WARNING, "request failed", code=error.code, reason=error.message)
    return error


def json_reply(text: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A reply with a text that is JSON already."""
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def _error_reply(error: KVRelayError) -> web.Response:
    headers = {}
    if error.http_status in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else RETRY_AFTER_S
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    reply = json_reply(ErrorBody.of(error).model_dump_json(), error.http_status, headers)
    if error.http_status == 408:  # what comes after the rest of the body is not waited for
        reply.force_close()
    return reply


def http_error(http: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals: no such path, wrong method, too large a body."""
    messages = {
        404: f"there is no {cut(http.path)}",
        405: f"{cut(http.path)} does not take {cut(http.method)}",
        413: f"the body is too large: {cut(error.text or '')}",
    }
    detail = ErrorDetail(
        message=messages.get(error.status, error.reason),
        type="invalid_request_error" if error.status < 500 else "server_error",
        param=None,
        code=re.sub(r"\W+", "_", error.reason).lower(),
    )
    kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    return json_reply(ErrorBody(error=detail).model_dump_json(), error.status, kept)
