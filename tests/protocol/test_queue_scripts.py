"""Fair lines, bounds, dead letters and a full Redis: what each script promises, on a real Valkey."""

import re
from collections import Counter

import pytest
import redis

from protocol import pull_script, queue_scripts, submit_script
from protocol.key_space import KeySpace
from protocol.queue_lua import Script


def _serve(queue, rounds: int, cost, worker: str = "w1") -> Counter:
    """Pull and end jobs; each tenant's weighted tokens. `cost(tenant)` is what a job turns out to cost."""
    served: Counter = Counter()
    for _ in range(rounds):
        pulled = queue.pull(worker)
        if pulled is None:
            break
        tenant = pulled["line"].split("/")[1]
        tokens = cost(tenant)
        assert 0 == queue.publish(pulled["id"], worker, 1, pulled["line"], tokens, tokens // 2)
        served[tenant] += tokens
    return served


def test_a_flood_costs_another_tenant_no_place_in_line(queue) -> None:
    """A tenant's first job is the next one that's pulled, however many another tenant has put there before."""
    for number in range(100):
        queue.submit(f"flood{number}", "interactive/flood")
    for _ in range(5):
        queue.pull()
    queue.submit("quiet", "interactive/quiet")
    assert "quiet" == queue.pull()["id"]


def test_service_follows_the_weights(queue) -> None:
    """Three tenants with weights 1, 2 and 4 and jobs of different cost: tokens are served in these shares."""
    weights = {"a": 1, "b": 2, "c": 4}
    costs = {"a": 70, "b": 190, "c": 130}
    for tenant, weight in weights.items():
        for number in range(200):
            queue.submit(f"{tenant}{number}", f"interactive/{tenant}", 20, 100, weight=weight)
    served = _serve(queue, 150, costs.get)
    shares = [served[tenant] / weight for tenant, weight in weights.items()]
    jain = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
    assert jain > 0.99


def test_what_was_really_used_counts(queue) -> None:
    """Two tenants whose jobs look the same, but one's answers are ten times longer: it gets a tenth of the jobs."""
    for number in range(200):
        queue.submit(f"s{number}", "interactive/short", 10, 1000)
        queue.submit(f"l{number}", "interactive/long", 10, 1000)
    served = _serve(queue, 110, {"short": 100, "long": 1000}.get)
    assert 0.8 < served["short"] / served["long"] < 1.25


def test_nobody_saves_up_service_by_being_idle(queue) -> None:
    """A tenant that comes after another was served for long shares from then on; it isn't served alone until it has caught up."""
    for number in range(100):
        queue.submit(f"a{number}", "interactive/a")
    _serve(queue, 60, lambda _: 50)
    for number in range(40):
        queue.submit(f"b{number}", "interactive/b")
    served = _serve(queue, 20, lambda _: 50)
    assert abs(served["a"] - served["b"]) <= 100


def test_batch_waits_but_is_not_starved(queue) -> None:
    """Interactive work goes first; one pull in sixteen is for the batch class."""
    for number in range(100):
        queue.submit(f"b{number}", "batch/a")
        queue.submit(f"i{number}", "interactive/b")
    classes = Counter(queue.pull()["line"].split("/")[0] for _ in range(64))
    assert {"interactive": 60, "batch": 4} == classes


def test_bounds_in_jobs_and_tokens(queue) -> None:
    """Per tenant and per model; the answer says whose bound it was and when to come back; running jobs don't count."""
    bounds = {"jobs": 3, "tokens": 1000, "tenant_jobs": 2, "tenant_tokens": 600}
    assert b"ok" == queue.submit("a1", "interactive/a", **bounds)[0]
    assert b"ok" == queue.submit("a2", "batch/a", **bounds)[0]
    assert [b"full", b"tenant"] == queue.submit("a3", "interactive/a", **bounds)[:2]
    assert [b"full", b"tenant"] == queue.submit("a3", "batch/a", **bounds)[:2]
    assert b"ok" == queue.submit("b1", "interactive/b", **bounds)[0]
    full = queue.submit("c1", "interactive/c", **bounds)
    assert [b"full", b"model"] == full[:2]
    assert full[2] > 0
    for _ in range(3):
        queue.pull()
    assert b"ok" == queue.submit("c1", "interactive/c", prompt=500, **bounds)[0]
    assert [b"full", b"tenant"] == queue.submit("c2", "interactive/c", prompt=100, **bounds)[:2]
    assert [b"full", b"model"] == queue.submit("d1", "interactive/d", prompt=500, **bounds)[:2]


def test_a_job_larger_than_the_bound_is_taken_by_an_empty_queue(queue) -> None:
    """Otherwise nobody could ever send it."""
    assert b"ok" == queue.submit("big", prompt=5000, tokens=100, tenant_tokens=100)[0]
    assert b"full" == queue.submit("more", prompt=1, tokens=100, tenant_tokens=100)[0]


def test_the_time_to_wait_comes_from_the_measured_rate(queue) -> None:
    """Work that gets done ten times as fast lets clients come back ten times as soon."""
    waits = []
    for rate in (100, 1000):
        queue.submit("first", tenant_jobs=1)
        queue.client.hset(queue.fixed.pace, "rate", rate)
        waits.append(queue.submit("second", tenant_jobs=1)[2])
        queue.cancel("first", "interactive/a")
    assert waits[0] == pytest.approx(10 * waits[1], rel=0.05)


def test_nobody_serves_the_model(queue) -> None:
    """Refused, unless the job was accepted before."""
    queue.client.delete(queue.keys.workers("m/1"))
    assert [b"no_worker"] == queue.submit("j")
    assert b"ok" == queue.submit("j", force=1)[0]


def test_deliveries_are_counted_by_redis(queue) -> None:
    """Each worker that is lost with a job counts, one that hands it over doesn't, unless the job may be why."""
    queue.submit("j")
    assert 1 == queue.pull()["deliveries"]
    for attempt in (1, 2):
        queue.expire("j")
        assert "resumed" == queue.resume("j", "interactive/a", attempt)
        assert attempt + 1 == queue.pull()["deliveries"]
    assert 1 == queue.release("j", "w1", "interactive/a", 3)
    assert "resumed" == queue.resume("j", "interactive/a", 3)
    assert 3 == queue.pull()["deliveries"]
    assert 1 == queue.release("j", "w1", "interactive/a", 4, is_delivery=True)
    assert "resumed" == queue.resume("j", "interactive/a", 4)
    assert 4 == queue.pull()["deliveries"]


def test_an_entry_that_nobody_submitted_is_shown_and_buried(queue) -> None:
    """Somebody writes to a line by hand: a worker gets it as what it is, and can put it away; nothing stays."""
    queue.submit("j")
    queue.client.xadd(queue.line("interactive/a"), {"job": "?", "id": "forged", "gw": "g9"})
    queue.submit("k")
    stray = queue.look("w1", "interactive/a")
    assert [b"stray", b"forged", b"interactive/a"] == stray[:3]
    pulled = {"id": "forged", "line": "interactive/a", "entry": stray[3], "deliveries": 1, "envelope": "?"}
    assert 1 == queue.bury(pulled, "w1", "signature")
    assert ["j", "k"] == [queue.pull()["id"], queue.pull()["id"]]
    (entry,) = queue.client.xrange(queue.keys.dead("m/1"))
    assert (b"forged", b"signature", b"?") == tuple(entry[1][name] for name in (b"id", b"reason", b"job"))
    for job_id in "jk":
        queue.publish(job_id, "w1", 1, "interactive/a")
    assert {queue.keys.dead("m/1")} == queue.left()


def test_a_job_whose_entry_was_deleted_by_hand_is_found_lost(queue) -> None:
    """Its gateway can submit it anew, and the count of what waits is right again."""
    queue.submit("j")
    queue.submit("k")
    queue.client.xdel(queue.line("interactive/a"), queue.record("j")[5])
    assert ["j", "x"] == queue.lost(("j", "interactive/a"), ("k", "interactive/a"), ("x", "interactive/a"))
    assert "gone" == queue.resume("j", "interactive/a", 1, force=1)
    assert b"ok" == queue.submit("j", force=1)[0]
    assert ["k", "j"] == [queue.pull()["id"], queue.pull()["id"]]


def test_jobs_of_dead_gateways_are_forgotten_only_if_no_worker_has_them(queue) -> None:
    """And never while the gateway lives."""
    queue.submit("j")
    queue.pull()
    assert 0 == queue.abandon("j", "interactive/a")
    queue.expire("j")
    assert 0 == queue.abandon("j", "interactive/a")
    queue.client.delete(queue.keys.replies("m/1", "g1"))
    assert 1 == queue.abandon("j", "interactive/a")
    assert set() == queue.left()


def test_what_a_dead_gateway_left_hides_nobodys_jobs(queue) -> None:
    """More of its jobs than are looked at in one go, with leases that ended sooner, beside one of a gateway that lives."""
    for number in range(30):
        queue.submit(f"orphan-{number}", gateway="g2")
    queue.submit("mine")
    for _ in range(31):
        queue.expire(queue.pull()["id"])
    queue.client.zadd(queue.fixed.leases, {"mine": 2})
    assert ["mine"] == queue.expired("g1", most=10)
    assert 10 == len(queue.expired(most=10))
    assert 30 == len(queue.expired("g2"))


def test_a_gateway_that_is_gone_is_told_to_the_worker(queue) -> None:
    """Verdict 2, and a job that ends is forgotten all the same."""
    queue.submit("j")
    queue.pull()
    queue.client.delete(queue.keys.replies("m/1", "g1"))
    assert 2 == queue.publish("j", "w1")
    assert 2 == queue.publish("j", "w1", end="interactive/a")
    assert set() == queue.left()


def test_an_idle_worker_is_rung_once_for_each_job(queue) -> None:
    """Rings don't pile up: a look that finds nothing takes them away."""
    for number in range(300):
        queue.submit(f"j{number}")
    assert 128 == queue.client.llen(queue.fixed.doorbell)
    while queue.pull():
        pass
    assert 0 == queue.client.llen(queue.fixed.doorbell)


def test_a_full_redis_refuses_new_work_and_lets_running_work_end(own_server) -> None:
    """At maxmemory: no submission; pulling, renewing, replies, hand-over, resumption and the end all pass."""
    queue = own_server()
    queue.open_replies()
    queue.submit("j")
    queue.client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        queue.submit("k")
    assert "j" == queue.pull()["id"]
    assert queue.renew("j", "w1")
    assert 0 == queue.publish("j", "w1")
    assert 1 == queue.release("j", "w1", "interactive/a")
    assert "resumed" == queue.resume("j", "interactive/a")
    assert "j" == queue.pull()["id"]
    assert 0 == queue.publish("j", "w1", 2, "interactive/a")
    queue.client.config_set("maxmemory", 0)
    assert b"ok" == queue.submit("k")[0]


def test_everything_has_a_time_to_live(queue) -> None:
    """A model that nobody serves or asks for any more leaves nothing behind, whatever state its jobs are in."""
    for number in range(6):
        queue.submit(f"j{number}", "interactive/a" if number % 2 else "batch/b")
    for _ in range(3):
        queue.pull()
    queue.expire("j1")
    queue.resume("j1", "interactive/a")
    assert {key for key in queue.left() if queue.client.ttl(key) < 0} == set()


def test_all_keys_of_a_model_share_a_slot() -> None:
    """One hash tag, the model's name."""
    keys = KeySpace("p")
    names = [*keys.queue("m").all(), keys.line("m", "batch/t"), keys.dead("m"), keys.replies("m", "g"), keys.cancels("m"),
             keys.workers("m"), keys.worker("m", "w"), keys.card("m", "d"), keys.held("m", "w"), keys.bell("m", "w")]  # fmt: skip
    assert {"m"} == {re.search(r"\{(.*?)\}", name).group(1) for name in names}
    assert len(names) == len(set(names))


def test_scripts_name_no_key_themselves() -> None:
    """Keys come in through KEYS: no script builds a name, and none calls what isn't in Redis 7."""
    modules = (queue_scripts, submit_script, pull_script)
    scripts = [value for module in modules for value in vars(module).values() if isinstance(value, Script)]
    assert 12 == len(scripts)
    for script in scripts:
        assert ":" not in re.sub(r"'[entvwl]:'|:match|floor", "", re.sub(r"--.*", "", script.text))
        assert not re.search(r"XACKDEL|XDELEX|XNACK|HEXPIRE|IDMP|INCREX", script.text)
