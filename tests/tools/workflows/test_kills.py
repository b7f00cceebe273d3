"""Runs that are killed, or have no room, go on and end as others do; `tests.tools.workflows.kills` kills many more."""

import pytest

from tests.tools.workflows import kills
from tests.tools.workflows.planning.steady import PATCHED

pytestmark = pytest.mark.slow
NAMES = [pytest.param(name, marks=pytest.mark.long if i else []) for i, name in enumerate(kills.COMMANDS)]


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EVERY", "PATIENCE", "GAIN"):
            patch.setattr(kills.calibrate, name, getattr(kills.calibrate, name))
        patch.setattr(kills.compare, "prepare", kills.compare.prepare)
        for module, name in (*PATCHED, (kills.loads, "MOST"), (kills.loads, "HELD_OUT")):
            patch.setattr(module, name, getattr(module, name))
        kills.prepare(folder)
        yield folder


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_ends_as_an_uninterrupted_one(name, at):
    tally = kills.Tally()
    kills.campaign(name, 2, 7, at, tally)
    assert tally.kills[name] == 2
    assert tally.differ == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("room", [4_000, pytest.param(12_000, marks=pytest.mark.long)])
def test_no_room_is_one_line_and_later_it_goes_on(name, room, at):
    command, out, log = kills.COMMANDS[name], at / f"{name}-{room}", at / f"{name}-{room}.log"
    assert kills.ended(kills.started(command.words(at, out), log, room=room)) == 2
    last = log.read_text().strip().splitlines()[-1]
    assert "Traceback" not in log.read_text()
    assert last.startswith("error: cannot write ")
    assert str(out) in last
    assert "free some space there, or choose another folder" in last
    assert not list(out.rglob(f"*{kills.PART}"))
    assert kills.ended(kills.started(command.words(at, out), log)) == 0
