"""The benchmark: contestants alternate, greedy texts are compared, finished runs are not run again."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from hetspec.errors import InvalidInput
from hetspec.prep.report import speed_plots
from hetspec.prompts import QUESTIONS, prompts_of
from hetspec.runtime import laws
from hetspec.runtime.laws import Warping
from hetspec.runtime.race import PLAIN, WARM_UP_PROMPT, Entrant, Race, Runner, is_theirs, run_race, summary
from tests.test_runtime import CODE, TinyPair

NAMES = (PLAIN, "none", "slem:3", "tli:2:token", "slrs", "auto", "hf-slem:3", "hf-slem:default")


@pytest.fixture(scope="module")
def engine():
    return TinyPair().engine()


def race(names=NAMES, **options):
    collections = {"code": [CODE[:60], CODE[100:170]], "short": ["x = 1"]}
    return Race(collections, tuple(Entrant.parse(n, "auto") for n in names), max_new_tokens=10, **options)


def test_names():
    assert Entrant.parse("slem:5", "3") == Entrant("slem:5", "slem", "5")
    assert Entrant.parse("slrs", "auto") == Entrant("slrs", "slrs", "auto")
    assert Entrant.parse("tli:token", "4") == Entrant("tli:token", "tli", "4", "token")
    assert Entrant.parse("hf-slem", "4").length == "default"
    assert Entrant.parse("auto", "4").length == "auto"
    assert Entrant.parse("auto:3", "4").length == "3"
    for bad in ("magic", "slem:many", "slem:3:often", "hf-plain:token", "hf-slem:auto", "tli:3:4"):
        with pytest.raises(InvalidInput, match=r"contestant"):
            Entrant.parse(bad, "5")


def test_greedy_texts_are_those_of_transformers_and_every_figure_is_there(engine):
    setting = race()
    results = run_race(engine, setting)
    assert len(results) == 3 * len(NAMES)
    rows = summary(setting, results)
    assert [(r["collection"], r["name"]) for r in rows] == [(c, n) for c in ("code", "short") for n in NAMES]
    for row in rows:
        assert row["identical"] == row["prompts"]
        assert (
            row["ratio_to_plain"]["low"] <= row["ratio_to_plain"]["median"] <= row["ratio_to_plain"]["high"]
        )
        if row["name"] == PLAIN:
            assert row["ratio_to_plain"]["median"] == 1.0
        if row["name"].startswith("hf-"):
            assert row["efficiency"] is None
        else:
            assert 0 < row["efficiency"] <= 1
            assert sum(row["shares"].values()) == pytest.approx(1, rel=0.03)
            assert row["tokens_per_target_pass"] >= 1


def test_contestants_take_turns_at_going_first(engine):
    setting = race(NAMES[:3])
    first = [r.contestant for r in run_race(engine, setting) if r.collection == "code"][:: len(NAMES[:3])]
    assert first == [PLAIN, "none"]


def test_sampled_runs_repeat_with_the_seed_and_assisted_is_refused(engine):
    runs = [run_race(engine, race((PLAIN, "tli:2", "slrs:2"), temperature=1.0, seed=s)) for s in (1, 1, 2)]
    assert [r.ids for r in runs[0]] == [r.ids for r in runs[1]] != [r.ids for r in runs[2]]
    with pytest.raises(InvalidInput, match="greedy only"):
        run_race(engine, race((PLAIN, "hf-slem:3"), temperature=1.0))


def test_an_interrupted_race_goes_on(engine, tmp_path, monkeypatch):
    log = tmp_path / "runs.jsonl"
    setting = race(NAMES[:4])
    whole = run_race(engine, setting, resume=log)
    lines = log.read_text().splitlines()
    assert len(lines) == len(whole) == 12
    log.write_text("\n".join([*lines[:7], lines[7][:20]]) + "\n")  # killed while writing
    ran = []
    honest = Runner.run
    monkeypatch.setattr(
        Runner, "run", lambda self, c, *a, **k: ran.append(c.name) or honest(self, c, *a, **k)
    )
    again = run_race(engine, setting, resume=log)
    assert [(r.contestant, r.ids) for r in again] == [(r.contestant, r.ids) for r in whole]
    assert len(ran) == 4 + 5  # warm-up, and what was missing
    other = race(NAMES[:4], temperature=0.5)
    ran.clear()
    run_race(engine, other, resume=log)
    assert len(ran) == 4 + 12  # runs of another setting do not count


def test_screening_keeps_plain_decoding_and_the_fastest_of_either_kind(engine):
    results = run_race(engine, race((PLAIN, "none", "slem:3", "hf-slem:3", "hf-slem:default")), screen=1.0)
    second = [r.contestant for r in results if r.collection == "code" and r.prompt == 1]
    assert PLAIN in second
    assert sorted(is_theirs(name) for name in second) == [False, True, True]


def first_tokens(engine, runs):
    """χ² per degree of freedom of transformers' token-level sampling: the law of first tokens."""
    setting = race((PLAIN, "hf-tli:2"), temperature=0.7)
    runner = Runner(engine, setting)
    prompt = setting.collections["code"][0]
    ids = engine.decoder(prompt, algorithm="none", max_new_tokens=1).ids
    p = laws.law(engine.target.model.new_row().forward(ids, 1)[0], Warping(0.7))
    counts = torch.zeros_like(p)
    for number in range(runs):
        new, _, _ = runner.run(setting.contestants[1], prompt, number, tokens=3)
        counts[new[0]] += 1
    expected = runs * p
    big = expected >= 5
    seen = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    assert len(seen) > 3
    return float(((seen - wanted) ** 2 / wanted).sum()) / (len(seen) - 1)


def test_transformers_token_level_sampling_is_repaired(monkeypatch):
    pair = TinyPair(std=0.15)
    assert first_tokens(pair.engine(), 160) < 2
    monkeypatch.setattr("hetspec.runtime.race.ordered_translation", contextlib.nullcontext)
    assert first_tokens(pair.engine(), 160) > 20  # as it ships


def test_the_callers_models_stay_as_they_are(engine):
    before = [json.dumps(s.model.model.generation_config.to_dict()) for s in (engine.target, engine.drafter)]
    run_race(engine, race((PLAIN, "hf-slem:3", "hf-slem:default")))
    after = [json.dumps(s.model.model.generation_config.to_dict()) for s in (engine.target, engine.drafter)]
    assert before == after


def test_chats_are_messages():
    chats = prompts_of("chat", 3)
    assert [c[0]["content"] for c in chats] == list(QUESTIONS[:3])


def test_long_prompts_and_the_longest():
    long, longest = prompts_of("long", 2), prompts_of("longest", 2)
    assert len(set(long)) == 2
    assert len(longest) == 1
    assert len(longest[0]) > 3.9 * len(long[0]) > 3.9 * 8000


def test_the_warm_up_reads_little_of_a_long_prompt(engine, monkeypatch):
    lengths = []
    honest = Runner.run

    def spied(self, contestant, prompt, number, **options):
        lengths.append(len(self.ids_of(prompt)))
        return honest(self, contestant, prompt, number, **options)

    monkeypatch.setattr(Runner, "run", spied)
    setting = Race({"code": [CODE[:600]]}, (Entrant.parse(PLAIN, "0"),), max_new_tokens=4)
    run_race(engine, setting)
    assert lengths[0] == WARM_UP_PROMPT < lengths[1]


def test_runs_of_another_setting_do_not_count(engine, tmp_path):
    runs = tmp_path / "runs.jsonl"
    names = (PLAIN, "slem:3")
    run_race(engine, race(names, setting={"draft_weights": "own"}), resume=runs)
    run_race(engine, race(names, setting={"draft_weights": "int4"}), resume=runs)
    keys = [json.loads(line)["key"]["draft_weights"] for line in runs.read_text().splitlines()]
    assert keys == ["own"] * 6 + ["int4"] * 6


def test_the_plots_show_every_contestant(engine):
    setting = race(NAMES[:4])
    rows = [r for r in summary(setting, run_race(engine, setting)) if r["collection"] == "code"]
    plots = speed_plots(engine.pair, "code, temperature 0", rows)
    assert set(plots) == {"plots/speed.png", "plots/time.png"}
    labels = [label.get_text() for label in plots["plots/speed.png"].axes[0].get_yticklabels()]
    assert labels == list(NAMES[:4])
    assert [label.get_text() for label in plots["plots/time.png"].axes[0].get_yticklabels()] == list(
        NAMES[1:4]
    )
