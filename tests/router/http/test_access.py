"""With API keys every path but the probes' needs one; browsers get CORS headers for the origins that are named."""

from typing import Any

import pytest

from common.text.text_model import TextModel
from tests.support.http_tools import CHAT, COMPLETION, HELLO, serve
from tests.support.tiny_text import model_directory

KEYS = ("first-key", "sécond")
CLOSED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/tiny"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("OPTIONS", "/v1/models"),
    ("GET", "/health/"),
    ("GET", "/health/../v1/models"),
    ("GET", "//health"),
]
WRONG = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer first-ke"},
    {"Authorization": "Bearer first-keyx"},
    {"Authorization": "Bearer first-key,sécond"},
    {"Authorization": "Basic first-key"},
    {"Authorization": "first-key"},
    {"X-Api-Key": "first-key"},
]
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(model_directory(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_without_a_key_everything_is_refused_before_it_is_read(text: TextModel, method: str, path: str) -> None:
    async with serve(text, api_keys=KEYS) as served:
        for headers in WRONG:
            async with served.session.request(method, served.url + path, headers=headers, data=b"{") as response:
                body = await response.json()
            assert (response.status, body["error"]["code"]) == (401, "invalid_api_key")
            assert body["error"]["type"] == "invalid_request_error"
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert "X-Request-Id" in response.headers
        assert not served.pipeline.generations


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_and_scrapers_need_none(text: TextModel, path: str) -> None:
    async with serve(text, api_keys=KEYS) as served:
        assert (await served.get(path))[0].status == 200


@pytest.mark.parametrize("given", ["Bearer first-key", "bearer first-key", "Bearer   first-key ", "Bearer sécond"])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_any_of_the_keys_opens(text: TextModel, path: str, body: Any, given: str) -> None:
    async with serve(text, *HELLO, api_keys=KEYS) as served:
        assert (await served.post(path, body, headers={"Authorization": given}))[0].status == 200


@pytest.mark.parametrize("given", [None, "Bearer anything", "odd"])
async def test_without_keys_in_the_settings_none_is_asked_for(text: TextModel, given: str | None) -> None:
    async with serve(text, *HELLO) as served:
        headers = {"Authorization": given} if given else {}
        assert (await served.post("/v1/completions", COMPLETION, headers=headers))[0].status == 200


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((PAGE,), True), (("*",), True), (("https://b", PAGE), True), (("https://b",), False), ((), False)],
)
async def test_a_preflight_is_answered_without_a_key(text: TextModel, origins: tuple[str, ...], allowed: bool) -> None:
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with (
        serve(text, api_keys=KEYS, allowed_origins=origins) as served,
        served.session.options(served.url + "/v1/chat/completions", headers=asks) as response,
    ):
        headers = response.headers
    if not allowed:
        assert response.status == 401
        assert "Access-Control-Allow-Origin" not in headers
        return
    assert response.status == 204
    assert headers["Access-Control-Allow-Origin"] == PAGE
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_errors_say_who_may_read_them(text: TextModel, stream: bool) -> None:
    async with serve(text, *HELLO, allowed_origins=(PAGE,)) as served:
        for body in ({**COMPLETION, "stream": stream}, {}):
            for origin in (PAGE, "https://other.example"):
                async with served.session.post(
                    served.url + "/v1/completions", json=body, headers={"Origin": origin}
                ) as response:
                    await response.read()
                allowed = response.headers.get("Access-Control-Allow-Origin")
                assert allowed == (PAGE if origin == PAGE else None)
                assert response.headers["Vary"] == "Origin"
                if allowed:
                    assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


async def test_without_origins_there_is_no_cors(text: TextModel) -> None:
    async with serve(text) as served:
        response, _ = await served.get("/v1/models", headers={"Origin": PAGE})
    assert not [name for name in response.headers if name.startswith("Access-Control") or name == "Vary"]
