"""Every kind of damage is noticed in every mode that claims it, before a token comes of it, and healed without a trace."""

import pytest
import torch

from worker.faults import KINDS, FaultError, inject

VICTIM, NEIGHBOUR = "Integrity means that " * 12, "Healthy neighbours are"
TABLE_FAULTS = {"flip-lease", "table-off-by-one", "freed-page"}


@pytest.fixture(scope="module")
def clean(lab, result_of) -> dict[str, list]:
    """What the requests answer undisturbed."""
    return {
        prompt: result_of(lab.run(lab.engine(kv_dtype="fp16"), lab.job(prompt, tenant=tenant, **options))[0])
        for prompt, tenant, options in ((VICTIM, "t", VICTIM_OPTIONS), (NEIGHBOUR, "other", {"max_tokens": 24}))
    }


VICTIM_OPTIONS = {"max_tokens": 24, "temperature": 0.8, "seed": 11, "logprobs": 2}


def _run(lab, engine, strike) -> list[list]:
    jobs = lab.job(VICTIM, **VICTIM_OPTIONS), lab.job(NEIGHBOUR, tenant="other", max_tokens=24)
    return lab.run(engine, *jobs, on_step=strike)


@pytest.mark.parametrize("where", ["whole", "filling"])
@pytest.mark.parametrize("kind", KINDS)
def test_full_mode_finds_and_heals_every_kind(lab, result_of, clean, kind, where) -> None:
    """Struck between two steps of a running request: found in the next step, answered as if nothing had been, neighbour untouched."""
    engine = lab.engine(kv_dtype="fp16", integrity="full")
    struck = []

    def strike(number: int) -> None:
        if number == 6:
            (sequence,) = [s for s in engine.scheduler.running if s.tenant == "t"]
            place = 1 if where == "whole" else (sequence.num_computed - 1) // 16
            assert (place < sequence.table.num_whole) == (where == "whole")
            struck.append(inject(engine, kind, tenant="t", place=place))
        if number == 7:
            assert 1 <= engine.integrity.totals.num_violations
            assert not any(s.num_output > 6 for s in engine.scheduler.running if s.tenant == "t")

    victim, neighbour = _run(lab, engine, strike)
    assert struck
    assert clean[VICTIM] == result_of(victim)
    assert clean[NEIGHBOUR] == result_of(neighbour)
    events = engine.integrity.take_events()
    assert {"lease" if kind in TABLE_FAULTS else "read"} == {event.kind for event in events}
    assert "t" in {event.tenant for event in events}
    assert 0 == engine.cache.pool.num_quarantined
    assert engine.integrity.totals.healed >= 1


@pytest.mark.parametrize("kind", sorted(TABLE_FAULTS))
@pytest.mark.parametrize("mode", ["lease", "seal"])
def test_lease_tags_find_wrong_tables(lab, result_of, clean, kind, mode) -> None:
    """In every mode but off."""
    engine = lab.engine(kv_dtype="fp16", integrity=mode)
    victim, neighbour = _run(lab, engine, lambda number: number == 6 and inject(engine, kind, tenant="t", place=1))
    assert clean[VICTIM] == result_of(victim)
    assert clean[NEIGHBOUR] == result_of(neighbour)
    assert ["lease"] == [event.kind for event in engine.integrity.take_events()]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - TABLE_FAULTS - {"foreign-page"}))
@pytest.mark.parametrize("mode", ["seal", "full"])
def test_a_prefix_is_verified_before_its_first_use(lab, result_of, clean, monkeypatch, kind, mode) -> None:
    """Damage to a page that waits in the prefix index: the next request that finds it recomputes from there on."""
    monkeypatch.setattr("worker.integrity.WALKED_PER_STEP", 0)
    engine = lab.engine(kv_dtype="fp16", integrity=mode)

    def strike(number: int) -> None:
        if len(jobs_seen) == 0 and engine.scheduler.running and engine.scheduler.running[0].num_output == 23:
            jobs_seen.append(inject(engine, kind, place=1))

    jobs_seen: list = []
    # Struck before the last step of its own request, which in `seal` mode does not look.
    lab.run(engine, lab.job(VICTIM, **VICTIM_OPTIONS), on_step=strike)
    assert jobs_seen
    found = {event.kind for event in engine.integrity.take_events()}
    assert found == (set() if mode == "seal" else {"read"})
    (again,) = lab.run(engine, lab.job(VICTIM, **VICTIM_OPTIONS))
    assert clean[VICTIM] == result_of(again)
    if mode == "seal":
        assert ["prefix"] == [event.kind for event in engine.integrity.take_events()]
    (warm,) = lab.run(engine, lab.job(VICTIM, **VICTIM_OPTIONS))
    assert clean[VICTIM] == result_of(warm)
    assert [] == engine.integrity.take_events()


def test_the_walk_finds_damage_nobody_asks_for(lab) -> None:
    """A flipped bit in a cached page is found while the worker is idle, within one round of the pool."""
    engine = lab.engine(kv_dtype="fp16", integrity="seal")
    lab.run(engine, lab.job(VICTIM))
    page = next(iter(engine.cache.pool.whole_pages()))
    engine.executor.kv.v.view(torch.uint8)[7, page].view(-1)[5] ^= 1
    for _ in range(engine.cache.pool.num_pages // 16 + 2):
        engine.scrub()
    (event,) = engine.integrity.take_events()
    assert ("scrub", page, 7) == (event.kind, event.page, event.layer)
    assert 0 == engine.cache.pool.num_quarantined
    assert not bool(engine.executor.kv.v.view(torch.uint8)[:, page].any())
    assert page not in engine.cache.pool.whole_pages()


def test_a_second_violation_ends_the_request(lab) -> None:
    """In another step: an error that says so. The neighbour ends well."""
    engine = lab.engine(kv_dtype="fp16", integrity="full")

    def strike(number: int) -> None:
        if number in (5, 9):
            inject(engine, "flip-v", tenant="t", place=1)

    victim, neighbour = _run(lab, engine, strike)
    assert "kv_integrity_error" == victim[-1].code
    assert neighbour[-1].completion_tokens == 24


def test_samples_of_one_request_that_are_hit_together_count_once(lab, result_of) -> None:
    """Three samples read the same damaged page in one step: all start over, none fails."""
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 3}
    (expected,) = lab.run(lab.engine(kv_dtype="fp16"), lab.job(VICTIM, **options))
    engine = lab.engine(kv_dtype="fp16", integrity="full")
    (found,) = lab.run(
        engine, lab.job(VICTIM, **options), on_step=lambda number: number == 6 and inject(engine, "flip-k")
    )
    assert result_of(expected) == result_of(found)
    assert 3 == engine.integrity.totals.num_violations


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("mode", ["off", "lease", "seal", "full"])
def test_modes_change_no_bit_and_raise_no_alarm(lab, result_of, dtype, mode) -> None:
    """Many requests over a small pool: preemption, eviction, hits, forks, aborts; answers are those of a large pool without checks."""
    prompts = [f"Topic {number % 5}: the quick brown fox " * (1 + number % 4) for number in range(12)]
    options = [
        {"n": 1 + number % 3, "temperature": 0.7, "seed": number, "max_tokens": 10 + number} for number in range(12)
    ]
    expected = [
        result_of(lab.run(lab.engine(kv_dtype=dtype, checks_leases=False), lab.job(p, **o))[0])
        for p, o in zip(prompts, options, strict=True)
    ]
    engine = lab.engine(kv_dtype=dtype, kv_tokens=192, checks_leases=mode != "off", integrity=mode)
    jobs = [lab.job(p, tenant=f"t{i % 2}", **o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
    doomed = lab.job("To be aborted " * 8, max_tokens=50)
    replies = lab.run(engine, doomed, *jobs, on_step=lambda number: number == 9 and engine.cancel(doomed.request_id))
    assert expected == [result_of(one) for one in replies[1:]]
    assert 0 == engine.integrity.totals.num_violations
    assert engine.scheduler.num_preemptions > 0


def test_random_bit_flips_are_all_found(lab) -> None:
    """Flips anywhere in keys, values, scales and seals of what a running request reads are found by the step that reads them."""
    engine = lab.engine(kv_dtype="fp8", integrity="full")
    kv, generator = engine.executor.kv, torch.Generator().manual_seed(2)
    found = 0
    for _ in range(40):
        engine.submit(lab.job(VICTIM, max_tokens=4))
        while not any(s.num_output for s in engine.scheduler.running):
            engine.step()
        (sequence,) = engine.scheduler.running
        page = sequence.table.leases[int(torch.randint(len(sequence.table.leases), (), generator=generator))].page
        parts = [kv.k[:, page], kv.v[:, page], kv.seals.tags[:, page], kv.k_scale, kv.v_scale]
        part = parts[int(torch.randint(5, (), generator=generator))]
        flat = part.contiguous().view(torch.uint8).view(-1)
        byte, bit = (
            int(torch.randint(flat.numel(), (), generator=generator)),
            int(torch.randint(8, (), generator=generator)),
        )
        flat[byte] ^= 1 << bit
        part.copy_(flat.view(part.dtype).view(part.shape))
        before = engine.integrity.totals.num_violations
        engine.step()
        found += engine.integrity.totals.num_violations > before
        while engine.has_work:
            engine.step()
    assert 40 == found


@pytest.mark.parametrize("mode", ["off", "full"])
def test_a_forgotten_tenant_leaves_no_byte(lab, result_of, clean, mode) -> None:
    """Running, cached and long freed pages of a deleted tenant are zero; the other tenant's answer goes on."""
    engine = lab.engine(kv_dtype="fp16", integrity=mode)
    kv, pool = engine.executor.kv, engine.cache.pool
    lab.run(engine, lab.job("Gone already: " * 5, max_tokens=3), lab.job(NEIGHBOUR, tenant="other", max_tokens=3))

    def forget(number: int) -> None:
        if number == 6:
            assert len(pool.pages_of("t")) > 4
            engine.forget("t")
            assert [] == pool.pages_of("t")
            kept = set(pool.pages_of("other"))
            others = [page for page in range(pool.num_pages) if page not in kept]
            assert not bool(kv.k[:, others].view(torch.uint8).any())
            assert not bool(kv.v[:, others].view(torch.uint8).any())

    victim, neighbour = _run(lab, engine, forget)
    assert "cancelled" == victim[-1].code
    assert clean[NEIGHBOUR] == result_of(neighbour)
    assert 0 == pool.num_quarantined


def test_a_table_that_leads_outside_the_pool_is_healed(lab, result_of, clean) -> None:
    """An entry beyond the last page is noticed like one that leads to another page; the worker lives."""
    engine = lab.engine(kv_dtype="fp16")

    def strike(number: int) -> None:
        if number == 6:
            (sequence,) = [s for s in engine.scheduler.running if s.tenant == "t"]
            sequence.table.pages[1] = engine.cache.pool.num_pages

    victim, neighbour = _run(lab, engine, strike)
    assert clean[VICTIM] == result_of(victim)
    assert clean[NEIGHBOUR] == result_of(neighbour)
    assert ["lease"] == [event.kind for event in engine.integrity.take_events()]


def test_what_cannot_be_struck_is_an_error(lab) -> None:
    """No request, an unknown kind, a layer that isn't there, forged seals where there are none."""
    engine = lab.engine()
    with pytest.raises(FaultError, match="no running request"):
        inject(engine, "flip-k")
    with pytest.raises(FaultError, match="unknown kind"):
        inject(engine, "melt")
    with pytest.raises(FaultError, match="layer must be 0 to 29"):
        inject(engine, "flip-k", layer=30)
    engine.submit(lab.job(VICTIM, max_tokens=3))
    engine.step()
    with pytest.raises(FaultError, match="--integrity seal or full"):
        inject(engine, "swap-pages")
    while engine.has_work:
        engine.step()
