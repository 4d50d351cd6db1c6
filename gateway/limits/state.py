"""How much of each limit is used now, without taking anything."""

from typing import Any

from gateway.limits.charges import Ask, owner_charges
from gateway.limits.ledger import standings_of
from gateway.limits.refusal import Standing
from gateway.scripts import run_script
from protocol.account_scripts import ADMIT
from protocol.codec import pack, unpack_list
from protocol.key_space import KeySpace
from protocol.limits import FREE, NANOS
from protocol.tenancy import ApiKey, Tenant

_NOTHING = Ask("", (), 0, 0, 0)


async def standings(client: Any, keys: KeySpace, tenant: Tenant, key: ApiKey | None) -> list[Standing]:
    """The counters of a tenant, or of one of its keys; errors of Redis pass through."""
    charges = owner_charges(keys, tenant, key, _NOTHING, FREE)
    if not charges:
        return []
    places = [keys.open_requests(tenant.id), keys.leases(tenant.id), keys.deleted(tenant.id)]
    places += [charge.redis_key for charge in charges]
    arguments = ["", 1000, "", pack([charge.wire() for charge in charges]), 1]
    reply = unpack_list(await run_script(client, ADMIT, places, arguments))
    return [] if reply[0] < 0 else standings_of(charges, reply)


def standing_json(standing: Standing, key: ApiKey | None) -> dict[str, Any]:
    """A counter as it is shown."""
    charge = standing.charge
    unit = NANOS if charge.what == "budget_money" else 1
    return {
        "object": "limit", "owner": charge.owner, "key": key.id if key else None, "limit": charge.what, "period": charge.period or None,
        "allowed": charge.limit / unit if unit > 1 else charge.limit,
        "used": standing.used / unit if unit > 1 else standing.used,
        "remaining": standing.remaining / unit if unit > 1 else standing.remaining, "reset_s": standing.reset_s,
    }  # fmt: skip
