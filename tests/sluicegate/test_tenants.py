"""`sluicegate tenant` and `key` against a real Valkey."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from gateway.tenant_store import TenantStore
from protocol.key_space import KeySpace
from sluicegate.command import main
from sluicegate.secrets import derived_keys

pytestmark = pytest.mark.usefixtures("clean_redis")


@pytest.fixture
def clean_redis(valkey_url: str):
    """The commands use the published key names: they are removed, by name, after each test."""
    yield
    with redis.Redis.from_url(valkey_url) as client:
        for key in client.scan_iter(f"{KeySpace().prefix}:*"):
            client.delete(key)


@pytest.fixture
def run(valkey_url: str, data: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A sub-command in this process: exit code, output, errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--redis-url", valkey_url, "--data", str(data)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


async def _tenant_of(secret: str, url: str, data: Path) -> str | None:
    async with redis.asyncio.Redis.from_url(url) as client:
        record = await TenantStore(client, KeySpace(), derived_keys(data).key_pepper).find_key(secret)
        return record and record.tenant


def _key_ids(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines()[1:]]


def test_a_tenant_is_created_listed_and_deleted(run) -> None:
    """The life of a tenant."""
    assert (0, "Created tenant acme. Give it a key with: sluicegate key create acme\n", "") == run(
        "tenant", "create", "acme"
    )
    assert ["acme"] == _key_ids(run("tenant", "list")[1])
    assert (0, "Deleted tenant acme and its 0 keys.\n", "") == run("tenant", "delete", "acme")
    assert [] == _key_ids(run("tenant", "list")[1])


def test_a_key_is_shown_once(run, valkey_url: str) -> None:
    """`key create` prints the key and nothing else; neither a list nor Redis holds it."""
    run("tenant", "create", "acme")
    code, output, errors = run("key", "create", "acme", "--name", "laptop")
    secret = output.strip()
    assert (0, "") == (code, errors)
    assert f"{secret}\n" == output
    assert secret.startswith("sk-sg-")
    listed = run("key", "list")[1]
    assert "laptop" in listed
    assert secret not in listed
    with redis.Redis.from_url(valkey_url) as client:
        stored = client.hgetall(KeySpace().api_keys)
    assert 1 == len(stored)
    assert not any(secret.encode() in part for pair in stored.items() for part in pair)


async def test_a_new_key_is_its_tenants(valkey_url: str, data: Path, sluicegate) -> None:
    """A gateway of the same installation finds the key; one with another master key doesn't."""
    flags = ("--redis-url", valkey_url, "--data", str(data))
    sluicegate("tenant", "create", "acme", *flags)
    secret = sluicegate("key", "create", "acme", *flags).stdout.strip()
    assert "acme" == await _tenant_of(secret, valkey_url, data)
    assert await _tenant_of(secret, valkey_url, data / "another-installation") is None


def test_keys_are_listed_by_tenant(run) -> None:
    """`key list TENANT` leaves out the others'."""
    for tenant in ("one", "two"):
        run("tenant", "create", tenant)
        run("key", "create", tenant)
    everything, ones = _key_ids(run("key", "list")[1]), _key_ids(run("key", "list", "one")[1])
    assert (2, 1) == (len(everything), len(ones))
    assert set(ones) < set(everything)


def test_an_admin_key_says_so(run) -> None:
    """--admin gives the role that the list shows."""
    run("tenant", "create", "ops")
    run("key", "create", "ops", "--admin")
    assert "admin" == run("key", "list")[1].splitlines()[1].split()[3]


def test_a_key_is_revoked_by_its_public_id(run) -> None:
    """A revoked key is gone, the other stays."""
    run("tenant", "create", "acme")
    run("key", "create", "acme")
    run("key", "create", "acme")
    first, second = _key_ids(run("key", "list")[1])
    assert (0, f"Revoked key {first} of tenant acme.\n", "") == run("key", "revoke", first)
    assert [second] == _key_ids(run("key", "list")[1])


def test_deleting_a_tenant_takes_its_keys_only(run) -> None:
    """Nobody else loses a key."""
    for tenant in ("one", "two"):
        run("tenant", "create", tenant)
        run("key", "create", tenant)
    assert "Deleted tenant one and its 1 key.\n" == run("tenant", "delete", "one")[1]
    assert [] == _key_ids(run("key", "list", "one")[1])
    assert 1 == len(_key_ids(run("key", "list", "two")[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tenant", "delete", "nobody"], "there is no tenant 'nobody'"),
        (["key", "create", "nobody"], "there is no tenant 'nobody'"),
        (["key", "revoke", "key_0"], "there is no key 'key_0'"),
        (["tenant", "create", "a{b}"], "invalid tenant name 'a{b}'"),
        (["tenant", "create", ""], "invalid tenant name ''"),
        (["tenant", "create", "x" * 65], "invalid tenant name"),
        (["key", "create", "a:b"], "invalid tenant name 'a:b'"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(run, arguments: list[str], message: str) -> None:
    """Exit code 1, nothing on standard output."""
    code, output, errors = run(*arguments)
    assert (1, "", 1) == (code, output, errors.count("\n"))
    assert errors.startswith(f"sluicegate: {message}")


def test_a_tenant_is_created_once(run) -> None:
    """A second one of the same id is refused."""
    run("tenant", "create", "acme")
    assert (1, "", "sluicegate: tenant 'acme' exists already\n") == run("tenant", "create", "acme")


def test_no_redis_is_one_clear_line(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens there."""
    assert 1 == main(["tenant", "list", "--redis-url", "redis://127.0.0.1:1/0", "--data", str(data)])
    errors = capsys.readouterr().err
    assert errors.startswith("sluicegate: cannot reach Redis: ")
    assert errors.endswith("(start a stack with `sluicegate up`, or name one with --data or --redis-url)\n")
    assert 1 == errors.count("\n")


def test_a_wrong_password_is_one_clear_line(valkey_url: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused password is told, and not shown."""
    url = "redis://:not-the-password@" + valkey_url.partition("@")[2]
    assert 1 == main(["tenant", "list", "--redis-url", url, "--data", str(data)])
    errors = capsys.readouterr().err
    assert errors.startswith("sluicegate: cannot reach Redis: ")
    assert "not-the-password" not in errors


def test_the_running_stack_is_found_by_its_folder(
    valkey_url: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a URL it's the one in stack.json."""
    data.mkdir()
    (data / "stack.json").write_text(f'{{"redis_url": "{valkey_url}"}}')
    assert 0 == main(["tenant", "create", "acme", "--data", str(data)])
    assert "Created tenant acme" in capsys.readouterr().out
