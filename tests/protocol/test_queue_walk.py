"""Any walk through the states of jobs, by several workers and a gateway, with leases that end and groups that are destroyed: Redis agrees with
a model of it after each step, and nothing is left at the end.
"""

from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

LINES = ("interactive/a", "interactive/b", "batch/a", "batch/c")
WORKERS = ("w1", "w2")


@dataclass
class _Job:
    line: str
    state: str = "W"
    owner: str = ""
    attempt: int = 1
    is_expired: bool = False


class Walk(RuleBasedStateMachine):
    """The table of `docs/queue.md`."""

    make = None

    @initialize()
    def start(self) -> None:
        self.queue = type(self).make()
        self.queue.open_replies()
        self.jobs: dict[str, _Job] = {}
        self.returned: list[str] = []
        self.number = 0
        for worker in WORKERS:
            self.queue.hold(worker, worker.encode())

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for job_id, job in list(self.jobs.items()):
            self.queue.expire(job_id) if job.state in "LH" else None
            assert "dropped" == self.queue.cancel(job_id, job.line)
        assert set() == self.queue.left()
        self.queue.clear()

    def _some(self, data, states: str = "WLHR") -> tuple[str, _Job]:
        """One of the jobs in these states. What is drawn doesn't depend on how many there are: that depends on Redis' clock too, and Hypothesis would call it flaky."""
        chosen = [i for i, job in self.jobs.items() if job.state in states]
        job_id = chosen[data.draw(st.integers(0, 255)) % len(chosen)]
        return job_id, self.jobs[job_id]

    def _job_and_worker(self, data) -> tuple[str, _Job, str]:
        """Mostly a job that's leased and its owner: other pairs are refused, which is soon seen."""
        wants_leased, wants_owner = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        leased = any(job.state == "L" for job in self.jobs.values())
        job_id, job = self._some(data, "L" if leased and wants_leased else "WLHR")
        other = data.draw(st.sampled_from(WORKERS))
        return job_id, job, job.owner if job.owner and wants_owner else other

    @rule(line=st.sampled_from(LINES), wanted=st.sampled_from(["", "", *WORKERS]))
    def submit(self, line, wanted) -> None:
        self.number += 1
        job_id = f"j{self.number}"
        result = self.queue.submit(job_id, line, session=wanted.encode(), among=WORKERS)
        assert b"ok" == result[0]
        # Whether that worker has room isn't the walk's business.
        self.jobs[job_id] = _Job(line, owner=wanted if result[2] == b"held" else "")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def submit_again(self, data) -> None:
        """An answer got lost and the gateway asks again."""
        job_id, job = self._some(data)
        assert b"ok" == self.queue.submit(job_id, job.line)[0]

    @rule(worker=st.sampled_from(WORKERS), room=st.sampled_from([1, 9]))
    def pull(self, worker, room) -> None:
        pulled = self.queue.pull(worker, room=room)
        if pulled is None:
            left = [job for job in self.jobs.values() if job.state in "WR"]
            assert all(job.state == "W" and job.owner not in ("", worker) for job in left)
            return
        job = self.jobs[pulled["id"]]
        if self.returned:
            assert pulled["id"] == self.returned.pop(0)
            assert f"attempt after {job.attempt - 1} of {pulled['id']}" == pulled["envelope"]
        else:
            assert "W" == job.state
            older = takewhile(lambda i: i != pulled["id"], [i for i, j in self.jobs.items() if j.line == job.line])
            skipped = [self.jobs[i].owner for i in older if self.jobs[i].state == "W"]
            assert job.owner == worker or not {"", worker} & set(skipped)
            assert f"envelope of {pulled['id']}" == pulled["envelope"]
        assert str(job.attempt) == pulled["attempt"]
        assert pulled["deliveries"] >= 1
        job.state, job.owner, job.is_expired = "L", worker, False

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), ends=st.booleans(), behind=st.sampled_from([0, 0, 1]))
    def publish(self, data, ends, behind) -> None:
        job_id, job, worker = self._job_and_worker(data)
        attempt = job.attempt - behind
        is_ours = job.state == "L" and job.owner == worker and behind == 0
        assert int(not is_ours) == self.queue.publish(job_id, worker, attempt, job.line if ends else None, 30, 10)
        if ends and is_ours:
            del self.jobs[job_id]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def renew(self, data) -> None:
        job_id, job, worker = self._job_and_worker(data)
        is_ours = job.state == "L" and job.owner == worker
        assert is_ours == self.queue.renew(job_id, worker, job.attempt)
        job.is_expired = job.is_expired and not is_ours

    @precondition(lambda self: any(job.state == "L" for job in self.jobs.values()))
    @rule(data=st.data())
    def silence(self, data) -> None:
        job_id, job = self._some(data, "L")
        self.queue.expire(job_id)
        job.is_expired = True

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def hand_over(self, data) -> None:
        job_id, job, worker = self._job_and_worker(data)
        is_ours = job.state == "L" and job.owner == worker
        assert int(is_ours) == self.queue.release(job_id, worker, job.line, job.attempt)
        if is_ours:
            job.state, job.owner = "H", ""

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), force=st.booleans(), twice=st.booleans())
    def resume(self, data, force, twice) -> None:
        job_id, job = self._some(data)
        if job.state in "WR":
            expected = "waiting"
        elif job.state == "L" and not job.is_expired and not force:
            expected = "held"
        else:
            expected = "resumed"
        assert expected == self.queue.resume(job_id, job.line, job.attempt, int(force))
        if expected == "resumed":
            assert "resumed" == self.queue.resume(job_id, job.line, job.attempt, int(force)) or not twice
            job.state, job.owner, job.attempt, job.is_expired = "R", "", job.attempt + 1, False
            self.returned.append(job_id)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        job_id, job = self._some(data)
        if job.state == "L" and not job.is_expired:
            assert "sent" == self.queue.cancel(job_id, job.line)
            return
        assert "dropped" == self.queue.cancel(job_id, job.line)
        self._forget(job_id)

    @precondition(lambda self: any(job.state == "L" for job in self.jobs.values()))
    @rule(data=st.data())
    def bury(self, data) -> None:
        job_id, job = self._some(data, "L")
        record = self.queue.record(job_id)
        pulled = {"id": job_id, "line": job.line, "entry": record[5], "deliveries": 4, "envelope": "x"}
        other = next(worker for worker in WORKERS if worker != job.owner)
        assert 0 == self.queue.bury(pulled, other, "poisonous")
        assert 1 == self.queue.bury(pulled, job.owner, "poisonous")
        self.queue.client.delete(self.queue.keys.dead("m/1"))
        self._forget(job_id)

    @rule(line=st.sampled_from(LINES))
    def destroy_group(self, line) -> None:
        if any(job.line == line for job in self.jobs.values()):
            self.queue.client.xgroup_destroy(self.queue.line(line), "workers")

    @rule()
    def flush_scripts(self) -> None:
        self.queue.client.script_flush()

    def _forget(self, job_id: str) -> None:
        del self.jobs[job_id]
        if job_id in self.returned:
            self.returned.remove(job_id)

    @invariant()
    def records_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        records = {i: self.queue.record(i) for i in self.jobs}
        assert {i: (j.state, j.owner, str(j.attempt), j.line) for i, j in self.jobs.items()} == {
            i: (*r[:3], r[4]) for i, r in records.items()
        }
        assert len(self.jobs) == self.queue.client.hlen(self.queue.fixed.live)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        client, fixed = self.queue.client, self.queue.fixed
        waiting = [job for job in self.jobs.values() if job.state == "W"]
        load = {name.decode(): int(value) for name, value in client.hgetall(fixed.load).items()}
        assert len(waiting) == load.get("n", 0)
        for line in LINES:
            assert sum(job.line == line for job in waiting) == load.get(f"l:{line}", 0)
            assert any(job.line == line for job in self.jobs.values()) == bool(client.exists(self.queue.line(line)))
        for name, ready in (("interactive", fixed.ready_interactive), ("batch", fixed.ready_batch)):
            tenants = {job.line.split("/")[1] for job in waiting if job.line.startswith(name)}
            assert tenants <= {raw.decode() for raw in client.zrange(ready, 0, -1)}

    @invariant()
    def leases_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        held = {i for i, job in self.jobs.items() if job.state in "LH"}
        assert held == {raw.decode() for raw in self.queue.client.zrange(self.queue.fixed.leases, 0, -1)}
        late = {i for i, job in self.jobs.items() if job.state == "H" or job.is_expired}
        assert late == set(self.queue.expired())


@pytest.mark.timeout(300)
def test_every_walk_agrees_with_the_table(make_queue) -> None:
    """Hypothesis looks for a walk that doesn't."""
    Walk.make = staticmethod(make_queue)
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    phases = (
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    )  # to shrink a walk takes minutes, and its steps are told as they are
    chosen = settings(
        max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=checks, phases=phases,
    )  # fmt: skip
    run_state_machine_as_test(Walk, settings=chosen)
