"""Around every admin route: the operator's key or one of the admin scope, stores that name who acts, errors in the one shape."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.body import read_body
from gateway.errors import ApiError, bad_request, unavailable
from gateway.intake.fields import parse_object
from gateway.parts import PARTS, Parts
from gateway.price_store import PriceStore
from gateway.redis_link import NETWORK_ERRORS
from gateway.share_store import ShareStore
from gateway.tenancy_json import FieldError
from gateway.tenant_store import ExistsError, MissingError, TenantStore, TenantStoreError
from protocol.errors import InvalidNameError
from protocol.ids import TenantId, parse_tenant_id

MAX_BODY_BYTES = 256 * 1024
DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Desk:
    """What an admin route works with; all that's changed through it is the actor's in the audit."""

    request: web.Request
    parts: Parts
    actor: str
    tenants: TenantStore
    prices: PriceStore
    shares: ShareStore

    async def body(self) -> dict[str, Any]:
        """The JSON object in the body; raises ApiError."""
        most = min(self.parts.settings.max_body_bytes, MAX_BODY_BYTES)
        raw = await read_body(self.request, most, self.parts.settings.body_timeout_s)
        if len(raw) > most:
            raise ApiError(
                413, f"The request body is larger than {most} bytes.", "invalid_request_error", "request_too_large"
            )
        return parse_object(raw)

    def tenant_id(self) -> TenantId:
        """The tenant in the path; raises InvalidNameError."""
        return parse_tenant_id(self.request.match_info["tenant"])


Work = Callable[[Desk], Awaitable[web.Response]]


def admin(work: Work) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler out of a route's work."""

    async def handler(request: web.Request) -> web.Response:
        parts = request.app[PARTS]
        desk = _desk(request, parts, await parts.auth.admin(request))
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await work(desk)
        except MissingError as error:
            raise ApiError(404, _sentence(error), "invalid_request_error", "not_found") from None
        except ExistsError as error:
            raise ApiError(409, _sentence(error), "invalid_request_error", "already_exists") from None
        except FieldError as error:
            raise bad_request(f"Invalid {error}.", error.path or None) from None
        except (TenantStoreError, InvalidNameError) as error:
            raise bad_request(_sentence(error)) from None
        except NETWORK_ERRORS as error:
            parts.link.failed(error)
            raise unavailable("Redis is not reachable; try again in a moment.") from None

    return handler


def listed(rows: list[dict[str, Any]], **more: Any) -> web.Response:
    """A list in OpenAI's shape."""
    return web.json_response({"object": "list", "data": rows, **more})


def _desk(request: web.Request, parts: Parts, actor: str) -> Desk:
    place = (parts.link.commands, parts.link.keys, parts.settings.key_pepper, actor)
    return Desk(request, parts, actor, TenantStore(*place), PriceStore(*place), ShareStore(*place))


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + "."
