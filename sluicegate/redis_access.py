"""Commands that speak straight to Redis, with the installation's secrets."""

from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gateway.price_store import PriceStore
from gateway.share_store import ShareStore
from gateway.tenant_store import TenantStore, TenantStoreError
from protocol.errors import ProtocolError
from protocol.ids import TenantId, parse_tenant_id
from protocol.key_space import KeySpace
from sluicegate.environment import data_folder, redis_url
from sluicegate.errors import CommandError
from sluicegate.redis_client import run_connected
from sluicegate.secrets import derived_keys


@dataclass(frozen=True, slots=True)
class Stores:
    """What a command reads and changes."""

    client: Any
    keys: KeySpace
    tenants: TenantStore
    prices: PriceStore
    shares: ShareStore


def stores_of(client: Any, pepper: bytes, actor: str = "cli") -> Stores:
    """All stores over one client."""
    keys = KeySpace()
    place = (client, keys, pepper, actor)
    return Stores(client, keys, TenantStore(*place), PriceStore(*place), ShareStore(*place))


def with_stores(arguments: Namespace, work: Callable[[Stores], Awaitable[None]]) -> None:
    """Run a command's work; raises CommandError for whatever goes wrong with it."""
    data = data_folder(arguments.data)
    url = redis_url(arguments.redis_url, data)
    pepper = derived_keys(data).key_pepper

    try:
        run_connected(url, lambda client: work(stores_of(client, pepper)))
    except (TenantStoreError, ProtocolError) as error:
        raise CommandError(str(error)) from None
    except ValueError as error:  # a field of a record that can't be
        raise CommandError(str(error)) from None


def tenant_id(text: str) -> TenantId:
    """A tenant's id out of an argument; raises CommandError."""
    try:
        return parse_tenant_id(text)
    except ProtocolError as error:
        raise CommandError(str(error)) from None
