"""The document that describes the API is true: generated requests find no answer that it doesn't describe."""

import asyncio
import json
import re
import sys

import pytest

from gateway.app import create_app
from gateway.intake import field_table as table
from gateway.intake.build import build_call
from gateway.intake.call import IntakeLimits
from gateway.openapi import document
from gateway.settings import GatewaySettings

# What JSON schema can't say (vocabulary and context of the model, fields that need one another) makes some well-formed requests a 400.
EXCLUDED = "positive_data_acceptance"
# Which routes, with whose key, for how long at most, and the fewest requests that this should make.
PARTS = {
    "inference": (("--exclude-path-regex", "^/admin"), "18", 150),
    "admin": (("--include-path-regex", "^/admin"), "14", 150),
}


@pytest.mark.parametrize("part", PARTS)
async def test_generated_requests(gateway, worker, kit, tmp_path, part):
    """Schemathesis, over every route: no 5xx, no undescribed status or shape, wrong data refused, the key needed."""
    routes, budget_s, fewest = PARTS[part]
    await worker()
    running = await gateway(intake_processes=2)
    document = kit.strict_json((await running.get("/openapi.json"))[1])
    for name in ("ChatRequest", "CompletionRequest"):
        document["components"]["schemas"][name]["properties"]["model"] = {"enum": [kit.model]}
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(document))
    key = kit.admin_key if part == "admin" else running.key
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", running.url, "--header", f"Authorization: Bearer {key}", *routes,
        "--exclude-checks", EXCLUDED, "--max-examples", "40", "--max-time", budget_s, "--seed", "1", "--no-color", "--continue-on-failure",
        "--no-shrink", "--generation-database", "none", "--warnings", "off", "--suppress-health-check", "filter_too_much",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert 0 == process.returncode, output[-6000:]
    assert fewest < int(re.search(r"(\d+) generated", output)[1]), output[-2000:]
    # Generated operators may have deleted the tenant.
    assert 200 == ((await running.get("/health/ready")) if part == "admin" else await running.chat())[0]


async def test_every_route_is_described(gateway):
    """The document has the routes of the inference and admin APIs, no other, with their methods."""
    running = await gateway()
    served = set()
    for route in create_app(running.parts).router.routes():
        path = route.resource.canonical
        if route.method != "HEAD" and path.startswith(("/v1/", "/admin/")):
            served.add((path, route.method.lower()))
    described = {
        (path, method)
        for path, item in document(running.parts.settings)["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert served == described
    assert len(served) > 25


def test_every_reference_leads_somewhere():
    """No schema is named that isn't there, and none is there that isn't used."""
    text = json.dumps(document(GatewaySettings("redis://x", b"", b"")))
    schemas = json.loads(text)["components"]["schemas"]
    assert set(schemas) == set(re.findall(r'"#/components/schemas/(\w+)"', text))


def test_every_field_is_described(kit):
    """The names that validation reads are those of the document."""
    read = set()

    class Names(dict):
        def get(self, name, default=None):
            read.add(name)
            return super().get(name, default)

    schemas = document(GatewaySettings("redis://x", b"", b""))["components"]["schemas"]
    for kind, schema, body in (
        ("chat", "ChatRequest", {"messages": [{"role": "user", "content": "x"}]}),
        ("completion", "CompletionRequest", {"prompt": "x"}),
    ):
        read.clear()
        _build(kind, Names({"model": "m", **body, "stream": True, "top_logprobs": 0}))
        assert set(schemas[schema]["properties"]) == read - {"role", "content", "name", *MESSAGE_ONLY}


MESSAGE_ONLY = ("tool_calls", "refusal")


def _build(kind, fields):
    """Run the intake's checks over a dict that notes what's read."""
    from gateway.intake import build
    from gateway.intake.call import ServedModel

    class Encoder:
        vocab_size = 10

        def chat(self, messages):
            return (1,)

        def text(self, text):
            return (1,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "parse_object", lambda body: fields)
        limits = IntakeLimits(16, 64, 3600.0)
        return build_call(kind, b"", {"m": ServedModel("m", "d", 100)}, limits, lambda model: Encoder())


@pytest.mark.parametrize(
    "row", [row for row in (*table.SAMPLING, *table.CHAT) if isinstance(row, table.Number)], ids=lambda row: row.name
)
async def test_bounds_are_those_of_the_document(gateway, worker, kit, row):
    """A number at its bound is taken, one beyond it isn't."""
    await worker()
    running = await gateway()
    described = kit.strict_json((await running.get("/openapi.json"))[1])["components"]["schemas"]["ChatRequest"][
        "properties"
    ][row.name]
    high = described["maximum"]
    low = described.get("minimum", described.get("exclusiveMinimum"))
    assert [200, 400] == [(await running.chat(**{row.name: value}))[0] for value in (high, high + 0.001)]
    is_taken = 200 if "minimum" in described else 400
    assert [is_taken, 400] == [(await running.chat(**{row.name: value}))[0] for value in (low, low - 0.001)]
