"""`sluicegate chat`: a conversation in the terminal, streamed from a running stack."""

import http.client
import io
import json
import os
import sys
import urllib.parse
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from sluicegate.environment import data_folder, read_stack
from sluicegate.errors import CommandError

HELP = "/clear forgets the conversation, /system TEXT sets the system prompt, /help shows this, Ctrl-D quits"
TIMEOUT_S = 600.0


class Conversation:
    """Messages so far, and the stack that answers."""

    def __init__(self, url: str, key: str, model: str, max_tokens: int | None, temperature: float | None) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._key = key
        self._options: dict[str, Any] = {"model": model, "stream": True}
        if max_tokens is not None:
            self._options["max_tokens"] = max_tokens
        if temperature is not None:
            self._options["temperature"] = temperature
        self.messages: list[dict[str, str]] = []

    def set_system(self, text: str) -> None:
        """Replace the system prompt; an empty one removes it."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def answer(self, text: str) -> Iterator[str]:
        """Send a message; yields the answer's text as it comes. An answer that is cut off is kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            for part in self._stream():
                parts.append(part)
                yield part
        finally:
            if parts:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=TIMEOUT_S)
        body = json.dumps({**self._options, "messages": self.messages})
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            connection.request("POST", self._url.path.rstrip("/") + "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise CommandError(_error_text(response.read()))
            yield from _texts(response)
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"cannot reach {self._url.geturl()}: {type(error).__name__} {error}") from None
        finally:
            connection.close()  # which cancels an answer that isn't complete


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise CommandError(event["error"].get("message", "the answer failed"))
        for choice in event.get("choices", []):
            if text := choice["delta"].get("content"):
                yield text


def _error_text(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the server answered with an error"


def chat(arguments: Namespace) -> None:
    """Read messages from the terminal, or one a line from a pipe, until their end."""
    conversation = _conversation(arguments)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - gives input() a history and editing keys

        print(HELP)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if arguments.system:
        conversation.set_system(arguments.system)
    while (line := _read_line(is_terminal)) is not None:
        if line.strip():
            _turn(conversation, line.strip(), is_terminal=is_terminal)


def _conversation(arguments: Namespace) -> Conversation:
    stack = read_stack(data_folder(arguments.data)) or {}
    url = arguments.url or stack.get("url")
    key = arguments.key or os.environ.get("SLUICEGATE_API_KEY") or stack.get("key")
    model = arguments.model or stack.get("model")
    if url is None:
        raise CommandError("no running stack found; start one with `sluicegate up`, or give --url, --key and --model")
    if key is None or model is None:
        raise CommandError("--url needs --key (or SLUICEGATE_API_KEY) and --model")
    _check(url, key)
    return Conversation(
        url.removesuffix("/").removesuffix("/v1"), key, model, arguments.max_tokens, arguments.temperature
    )


def _check(url: str, key: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise CommandError("--url: expected http://HOST:PORT or https://HOST:PORT")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise CommandError("--key: expected printable ASCII characters without spaces")


def _read_line(is_terminal: bool) -> str | None:
    try:
        return input("> " if is_terminal else "")
    except EOFError:
        if is_terminal:
            print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _turn(conversation: Conversation, line: str, *, is_terminal: bool) -> None:
    command, _, rest = line.partition(" ")
    if command == "/clear":
        conversation.clear()
    elif command == "/system":
        conversation.set_system(rest.strip())
    elif command == "/help":
        print(HELP)
    else:
        _answer(conversation, line, is_terminal=is_terminal)


def _answer(conversation: Conversation, line: str, *, is_terminal: bool) -> None:
    answer = conversation.answer(line)
    try:
        for text in answer:
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
        print("\n[stopped]")
    except CommandError as error:
        if not is_terminal:
            raise
        print(f"\n[{error}]")
