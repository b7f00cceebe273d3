"""The benchmarks that can run in seconds do run; their peers are not needed."""

import importlib
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/peers.py, where no peer is installed; torch's global generator is put back afterwards."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    module, contenders = importlib.import_module("peers"), importlib.import_module("contenders")
    found = contenders.version

    def version(package: str) -> str:
        if package in contenders.MODULES:
            raise PackageNotFoundError(package)
        return found(package)

    monkeypatch.setattr(contenders, "version", version)
    with torch.random.fork_rng(devices=[]):
        yield module


def contenders() -> ModuleType:
    """benchmarks/contenders.py, as peers.py has imported it."""
    return sys.modules["contenders"]


def run(peers: ModuleType, *arguments: str):
    return CliRunner().invoke(peers.app, ["--repeats", "2", "--threads", "1", *arguments])


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_without_peers_subquad_and_sdpa_are_measured_and_the_peers_named(peers: ModuleType, tmp_path: Path):
    result = run(peers, "--lengths", "16,130", "--out", str(tmp_path / "peers.md"))
    assert result.exit_code == 0, result.output
    written = (tmp_path / "peers.md").read_text("utf-8")
    for package in peers.MODULES:
        missing = f"{package}: not installed: {contenders().INSTALL[package]}"
        assert missing in result.output
        assert f"- {missing}\n" in written
    shortest, longest = written.split("## 130 tokens")
    for name in ("SDPA", "subquad clustered", "subquad i-clustered"):
        assert len(row(longest, name)) == len(peers.HEAD)
        assert float(row(shortest, name)[-1]) == pytest.approx(0, abs=1e-3)  # each query its own cluster: exact
    assert 0.001 < float(row(longest, "subquad i-clustered")[-1]) < float(row(longest, "subquad clustered")[-1]) < 1


def test_a_peer_that_fails_is_listed_with_the_reason_and_the_others_go_on(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(inputs: object, seed: int):
        raise RuntimeError("no | such\nkernel")

    good = peers.Contender("good", "torch", contenders().exact, "SDPA again", like="subquad clustered")
    monkeypatch.setattr(
        peers, "present", lambda asked: ([peers.Contender("bad", "torch", broken, "nothing"), good], {})
    )
    result = run(peers, "--lengths", "16", "--out", str(tmp_path / "peers.md"))
    assert result.exit_code == 0, result.output
    written = (tmp_path / "peers.md").read_text("utf-8")
    assert "bad failed: RuntimeError: no | such kernel" in result.output
    assert row(written, "bad")[2:] == ["–"] * 8 + ["failed"]
    assert "–" not in row(written, "good")


def test_a_peer_that_fails_while_it_is_timed_leaves_the_rounds_to_the_others(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flaky(inputs: object, seed: int):
        core, calls = contenders().exact(inputs, seed), iter(range(6))  # warming up takes 4, the rounds of forward 2

        def run():
            if next(calls, None) is None:
                raise RuntimeError("no luck")
            return core.run()

        return contenders().Core(run, core.leaves)

    found = [
        peers.Contender("flaky", "torch", flaky, "SDPA again"),
        peers.Contender("good", "torch", contenders().exact, ""),
    ]
    monkeypatch.setattr(peers, "present", lambda asked: (found, {}))
    result = run(peers, "--lengths", "16", "--out", str(tmp_path / "peers.md"))
    assert result.exit_code == 0, result.output
    written = (tmp_path / "peers.md").read_text("utf-8")
    assert "- flaky failed: RuntimeError: no luck\n" in written
    assert row(written, "flaky")[2:] == ["–"] * 8 + ["failed"]
    assert row(written, "good")[2] != "–"


def test_a_peer_that_cannot_be_imported_is_named_with_the_reason(peers: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contenders(), "version", lambda package: "0.0")
    monkeypatch.setitem(peers.MODULES, "linformer", "a_module_that_is_not_there")
    found, absent = peers.present(["linformer"])
    assert not found
    assert absent == {
        "linformer": "0.0 cannot be imported: ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512,many"], "separated by commas"),
        (["--peers", "flash"], "no peer flash; there are"),
        (["--out", "nowhere/peers.md"], "there is no folder nowhere"),
    ],
)
def test_mistakes_end_in_a_message(peers: ModuleType, arguments: list[str], message: str):
    result = run(peers, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())


def test_time_and_speed_agree_and_sdpa_has_its_own_quartiles(peers: ModuleType):
    """By their own medians these rounds say 9 times faster, by most pairs slower."""
    seconds = {"SDPA": [0.9, 11.0, 9.0], "good": [1.0, 1.0, 10.0]}
    sdpa, good = (
        peers.timing(peers.Contender(name, "torch", contenders().exact, ""), seconds).cost for name in ("SDPA", "good")
    )
    assert (sdpa.ms_low, sdpa.ms, sdpa.ms_high) == (pytest.approx(4950), 9000, 10000)
    assert good.speedup < 1
    assert good.ms > sdpa.ms
