"""The server to compare with: aiohttp and nothing else. `python -m bench.queue.bare PORT`.

POST /json answers a parsed body with a body of the size of a short chat answer. POST /stream/N/M writes N events of the size of a token's, M of
them in each write.
"""

import json
import sys

from aiohttp import web

_ANSWER = {
    "id": "chatcmpl-0123456789abcdef01234567", "created": 0, "model": "synthetic", "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": " badi"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 30, "completion_tokens": 1, "total_tokens": 31},
}  # fmt: skip
_CHUNK = {
    "id": "chatcmpl-0123456789abcdef01234567", "created": 0, "model": "synthetic", "system_fingerprint": "fp_0123456789ab",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": " badi"}, "logprobs": None, "finish_reason": None}],
}  # fmt: skip


async def whole(request: web.Request) -> web.Response:
    """A JSON body in, a JSON body out."""
    await request.json()
    return web.json_response(_ANSWER)


async def stream(request: web.Request) -> web.StreamResponse:
    """Ready-made events, as fast as they go."""
    count, batch = int(request.match_info["count"]), int(request.match_info["batch"])
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    event = b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n"
    for _ in range(count // batch):
        await response.write(event * batch)
    await response.write_eof()
    return response


def main() -> None:
    """Serve until a signal."""
    app = web.Application()
    app.add_routes([web.post("/json", whole), web.post("/stream/{count}/{batch}", stream)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main()
