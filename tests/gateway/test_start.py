"""A gateway's first moments."""

import json

from aiohttp import ClientSession, web

from gateway.app import create_app
from gateway.model_directory import ModelDirectory


async def test_a_gateway_that_has_not_looked_yet_denies_no_model(open_another, monkeypatch) -> None:
    """Until it knows what there is it asks for patience: 503, not 404."""

    async def never(self) -> None:
        """Redis takes its time."""

    async with open_another() as door:
        monkeypatch.setattr(ModelDirectory, "refresh", never)
        blank = ModelDirectory(door.parts.link)
        monkeypatch.setattr(door.parts, "directory", blank)
        monkeypatch.setattr(door.parts.intake, "_directory", blank)
        runner = web.AppRunner(create_app(door.parts), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        body = {"model": "toy/model-1", "messages": [{"role": "user", "content": "Hi"}]}
        async with ClientSession(headers=door.headers) as session:
            async with session.post(
                url + "/v1/chat/completions", data=json.dumps(body), headers={"Content-Type": "application/json"}
            ) as answer:
                assert (503, "starting") == (answer.status, (await answer.json())["error"]["code"])
            async with session.get(url + "/v1/models") as answer:
                assert 503 == answer.status
        await runner.cleanup()
