"""Limits, rotation, prices, share groups, usage, audit and seed files on the command line, against a real Valkey."""

import asyncio
import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from gateway.limits.account import Counts, Note
from gateway.limits.settlement import Settlement
from gateway.tenant_store import TenantStore
from protocol.audit import AuditRecord, to_fields
from protocol.ids import ModelName, TenantId
from protocol.key_space import KeySpace
from protocol.limits import Budget, Limits
from sluicegate.command import main
from sluicegate.secrets import derived_keys

pytestmark = pytest.mark.usefixtures("clean_redis")

SEED = """
[prices."tiny/chat"]
input = 0.5
output = 1.5

[[tenants]]
id = "acme"
display_name = "Acme"
weight = 2
models = ["tiny/chat"]
limits = { requests_per_minute = 60, samples = 4 }
budgets = [{ period = "month", unit = "money", amount = 100 }]
metadata = { team = "x" }

[[tenants.keys]]
name = "ci"
scopes = ["inference", "usage"]
secret_env = "ACME_CI_KEY"
expires = 2099-01-01T00:00:00Z

[[tenants.keys]]
name = "made-here"

[[tenants]]
id = "other"

[[shares]]
name = "both"
tenants = ["acme", "other"]
"""


@pytest.fixture
def clean_redis(valkey_url: str):
    """The commands use the published key names: they are removed, by name, after each test."""
    yield
    with redis.Redis.from_url(valkey_url) as client:
        for key in client.scan_iter(f"{KeySpace().prefix}:*"):
            client.delete(key)


@pytest.fixture
def run(valkey_url: str, data: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A sub-command in this process that must succeed, or fail with a line that holds `error`; gives what it printed."""

    def call(*arguments: str, error: str = "") -> str:
        code = main([*arguments, "--redis-url", valkey_url, "--data", str(data)])
        captured = capsys.readouterr()
        if error:
            assert (1, "", 1) == (code, captured.out, captured.err.count("\n")), captured
            assert error in captured.err
            return captured.err
        assert (0, "") == (code, captured.err)
        return captured.out

    return call


def _in_redis(url: str, data: Path, work):
    async def inner():
        client = redis.asyncio.Redis.from_url(url)
        try:
            return await work(client, TenantStore(client, KeySpace(), derived_keys(data).key_pepper))
        finally:
            await client.aclose()

    return asyncio.run(inner())


def _shown(run, tenant: str) -> dict:
    return json.loads(run("tenant", "show", tenant))


def test_limits_and_budgets_are_set_merged_and_taken_away(run) -> None:
    """--limit changes what it names, --budget replaces all."""
    run(
        "tenant",
        "create",
        "acme",
        "--limit",
        "samples=2",
        "--limit",
        "queued_jobs=5",
        "--budget",
        "day:tokens=100",
        "--weight",
        "3",
    )
    run(
        "tenant",
        "update",
        "acme",
        "--limit",
        "samples=none",
        "--budget",
        "month:money=2.5",
        "--model",
        "a/b",
        "--metadata",
        "x=1=2",
    )
    shown = _shown(run, "acme")
    assert {"queued_jobs": 5} == {name: value for name, value in shown["limits"].items() if value is not None}
    assert [{"period": "month", "unit": "money", "amount": 2.5}] == shown["budgets"]
    assert (3.0, ["a/b"], {"x": "1=2"}) == (shown["weight"], shown["models"], shown["metadata"])
    run("tenant", "update", "acme", "--budget", "none", "--model", "all")
    shown = _shown(run, "acme")
    assert ([], None, ["queued"]) == (shown["budgets"], shown["models"], [row["limit"] for row in shown["state"]])
    assert "Nothing to change.\n" == run("tenant", "update", "acme")


def test_disable_and_enable(run) -> None:
    """The list tells."""
    run("tenant", "create", "acme")
    assert "Tenant acme is disabled.\n" == run("tenant", "disable", "acme")
    assert "disabled" in run("tenant", "list")
    run("tenant", "enable", "acme")
    assert "active" in run("tenant", "list")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--limit", "rpm=5"], "rpm"), (["--limit", "samples"], "NAME=N"), (["--limit", "samples=-1"], "NAME=N"),
        (["--limit", "samples=0"], "samples"), (["--budget", "week:tokens=5"], "--budget"), (["--budget", "day:tokens=0.5"], "whole"),
        (["--budget", "day:tokens=1", "--budget", "day:tokens=2"], "one budget"), (["--weight", "0"], "weight"),
        (["--weight", "nan"], "weight"), (["--model", "a b"], "invalid model name"), (["--metadata", "x"], "NAME=VALUE"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_clear_line(run, flags: list[str], error: str) -> None:
    """Nothing is made."""
    run("tenant", "create", "acme", *flags, error=error)
    assert 1 == len(run("tenant", "list").splitlines())


def test_a_key_expires_is_rotated_and_shows_it(run) -> None:
    """--expires takes a time or a span; a rotated key ends after the overlap, its successor has the same rights."""
    run("tenant", "create", "acme")
    run(
        "key",
        "create",
        "acme",
        "--name",
        "a",
        "--scope",
        "usage",
        "--scope",
        "inference",
        "--expires",
        "2099-05-06T07:08:09Z",
    )
    (row,) = run("key", "list").splitlines()[1:]
    assert ("usage,inference", "2099-05-06 07:08") == (row.split()[3], " ".join(row.split()[6:8]))
    first = row.split()[0]
    assert run("key", "rotate", first, "--overlap", "0s").startswith("sk-sg-")
    rows = _shown(run, "acme")["keys"]
    assert [["usage", "inference"]] * 2 == [key["scopes"] for key in rows]
    old, new = sorted(rows, key=lambda key: key["id"] != first)
    assert old["expires"] < "2098"
    assert new["expires"] is None
    run("key", "update", new["id"], "--expires", "30d", "--limit", "samples=1")
    changed = next(key for key in _shown(run, "acme")["keys"] if key["id"] == new["id"])
    assert (1, True) == (changed["limits"]["samples"], changed["expires"] > "2026")
    run("key", "update", new["id"], "--expires", "never")
    run("key", "create", "acme", "--expires", "tomorrow", error="--expires")
    run("key", "rotate", "key_0", error="there is no key 'key_0'")
    run("key", "rotate", first, "--overlap", "1 week", error="--overlap")
    run("key", "rotate", first, "--overlap", "36501d", error="--overlap: 36501d is more than 36500d")
    run("key", "create", "acme", "--expires", "999999999d", error="--expires")


def test_prices_and_shares(run) -> None:
    """Set, listed, removed."""
    run("price", "set", "tiny/chat", "--input", "0.5", "--output", "1.5")
    assert ["tiny/chat", "0.500", "0.250", "1.500"] == run("price", "list").splitlines()[1].split()
    run("price", "remove", "tiny/chat")
    run("price", "remove", "tiny/chat", error="has no price")
    run("price", "set", "tiny/chat", "--input", "-1", "--output", "1", error="input")
    for tenant in ("one", "two"):
        run("tenant", "create", tenant)
    run("share", "create", "both", "--tenants", "one,two")
    run("share", "create", "both", "--tenants", "one,two", error="exists already")
    run("share", "create", "alone", "--tenants", "one,one", error="at least two")
    run("share", "create", "ghost", "--tenants", "one,nobody", error="there is no tenant 'nobody'")
    assert run("share", "list").splitlines()[1].endswith("one, two")
    run("share", "delete", "both")
    run("share", "delete", "both", error="there is no share group")


def _use(url: str, data: Path, tenant: str, amounts: list[tuple[int, int]]) -> None:
    """Requests that ended just now, written by the script that gateways use."""
    from protocol.account_scripts import ADMIT
    from protocol.codec import pack

    async def work(client, store) -> None:
        keys, now_ms = KeySpace(), int(time.time() * 1000)
        for number, (prompt, output) in enumerate(amounts):
            name, note = f"{tenant}{number}", Note("key_1", ModelName("tiny/chat"), 1, (1000, 500, 2000), ())
            places = [place(TenantId(tenant)) for place in (keys.open_requests, keys.leases, keys.deleted)]
            await client.eval(ADMIT, 3, *places, name, 60_000, note.to_text(), pack([]), 0)
            row = note.row(name, TenantId(tenant), Counts(prompt, 0, output, 1, 2, 3), "completed", "", now_ms, now_ms)
            assert await Settlement(TenantId(tenant), name, note, [], row, now_ms).write(client, keys, 86_400)

    _in_redis(url, data, work)


def test_usage_as_table_csv_and_json(run, valkey_url: str, data: Path) -> None:
    """The same numbers in each form, by day, hour and request, for all and for one."""
    for tenant in ("acme", "other"):
        run("tenant", "create", tenant)
    _use(valkey_url, data, "acme", [(10, 5), (20, 5)])
    _use(valkey_url, data, "other", [(7, 1)])
    document = json.loads(run("usage", "--format", "json"))
    cost = (37 * 1000 + 11 * 2000) / 1e9
    assert {"requests": 3, "prompt_tokens": 37, "cached_tokens": 0, "completion_tokens": 11, "cost": cost} == document[
        "totals"
    ]
    assert [("acme", 2, 30), ("other", 1, 7)] == [
        (r["tenant"], r["requests"], r["prompt_tokens"]) for r in document["data"]
    ]
    for by in ("hour", "day"):
        table = list(csv.DictReader(io.StringIO(run("usage", "acme", "--by", by, "--format", "csv"))))
        assert [("acme", "key_1", "tiny/chat", "2", "30", "10")] == [
            (r["tenant"], r["key"], r["model"], r["requests"], r["prompt_tokens"], r["completion_tokens"]) for r in table
        ]  # fmt: skip
    lines = run("usage", "--by", "request").splitlines()
    assert (4, "ENDED") == (len(lines), lines[0].split()[0])
    assert 2 == len(run("usage", "--by", "request", "--limit", "1").splitlines())
    assert 1 == len(run("usage", "--since", "2020-01-01T00:00:00Z", "--until", "2021-01-01T00:00:00Z").splitlines())
    run("usage", "--by", "hour", "--since", "300d", error="at most 35 days")
    run("usage", "--since", "yesterday", error="--since")
    run("usage", "--limit", "0", error="limit")


def test_audit_shows_operators_and_integrity_events(run, valkey_url: str, data: Path) -> None:
    """What the command did, and an entry in the form in which workers write them."""
    run("tenant", "create", "acme")
    run("key", "create", "acme")

    async def write(client, store) -> None:
        record = AuditRecord("integrity.seal", "worker-1", "acme", request="r1", page=0, layer=3, detail="seal")
        await client.xadd(KeySpace().audit, to_fields(record))

    _in_redis(valkey_url, data, write)
    entries = json.loads(run("audit", "--format", "json"))["data"]
    assert ["tenant.created", "key.created", "integrity.seal"] == [entry["kind"] for entry in entries]
    assert ("worker-1", "r1", 0, 3) == tuple(entries[2][name] for name in ("actor", "request", "page", "layer"))
    assert ["integrity.seal"] == [line.split()[1] for line in run("audit", "--kind", "integrity").splitlines()[1:]]
    table = list(csv.DictReader(io.StringIO(run("audit", "--tenant", "acme", "--format", "csv"))))
    assert ["cli", "cli", "worker-1"] == [row["actor"] for row in table]


def test_a_seed_makes_a_stack_again(run, valkey_url: str, data: Path, tmp_path: Path, monkeypatch) -> None:
    """Tenants, keys, prices and shares as in the file; a second time changes nothing; a change in the file is made, the rest is left."""
    monkeypatch.setenv("ACME_CI_KEY", "sk-sg-from-the-environment")
    file = tmp_path / "tenants.toml"
    file.write_text(SEED)
    said = run("tenant", "apply", str(file))
    assert ["Created tenant acme.", "Created tenant other.", "Created share group both."] == [
        line for line in said.splitlines() if " key " not in line
    ]
    secret = (data / "secrets" / "seed-acme-made-here.key").read_text()
    assert 2 == said.count("Created key")
    assert "sk-sg-" not in said
    shown = _shown(run, "acme")
    assert (60, 2.0, ["tiny/chat"], "Acme") == (
        shown["limits"]["requests_per_minute"],
        shown["weight"],
        shown["models"],
        shown["display_name"],
    )
    assert "" == run("tenant", "apply", str(file))

    async def found(client, store):
        return [await store.find_key("sk-sg-from-the-environment"), await store.find_key(secret)]

    ci, made = _in_redis(valkey_url, data, found)
    assert (("inference", "usage"), "acme", True) == (ci.scopes, made.tenant, ci.expires_ms > 4 * 10**12)
    run("tenant", "disable", "acme")
    file.write_text(SEED.replace("samples = 4", "samples = 5"))
    assert "Changed tenant acme: limits.\n" == run("tenant", "apply", str(file))
    shown = _shown(run, "acme")
    assert ("disabled", 5) == (shown["status"], shown["limits"]["samples"])


def test_a_seed_brings_no_revoked_key_back(run, data: Path, tmp_path: Path, monkeypatch) -> None:
    """What an operator took away stays away."""
    monkeypatch.setenv("ACME_CI_KEY", "sk-sg-from-the-environment")
    file = tmp_path / "tenants.toml"
    file.write_text(SEED)
    run("tenant", "apply", str(file))
    key = next(key["id"] for key in _shown(run, "acme")["keys"] if key["name"] == "ci")
    run("key", "revoke", key)
    assert "Key ci of tenant acme was revoked, and stays so.\n" == run("tenant", "apply", str(file))
    assert ["made-here"] == [key["name"] for key in _shown(run, "acme")["keys"]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", "x: is unknown"), ("[[tenants]]", "tenants[0].id"), ('[[tenants]]\nid = "a b"', "invalid tenant name"),
        ('[[tenants]]\nid = "a"\n[[tenants]]\nid = "a"', "each id"), ('[[tenants]]\nid = "a"\nweight = "x"', "tenants[0].weight"),
        ('[[tenants]]\nid = "a"\nweight = 0', "weight"), ('[[tenants]]\nid = "a"\nlimits = { rpm = 1 }', "tenants[0].limits.rpm"),
        ('[[tenants]]\nid = "a"\n[[tenants.keys]]\nname = "../x"', "tenants[0].keys[0].name"),
        ('[[tenants]]\nid = "a"\n[[tenants.keys]]\nname = "x"\nsecret = "a"\nsecret_env = "b"', "at most one of"),
        ('[[tenants]]\nid = "a"\n[[tenants.keys]]\nname = "x"\nscopes = ["root"]', "scopes"), ("tenants = 5", "expected an array"),
        ('[[tenants]]\nid = "a"\nbudgets = [{ period = "day", unit = "money", amount = 1e300 }]', "tenants[0].budgets[0].amount"),
        ('[[tenants]]\nid = "a"\n[[tenants.keys]]\nname = "x"\nexpires = 1e308', "tenants[0].keys[0].expires"),
        ('[prices."m"]\ninput = 1', "prices.m.output"), ('[[shares]]\nname = "s"', "shares[0]"), ("[", "not valid TOML"),
        ('[[tenants]]\nid = "a"\n[[tenants.keys]]\nname = "x"\nsecret_env = "NOT_SET_ANYWHERE"', "secret_env must give"),
        ('[[tenants]]\nid = "a"\n[[tenants.keys]]\nname = "x"\nsecret_file = "/nowhere/at/all"', "cannot read /nowhere"),
    ],
)  # fmt: skip
def test_a_seed_that_cannot_be_is_one_clear_line(run, tmp_path: Path, text: str, error: str) -> None:
    """It names the place."""
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    run("tenant", "apply", str(file), error=error)


def test_a_missing_seed(run, tmp_path: Path) -> None:
    """It's told by name."""
    run("tenant", "apply", str(tmp_path / "none.toml"), error="none.toml")


async def test_changes_at_once_lose_nothing(valkey_url: str, data: Path) -> None:
    """Twenty operators change different limits of a tenant at once: all changes are there."""
    async with redis.asyncio.Redis.from_url(valkey_url) as client:
        store = TenantStore(client, KeySpace(), derived_keys(data).key_pepper)
        await store.create_tenant(TenantId("acme"), "Acme", limits=Limits(), budgets=(Budget("day", "tokens", 1),))
        names = ["weight", "display_name", "metadata", "models", "status"]
        values = [2.0, "New", (("a", "b"),), ("m",), "disabled"]
        changes = [{name: value} for name, value in zip(names, values, strict=True)] * 4
        await asyncio.gather(*(store.change_tenant(TenantId("acme"), **change) for change in changes))
        record = await store.tenant(TenantId("acme"))
    assert values == [getattr(record, name) for name in names]


def test_up_checks_its_seed_first(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A seed that can't be stops `up` before anything is started."""
    file, model = tmp_path / "tenants.toml", tmp_path / "tiny.gguf"
    file.write_text("x = 1")
    model.write_bytes(b"")
    flags = ["--data", str(data), "--port", "0", "--model", str(model), "--tenants", str(file)]
    assert 1 == main(["up", *flags])
    assert "tenants.toml: x: is unknown" in capsys.readouterr().err
    assert not (data / "stack.json").exists()
