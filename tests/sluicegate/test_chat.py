"""The chat in the terminal, against a small server that notes what it is asked."""

import http.server
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluicegate.chat import Conversation
from sluicegate.command import main
from sluicegate.errors import CommandError


class FakeGateway(http.server.ThreadingHTTPServer):
    """Answers with the pieces in `answers`, one list a request; `requests` are the bodies that came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answers: list[list[str] | tuple[int, bytes]] = []
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.has_lost_client = threading.Event()
        self.is_endless = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answering(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.headers.append({"path": self.path, "authorization": self.headers["Authorization"]})
        answer = server.answers.pop(0)
        if isinstance(answer, tuple):
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(answer[1])
            return
        self.send_response(200)
        self.end_headers()
        for text in answer:
            self._send(text)
        try:
            while server.is_endless:
                self.wfile.write(b": ping\n\n")
        except OSError:
            server.has_lost_client.set()
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, text: str) -> None:
        event = (
            {"choices": [{"index": 0, "delta": {"content": text}}]} if not text.startswith("{") else json.loads(text)
        )
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_) -> None:
        """Silence."""


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A server on a free port."""
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def say(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple]:
    """`sluicegate chat` with lines from a pipe: exit code, output, errors."""

    def run(text: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(["chat", "--url", gateway.url, "--key", "sk-test-key", "--model", "tiny", *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _messages(request: dict) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in request["messages"]]


def test_each_line_of_a_pipe_is_a_message(say, gateway: FakeGateway) -> None:
    """Answers are written as they come; the second question carries the first and its answer."""
    gateway.answers = [["Par", "is."], ["Rome."]]
    assert (0, "Paris.\nRome.\n", "") == say("France?\n\nItaly?\n")
    assert [("user", "France?")] == _messages(gateway.requests[0])
    assert [("user", "France?"), ("assistant", "Paris."), ("user", "Italy?")] == _messages(gateway.requests[1])


def test_a_question_is_asked_as_the_api_wants_it(say, gateway: FakeGateway) -> None:
    """Path, key, model and options."""
    gateway.answers = [["x"]]
    say("hi", "--max-tokens", "7", "--temperature", "0")
    assert [{"path": "/v1/chat/completions", "authorization": "Bearer sk-test-key"}] == gateway.headers
    (request,) = gateway.requests
    assert ("tiny", True, 7, 0.0) == tuple(request[name] for name in ("model", "stream", "max_tokens", "temperature"))


def test_options_that_were_not_given_are_not_sent(say, gateway: FakeGateway) -> None:
    """The server's defaults hold."""
    gateway.answers = [["x"]]
    say("hi")
    assert {"model", "stream", "messages"} == set(gateway.requests[0])


def test_clear_forgets_all_but_the_system_prompt(say, gateway: FakeGateway) -> None:
    """/clear begins anew under the same rules."""
    gateway.answers = [["one"], ["two"]]
    say("a\n/clear\nb\n", "--system", "Be brief.")
    assert [("system", "Be brief."), ("user", "b")] == _messages(gateway.requests[1])


def test_the_system_prompt_can_change(say, gateway: FakeGateway) -> None:
    """/system TEXT replaces it, /system alone removes it; the conversation stays."""
    gateway.answers = [["1"], ["2"]]
    say("/system Be kind.\na\n/system\nb\n", "--system", "Be brief.")
    assert [("system", "Be kind."), ("user", "a")] == _messages(gateway.requests[0])
    assert [("user", "a"), ("assistant", "1"), ("user", "b")] == _messages(gateway.requests[1])


def test_help_is_no_message(say, gateway: FakeGateway) -> None:
    """/help explains the commands and asks nothing."""
    code, output, _ = say("/help\n")
    assert 0 == code
    assert "/clear" in output
    assert [] == gateway.requests


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, b'{"error": {"message": "No such key."}}'), "No such key."),
        ((502, b"<html>"), "the server answered with an error"),
        ((500, b'{"error": "x"}'), "the server answered with an error"),
        (["Par", '{"error": {"message": "The worker was lost."}}'], "The worker was lost."),
    ],
)
def test_an_error_ends_a_pipe(say, gateway: FakeGateway, answer, message: str) -> None:
    """The server's message is the one line; a script sees exit code 1."""
    gateway.answers = [answer]
    code, _, errors = say("hi\nnever asked\n")
    assert (1, f"sluicegate: {message}\n") == (code, errors)
    assert 1 == len(gateway.requests)


def test_a_gateway_that_is_away_is_one_clear_line(monkeypatch, capsys) -> None:
    """Nothing listens there."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert 1 == main(["chat", "--url", "http://127.0.0.1:1", "--key", "sk-test-key", "--model", "tiny"])
    errors = capsys.readouterr().err
    assert errors.startswith("sluicegate: cannot reach http://127.0.0.1:1")
    assert 1 == errors.count("\n")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_be_given_as_clients_want_it(say, gateway: FakeGateway, suffix: str) -> None:
    """With or without /v1."""
    gateway.answers = [["ok"]]
    say("hi", "--url", gateway.url + suffix)
    assert "/v1/chat/completions" == gateway.headers[0]["path"]


def test_the_running_stack_is_the_default(gateway: FakeGateway, data: Path, monkeypatch, capsys) -> None:
    """URL, key and model come from stack.json."""
    data.mkdir()
    (data / "stack.json").write_text(json.dumps({"url": gateway.url, "key": "sk-demo-key", "model": "demo-model"}))
    gateway.answers = [["hello"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert 0 == main(["chat", "--data", str(data)])
    assert ("demo-model", "Bearer sk-demo-key") == (gateway.requests[0]["model"], gateway.headers[0]["authorization"])
    assert "hello\n" == capsys.readouterr().out


def test_a_stopped_answer_is_cancelled_and_kept_so_far(gateway: FakeGateway) -> None:
    """Leaving an answer closes the connection, which cancels it; the next question knows what was said."""
    gateway.answers, gateway.is_endless = [["Once"]], True
    conversation = Conversation(gateway.url, "sk-test-key", "tiny", None, None)
    answer = conversation.answer("Tell me a story.")
    assert "Once" == next(answer)
    answer.close()
    assert gateway.has_lost_client.wait(10)
    said = [(message["role"], message["content"]) for message in conversation.messages]
    assert [("user", "Tell me a story."), ("assistant", "Once")] == said


def test_a_failed_question_is_forgotten(gateway: FakeGateway) -> None:
    """Two questions in a row would confuse a chat template."""
    gateway.answers = [(503, b"")]
    conversation = Conversation(gateway.url, "sk-test-key", "tiny", None, None)
    with pytest.raises(CommandError):
        list(conversation.answer("hi"))
    assert [] == conversation.messages
