"""The time limit of a run."""

from subquad.tools.measure.deadline import GRACE, Deadline


def test_a_deadline_allows_what_fits_and_does_not_count_a_pause(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("subquad.tools.measure.deadline.time.perf_counter", lambda: clock[0])
    deadline = Deadline(60.0)
    clock[0] += 20.0
    assert deadline.left == 40.0
    assert deadline.allows(30.0, reserve=10.0)
    assert not deadline.allows(30.0, reserve=11.0)
    assert deadline.allows_late(40.0 + GRACE * 60)
    assert not deadline.allows_late(41.0 + GRACE * 60)
    with deadline.paused():
        clock[0] += 500.0
    assert deadline.left == 40.0
    assert deadline.part(0.25).left == 10.0
    clock[0] += 50.0
    assert deadline.left == -10.0
    assert deadline.part(0.5).left == 0.0
    assert Deadline(60.0, outside=5.0).left == 55.0
