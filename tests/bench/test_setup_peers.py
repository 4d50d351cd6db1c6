"""Installing peers."""

from pathlib import Path

import pytest

from bench import contenders, setup_peers
from bench.contenders import PACKAGE, PEERS, Peer, Variant


def test_a_peer_that_cannot_be_had_is_noted_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own words reach the table."""
    missing = tmp_path / "no_such_engine-1.0-py3-none-any.whl"
    peer = Peer("openvino", "Ghost", "llamacpp", (Variant("openvino", "Ghost", {}),), (str(missing),))
    for module in (contenders, setup_peers):
        monkeypatch.setattr(module, "PEERS", (peer,))

    setup_peers.set_up(tmp_path / "peers")
    (ghost,) = contenders.peers(tmp_path / "peers")

    assert ghost.unavailable is not None
    assert "cannot be installed" in ghost.unavailable
    assert "no_such_engine" in ghost.unavailable


def test_pins() -> None:
    """Every peer names exact versions, its own and of all that comes along."""
    for peer in PEERS:
        constraints = (PACKAGE / "constraints" / f"{peer.name}.txt").read_text().splitlines()
        assert all("==" in requirement for requirement in (*peer.requirements, *constraints))


def test_an_installed_peer_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a change of what was asked for installs anew."""
    peer = Peer("openvino", "Ghost", "llamacpp", (), ("ghost==1",))
    monkeypatch.setattr(setup_peers, "PEERS", (peer,))
    stamp = tmp_path / "openvino" / ".installed"
    stamp.parent.mkdir()
    stamp.write_text(setup_peers.recipe(peer))

    setup_peers.set_up(tmp_path)

    assert setup_peers.recipe(peer) == stamp.read_text()
    assert not (tmp_path / "openvino.failed").exists()
