"""GET /v1/models and GET /v1/models/{id}."""

from typing import Any

from aiohttp import web

from gateway.errors import model_not_found
from gateway.parts import PARTS
from protocol.model_card import ModelCard


async def list_models(request: web.Request) -> web.Response:
    """All models with a live worker that the caller may use."""
    parts = request.app[PARTS]
    caller = await parts.auth.tenant(request)
    cards = [card for card in await parts.directory.cards() if caller.record.may_use(card.name)]
    return web.json_response({"object": "list", "data": [_model(card) for card in cards]})


async def get_model(request: web.Request) -> web.Response:
    """One model; its id may hold slashes."""
    parts = request.app[PARTS]
    caller = await parts.auth.tenant(request)
    name = request.match_info["model"]
    for card in await parts.directory.cards():
        if card.name == name and caller.record.may_use(name):
            return web.json_response(_model(card))
    raise model_not_found(name)


def _model(card: ModelCard) -> dict[str, Any]:
    label = {"synthetic": True} if card.is_synthetic else {}
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": card.owned_by,
        "context_length": card.context_length,
        "max_request_tokens": card.max_request_tokens,
        **label,
    }
