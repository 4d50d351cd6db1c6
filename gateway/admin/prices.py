"""Prices of models, in money for a million tokens."""

from aiohttp import web

from gateway.admin.door import Desk, listed
from gateway.tenancy_json import price_json, price_of
from protocol.ids import ModelName, parse_model_name


async def list_prices(desk: Desk) -> web.Response:
    """All prices; a model without one is free."""
    return listed([price_json(model, price) for model, price in (await desk.prices.prices()).items()])


async def put_price(desk: Desk) -> web.Response:
    """Set a model's price; requests that run keep theirs."""
    model = _model(desk)
    price = price_of(await desk.body())
    await desk.prices.set(model, price)
    return web.json_response(price_json(model, price))


async def delete_price(desk: Desk) -> web.Response:
    """Make a model free."""
    model = _model(desk)
    await desk.prices.remove(model)
    return web.json_response({"object": "price.deleted", "model": model, "deleted": True})


def _model(desk: Desk) -> ModelName:
    return parse_model_name(desk.request.match_info["model"])
