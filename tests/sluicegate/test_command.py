"""Arguments: help that helps, errors in clear lines, exit codes that scripts can use."""

import subprocess
import sys
from pathlib import Path

import pytest

from sluicegate.command import main

COMMANDS = [
    ["up"], ["down"], ["gateway"], ["worker"], ["chat"], ["tenant"], ["key"], ["model"],
    ["tenant", "create"], ["tenant", "list"], ["tenant", "delete"], ["key", "create"], ["key", "list"], ["key", "revoke"],
    ["model", "list"], ["model", "pull"], ["model", "inspect"],
]  # fmt: skip


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--help explains each flag and ends with 0."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    output = capsys.readouterr().out
    assert 0 == ended.value.code
    assert output.startswith(f"usage: {' '.join(['sluicegate', *command])}")
    lines = output.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        # A long flag's text begins on the next line.
        assert not line.startswith("  --") or len(line.split()) > 1 or following.startswith("      ")


def test_defaults_are_shown_where_they_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    """Not that a switch is off or a list empty; paragraphs stay apart and fit the terminal."""
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    output = capsys.readouterr().out
    assert "(default: 32)" in output
    assert "(default: False)" not in output
    assert "(default: [])" not in output
    assert "INT8 weights.\n\nSRC is" in output
    assert max(map(len, output.splitlines())) <= 80


def test_the_first_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer sees what there is."""
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command[0]} " in output


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """--version names the program and its version."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (0, "sluicegate 0.1.0\n") == (ended.value.code, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["tenant"], "the following arguments are required: ACTION"),
        (["fly"], "invalid choice: 'fly'"),
        (["up", "--fast"], "unrecognized arguments: --fast"),
        (["up", "--work", "2"], "unrecognized arguments: --work 2"),
        (["up", "here"], "unrecognized arguments: here"),
        (["up", "--port", "eighty"], "--port: expected a whole number, got 'eighty'"),
        (["up", "--port", "65536"], "--port: must be 0 to 65535, got 65536"),
        (["up", "--port", "-1"], "--port: must be 0 to 65535, got -1"),
        (["up", "--port"], "--port: expected one argument"),
        (["up", "--workers", "0"], "--workers: must be 1 to 64, got 0"),
        (["up", "--kv-dtype", "fp4"], "--kv-dtype: invalid choice: 'fp4'"),
        (["up", "--kv-tokens", "0"], "--kv-tokens: must be 64 to"),
        (["up", "--kv-tokens", "1e3"], "--kv-tokens: expected a whole number, got '1e3'"),
        (["up", "--page-size", "24"], "--page-size: invalid choice: 24"),
        (["up", "--page-size", "512"], "--page-size: invalid choice: 512"),
        (["up", "--integrity", "strict"], "--integrity: invalid choice: 'strict'"),
        (["up", "--drain-grace", "nan"], "--drain-grace: must be 0 to 86400 seconds, got nan"),
        (["up", "--drain-grace", "-1"], "--drain-grace: must be 0 to 86400 seconds, got -1"),
        (["up", "--drain-grace", "soon"], "--drain-grace: expected seconds, got 'soon'"),
        (["worker", "--kernels", "abacus"], "--kernels: invalid choice: 'abacus'"),
        (["gateway", "--max-body-bytes", "1"], "--max-body-bytes: must be 1024 to"),
        (["chat", "--max-tokens", "0"], "--max-tokens: must be 1 to"),
        (["chat", "--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["key", "create"], "the following arguments are required: tenant"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line says which argument is wrong, and how."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert (2, "") == (ended.value.code, captured.out)
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--data", "{file}"], "cannot use the data folder {file}: File exists"),
        (["up", "--data", "{file}/below"], "cannot use the data folder {file}/below: Not a directory"),
        (["up", "--port", "0", "--model", "nope"], "model 'nope': neither a file or folder, nor a known name"),
        (
            ["up", "--host", "192.0.2.1", "--port", "80"],
            "cannot listen on 192.0.2.1:80: Cannot assign requested address",
        ),
        (["up", "--host", "no.such.host.invalid", "--port", "80"], "cannot listen on no.such.host.invalid:80: "),
        (["worker", "--model", "{file}", "--redis-url", "{redis}"], "{file}: not a GGUF file"),
        (["worker", "--model", "{file}", "--name", "a:b"], "invalid model name 'a:b'"),
        (["model", "pull", "nope"], "model 'nope' is not known"),
        (["tenant", "list", "--data", "{file}"], "cannot read or make the secret {file}/secrets/master.key"),
        (["chat"], "no running stack found; start one with `sluicegate up`, or give --url, --key and --model"),
        (["chat", "--url", "http://127.0.0.1:1"], "--url needs --key (or SLUICEGATE_API_KEY) and --model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failure_is_one_clear_line(
    sluicegate, valkey_url: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Exit code 1, and no traceback."""
    file = tmp_path / "file"
    file.write_text("nothing that is expected")
    result = sluicegate(*[argument.format(file=file, redis=valkey_url) for argument in arguments])
    assert (1, "", 1) == (result.returncode, result.stdout, result.stderr.count("\n"))
    assert result.stderr.startswith("sluicegate: ")
    assert message.format(file=file) in result.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "SLUICEGATE_LOG_LEVEL",
            "loud",
            "SLUICEGATE_LOG_LEVEL: expected one of debug, info, warning, error, got 'loud'",
        ),
        ("SLUICEGATE_MASTER_KEY", "short", "SLUICEGATE_MASTER_KEY: must be hexadecimal"),
    ],
)
def test_a_bad_variable_is_named(sluicegate, variable: str, value: str, message: str) -> None:
    """A setting that can't be used stops the start."""
    result = sluicegate("gateway", "--port", "0", **{variable: value})
    assert (1, f"sluicegate: {message}\n") == (result.returncode, result.stderr)


def test_a_closed_pipe_is_no_traceback() -> None:
    """`sluicegate model list | head -0` ends quietly."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "sluicegate", "model", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    with process.stderr:
        assert "" == process.stderr.read()
    assert 1 == process.wait()


def test_a_model_is_inspected_without_loading_it(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a model is, from its header."""
    assert 0 == main(["model", "inspect", str(smollm2_path)])
    rows = {line[:16].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    assert "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" == rows["sha256"]
    assert ("llama", "30", "49152") == (rows["architecture"], rows["layers"], rows["vocabulary"])
    assert ("9 query, 3 KV, of 64", "8192 tokens", "yes") == (rows["heads"], rows["context"], rows["chat template"])
    assert "23040 bytes in bf16, 11520 in fp8" == rows["KV per token"]


@pytest.mark.parametrize(("name", "message"), [("file", "not a GGUF file"), ("folder", "config.json")])
def test_what_is_no_model_is_one_clear_line(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, and what is wrong with it."""
    (tmp_path / "file").write_text("nothing that is expected")
    (tmp_path / "folder").mkdir()
    assert 1 == main(["model", "inspect", str(tmp_path / name)])
    errors = capsys.readouterr().err
    assert errors.startswith(f"sluicegate: {tmp_path / name}")
    assert message in errors
    assert 1 == errors.count("\n")


def test_models_are_listed_with_their_licence(capsys: pytest.CaptureFixture[str]) -> None:
    """A known model says what it is, and that it isn't here yet."""
    assert 0 == main(["model", "list"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert ["NAME", "SIZE", "LICENSE", "HERE", "DESCRIPTION"] == header.split()
    assert ["smollm2-135m-instruct", "98", "MB", "Apache-2.0", "no"] == rows[0].split()[:5]


def test_bench_gateway() -> None:
    """It measures a gateway over a Valkey of its own, and leaves nothing running."""
    command = [sys.executable, "-m", "sluicegate", "bench", "gateway", "--requests", "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    names = [line.partition(" median")[0].strip() for line in result.stdout.splitlines()]
    steps = ["authentication, key known", "authentication, key looked up", "admission", "admission, 16 at once"]
    assert [*steps, "together, key known, 16 at once", "together, key known", "together, key looked up"] == names
