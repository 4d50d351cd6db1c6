"""`sluicegate price`."""

from argparse import Namespace

from gateway.tenancy_json import FieldError, price_of
from protocol.errors import ProtocolError
from protocol.ids import parse_model_name
from protocol.limits import nanos_to_price
from sluicegate.errors import CommandError
from sluicegate.redis_access import Stores, with_stores


def set_price(arguments: Namespace) -> None:
    """Set what a million tokens of a model cost."""
    given = {"input": arguments.input, "output": arguments.output}
    if arguments.cached_input is not None:
        given["cached_input"] = arguments.cached_input
    try:
        model, price = parse_model_name(arguments.model), price_of(given)
    except (ProtocolError, FieldError) as error:
        raise CommandError(str(error)) from None

    async def work(stores: Stores) -> None:
        await stores.prices.set(model, price)
        print(f"Set the price of {model}.")

    with_stores(arguments, work)


def list_prices(arguments: Namespace) -> None:
    """All prices, for a million tokens."""

    async def work(stores: Stores) -> None:
        print(f"{'MODEL':<40} {'INPUT':>12} {'CACHED':>12} {'OUTPUT':>12}")
        for model, price in (await stores.prices.prices()).items():
            amounts = [nanos_to_price(nanos) for nanos in (price.input, price.cached_input, price.output)]
            print(f"{model:<40} " + " ".join(f"{amount:>12.3f}" for amount in amounts))

    with_stores(arguments, work)


def remove_price(arguments: Namespace) -> None:
    """Make a model free."""

    async def work(stores: Stores) -> None:
        await stores.prices.remove(parse_model_name(arguments.model))
        print(f"Model {arguments.model} has no price any more.")

    with_stores(arguments, work)
