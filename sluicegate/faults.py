"""`sluicegate fault`: damage on demand, to see that it's found."""

import asyncio
import os
import time
from argparse import Namespace
from typing import Any

from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.faults import FAULT_KINDS, ORDER_TTL_S, FaultOrder, FaultReport
from protocol.ids import ModelName, parse_tenant_id
from protocol.key_space import KeySpace
from sluicegate.environment import data_folder, redis_url
from sluicegate.errors import CommandError
from sluicegate.redis_client import run_connected

OBEYED_WITHIN_S = 5.0
LOOK_S = 0.05


def list_faults(arguments: Namespace) -> None:
    """Name every kind."""
    for kind, text in FAULT_KINDS.items():
        print(f"{kind:18}{text}")


def inject_fault(arguments: Namespace) -> None:
    """Order one, wait until it's done."""
    try:
        tenant = parse_tenant_id(arguments.tenant) if arguments.tenant else None
    except ProtocolError as error:
        raise CommandError(str(error)) from None
    layer = -1 if arguments.layer is None else arguments.layer
    order = FaultOrder(os.urandom(8).hex(), arguments.kind, tenant, layer, arguments.page)
    url = redis_url(arguments.redis_url, data_folder(arguments.data))
    report = run_connected(url, lambda client: order_fault(client, order, arguments.model, arguments.wait))
    if report.problem:
        raise CommandError(report.problem)
    print(f"struck page {report.page}, layer {report.layer}, of request {report.request_id} of tenant {report.tenant}")


async def order_fault(client: Any, order: FaultOrder, model: ModelName | None, wait_s: float) -> FaultReport:
    """Send an order to the workers of a model (the only one, if none is named); tried again until a request runs that can be struck.

    Raises CommandError if no worker obeys.
    """
    keys = KeySpace()
    model = model or await _only_model(client, keys)
    until_s = time.monotonic() + wait_s
    while True:
        report = await _order_once(client, keys, model, order)
        if not report.problem.startswith(("no running request", "no other tenant's")) or time.monotonic() > until_s:
            return report


async def _only_model(client: Any, keys: KeySpace) -> ModelName:
    names = await client.zrange(keys.models, 0, -1)
    if len(names) != 1:
        known = ", ".join(sorted(name.decode() for name in names)) or "none"
        raise CommandError(f"name a model with --model; served are: {known}")
    return ModelName(names[0].decode())


async def _order_once(client: Any, keys: KeySpace, model: ModelName, order: FaultOrder) -> FaultReport:
    orders, answer = keys.fault_orders(model), keys.fault_report(model, order.order_id)
    raw = encode(order)
    await client.delete(answer)
    await client.rpush(orders, raw)
    await client.expire(orders, ORDER_TTL_S)
    until_s = time.monotonic() + OBEYED_WITHIN_S
    while time.monotonic() < until_s:
        if (found := await client.get(answer)) is not None:
            return decode(FaultReport, found)
        await asyncio.sleep(LOOK_S)
    await client.lrem(orders, 0, raw)
    raise CommandError("no worker obeyed; start the stack with --allow-fault-injection")
