"""Arguments of the commands for tenants, keys, prices, share groups, usage and audit."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Add = Callable[..., argparse.ArgumentParser]
AddRedis = Callable[[argparse.ArgumentParser], None]


def add_tenancy(commands: Parsers, add: Add, redis: AddRedis) -> None:
    """All of them. `add` makes a sub-command's parser, `redis` gives it the flags that say where Redis is."""
    _add_tenants(commands, add, redis)
    _add_keys(commands, add, redis)
    _add_prices(commands, add, redis)
    _add_shares(commands, add, redis)
    _add_reports(commands, add, redis)


def _allowances(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", action="append", metavar="NAME=N",
        help="requests_per_minute, tokens_per_minute, concurrent_requests, queued_jobs, context_tokens, output_tokens or samples; "
        "NAME=none takes it away",
    )  # fmt: skip
    parser.add_argument(
        "--budget", action="append", metavar="PERIOD:UNIT=AMOUNT",
        help="day or month, tokens or money, such as month:money=100; all of them replace those there were; none for none",
    )  # fmt: skip


def _tenant_fields(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", help="its id: letters, digits, '.', '_' and '-'")
    parser.add_argument("--display-name", metavar="TEXT", help="a name for people")
    parser.add_argument("--weight", type=float, metavar="W", help="its share when there is a queue (1 if not set)")
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="a model that it may use, any number; all for all"
    )
    parser.add_argument("--metadata", action="append", metavar="NAME=VALUE", help="anything you want to keep with it")
    _allowances(parser)


def _add_tenants(commands: Parsers, add: Add, redis: AddRedis) -> None:
    group = commands.add_parser(
        "tenant", help="create, change, list and delete tenants", description="Tenants of the stack."
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    parser = add(actions, "create", "tenants:create_tenant", "add a tenant")
    _tenant_fields(parser)
    redis(parser)
    redis(add(actions, "list", "tenants:list_tenants", "show all tenants with their usage"))
    parser = add(actions, "show", "tenants:show_tenant", "show a tenant, its keys and its limits as JSON")
    parser.add_argument("tenant", help="its id")
    redis(parser)
    parser = add(actions, "update", "tenants:update_tenant", "change what is given")
    _tenant_fields(parser)
    redis(parser)
    for name, status, text in (
        ("disable", "disabled", "refuse a tenant at once, and end its running requests"),
        ("enable", "active", "let a tenant in again"),
    ):
        parser = add(actions, name, "tenants:set_status", text)
        parser.set_defaults(status=status)
        parser.add_argument("tenant", help="its id")
        redis(parser)
    parser = add(actions, "delete", "tenants:delete_tenant", "remove a tenant, its keys and its usage")
    parser.add_argument("tenant", help="its id")
    redis(parser)
    parser = add(actions, "apply", "tenants:apply_tenants", "make tenants, keys and prices as a TOML file has them")
    parser.add_argument("file", help="see docs/tenants.md")
    redis(parser)


def _add_keys(commands: Parsers, add: Add, redis: AddRedis) -> None:
    group = commands.add_parser(
        "key", help="create, list, rotate and revoke API keys", description="API keys of tenants."
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    parser = add(actions, "create", "api_keys:create_key", "make a key for a tenant and print it, once")
    parser.add_argument("tenant", help="the tenant's id")
    parser.add_argument("--name", default="key", help="what it is for")
    parser.add_argument(
        "--scope",
        action="append",
        choices=("inference", "usage", "admin"),
        help="what it may do (inference if none is given)",
    )
    parser.add_argument("--admin", action="store_true", help="a key for the /admin routes: --scope admin")
    parser.add_argument("--expires", metavar="WHEN", help="2027-01-31T00:00:00Z, or a span such as 30d")
    _allowances(parser)
    redis(parser)
    parser = add(actions, "list", "api_keys:list_keys", "show keys by their public ids")
    parser.add_argument("tenant", nargs="?", help="only this tenant's")
    redis(parser)
    for name, run, text in (
        ("update", "api_keys:update_key", "change what is given"),
        ("rotate", "api_keys:rotate_key", "make a successor and print it, once; the old key works for a while"),
        ("revoke", "api_keys:revoke_key", "remove a key; gateways refuse it within a second"),
    ):
        parser = add(actions, name, run, text)
        parser.add_argument("key_id", help="its public id, from `sluicegate key list`")
        if name == "update":
            parser.add_argument("--expires", metavar="WHEN", help="a time or a span such as 30d; never")
            _allowances(parser)
        elif name == "rotate":
            parser.add_argument(
                "--overlap", metavar="SPAN", default="1h", help="how long the old key still works, such as 0s or 7d"
            )
        redis(parser)


def _add_prices(commands: Parsers, add: Add, redis: AddRedis) -> None:
    group = commands.add_parser("price", help="what models cost", description="Prices, in money for a million tokens.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    parser = add(actions, "set", "prices:set_price", "set a model's price")
    parser.add_argument("model", help="its name")
    parser.add_argument("--input", type=float, required=True, metavar="P", help="for prompt tokens")
    parser.add_argument(
        "--cached-input",
        type=float,
        metavar="P",
        help="for prompt tokens found in the cache (default: half of --input)",
    )
    parser.add_argument("--output", type=float, required=True, metavar="P", help="for generated tokens")
    redis(parser)
    redis(add(actions, "list", "prices:list_prices", "show all prices"))
    parser = add(actions, "remove", "prices:remove_price", "make a model free")
    parser.add_argument("model", help="its name")
    redis(parser)


def _add_shares(commands: Parsers, add: Add, redis: AddRedis) -> None:
    group = commands.add_parser(
        "share", help="groups of tenants that may share prefixes", description="Share groups of tenants."
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    parser = add(actions, "create", "shares:create_share", "let tenants share prefixes under a name")
    parser.add_argument("name", help="the group's name")
    parser.add_argument("--tenants", required=True, metavar="A,B,...", help="its members")
    redis(parser)
    redis(add(actions, "list", "shares:list_shares", "show all groups"))
    parser = add(actions, "delete", "shares:delete_share", "remove a group")
    parser.add_argument("name", help="the group's name")
    redis(parser)


def _add_reports(commands: Parsers, add: Add, redis: AddRedis) -> None:
    parser = add(commands, "usage", "usage:usage", "show what tenants used")
    parser.add_argument("tenant", nargs="?", help="only this tenant")
    parser.add_argument("--by", choices=("hour", "day", "request"), default="day", help="what a line is")
    _range(parser)
    parser = add(
        commands, "audit", "usage:audit", "show what was done to tenants and keys, and what integrity checks found"
    )
    parser.add_argument("--tenant", help="only this tenant")
    parser.add_argument("--kind", help="only this kind, such as key.revoked, or key for all of keys")
    _range(parser)
    for name in ("usage", "audit"):
        redis(commands.choices[name])


def _range(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", metavar="WHEN", help="2026-11-30T00:00:00Z, or a span back from now such as 7d (default 30d)"
    )
    parser.add_argument("--until", metavar="WHEN", help="the end, now if not given")
    parser.add_argument(
        "--limit", type=int, metavar="N", default=1000, help="most lines of requests or entries, the latest"
    )
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="how it is printed")
