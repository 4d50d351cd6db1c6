"""Installs the peers, each in an environment of its own, pinned. What cannot be had is noted with the reason and shown in the table."""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench.contenders import PACKAGE, PEERS, Peer, failure_file, peer_python

LAST_LINES = 3


def set_up(folder: Path, only: frozenset[str] = frozenset()) -> None:
    """Make what is missing; a peer whose pins have changed is made anew."""
    folder.mkdir(parents=True, exist_ok=True)
    for peer in PEERS:
        if not only or peer.name in only:
            _set_up_one(peer, folder)


def _set_up_one(peer: Peer, folder: Path) -> None:
    home = folder / peer.name
    stamp = home / ".installed"
    wanted = recipe(peer)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        _say(f"{peer.title}: here")
        return
    hint = " (it compiles for 5 to 15 minutes)" if "--no-binary" in peer.pip_options else ""
    _say(f"{peer.title}: installing {' '.join(peer.requirements)}{hint} ...")
    shutil.rmtree(home, ignore_errors=True)
    failed = failure_file(peer, folder)
    failed.unlink(missing_ok=True)
    try:
        venv.create(home, with_pip=True)
        _pip(peer, folder, "install", "--constraint", str(_constraints(peer)), *peer.pip_options, *peer.requirements)
        if peer.unwanted:
            _pip(peer, folder, "uninstall", "--yes", *peer.unwanted)
        _check_import(peer, folder)
    except subprocess.CalledProcessError as error:
        lines = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines
        failed.write_text(f"cannot be installed: {' / '.join(errors[-LAST_LINES:])[-500:]}", encoding="utf-8")
        _say(f"{peer.title}: {failed.read_text(encoding='utf-8')}")
        return
    stamp.write_text(wanted, encoding="utf-8")
    _say(f"{peer.title}: installed")


def recipe(peer: Peer) -> str:
    """What an installation depends on."""
    environment = [f"{key}={value}" for key, value in sorted(peer.pip_environment.items()) if key == "CMAKE_ARGS"]
    pins = hashlib.sha256(_constraints(peer).read_bytes()).hexdigest()[:16]
    return " ".join([*peer.requirements, *peer.pip_options, *environment, *peer.unwanted, pins])


def _constraints(peer: Peer) -> Path:
    """The versions of all that comes along."""
    return PACKAGE / "constraints" / f"{peer.name}.txt"


def _pip(peer: Peer, folder: Path, *arguments: str) -> None:
    command = [str(peer_python(peer, folder)), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    _run(command, {**os.environ, **peer.pip_environment})


def _check_import(peer: Peer, folder: Path) -> None:
    packages = {"llamacpp": "llama_cpp", "openvino": "openvino_genai", "vllm": "vllm"}
    _run([str(peer_python(peer, folder)), "-c", f"import {packages[peer.module]}"], dict(os.environ))


def _run(command: list[str], environment: dict[str, str]) -> None:
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
