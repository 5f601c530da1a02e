"""Pages that say what is served and how it is: models, version, health, readiness, metrics."""

from collections.abc import Callable, Sequence
from typing import Literal

from aiohttp import web
from pydantic import BaseModel

from common.metrics import metrics_response
from common.version import VERSION
from router.http.error_replies import json_reply
from router.metrics import RouterMetrics
from router.openai.request_builder import served_name


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int  # Unix time, seconds
    owned_by: str = "kvrelay"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class HealthPage(BaseModel):
    status: str


class Readiness(BaseModel):
    ready: bool
    reason: str


class Pages:
    """Of one served model, a card for each of its names."""

    def __init__(
        self, cards: Sequence[ModelCard], ready: Callable[[], tuple[bool, str]], metrics: RouterMetrics
    ) -> None:
        self._cards = {card.id: card for card in cards}
        self._ready = ready
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            web.get("/version", self._version),
            web.get("/health", self._health),
            web.get("/ready", self._readiness),
            web.get("/metrics", self._metrics_page),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return _page(ModelList(data=list(self._cards.values())))

    async def _model(self, http: web.Request) -> web.Response:
        return _page(self._cards[served_name(http.match_info["model"], list(self._cards))])

    async def _version(self, _: web.Request) -> web.Response:
        return _page(Version(version=VERSION))

    async def _health(self, _: web.Request) -> web.Response:
        return _page(HealthPage(status="ok"))

    async def _readiness(self, _: web.Request) -> web.Response:
        ready, reason = self._ready()
        return _page(Readiness(ready=ready, reason=reason), status=200 if ready else 503)

    async def _metrics_page(self, http: web.Request) -> web.Response:
        return metrics_response(self._metrics.registry, http.headers.get("Accept", ""))


def _page(model: BaseModel, status: int = 200) -> web.Response:
    return json_reply(model.model_dump_json(), status)
