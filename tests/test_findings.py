"""The block that says what came out."""

from __future__ import annotations

from typing import Any

from knockout.verdicts.findings import findings

SUMMARY = {"complete": True, "tokens_generated": 1000, "tokens_naive": 4300, "luck": None}


def row(name: str, delta: float, verdict: str = "neutral", **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "benchmark": "maths",
        "candidate": name,
        "group": "candidate",
        "delta": delta,
        "verdict": verdict,
        "evidence": "undetermined" if verdict == "neutral" else "effect",
    }
    for kind, half in (("ci", 0.1), ("eq", 0.08)):
        values |= {f"{kind}_low": delta - half, f"{kind}_high": delta + half}
    return {**values, "ci_low_fdr": delta - 0.2, "ci_high_fdr": delta + 0.2, **more}


def said(rows: list[dict[str, Any]], rule: str = "fdr", **summary: Any) -> Any:
    return findings(rows, SUMMARY | summary, rule=rule, alpha=0.05, margin=0.02, folder="runs/x")


def test_findings_are_named_with_the_interval_of_the_rule() -> None:
    rows = [row("all digits", -0.4, "strong_pillar"), row('" so"', 0.0)]
    assert said(rows).headline == (
        "2 candidates by rule fdr at 0.05: 1 pillar: all digits −0.400 [−0.600, −0.200]; no stumbling block"
    )
    assert "[−0.500, −0.300]" in said(rows, "nominal").headline
    # The table shows the plain interval: that the headline's is wider must be explained there.
    assert "false coverage rate 0.05" in said(rows).context[0]
    assert not any("false coverage" in line for line in said(rows, "nominal").context)


def test_pooled_rows_speak_for_all_benchmarks() -> None:
    rows = [row("a", -0.3, "strong_pillar"), row("a", -0.1, benchmark="pooled")]
    assert "no pillar" in said(rows).headline


def test_luck_and_controls_stand_beside_the_count() -> None:
    luck = {"maths": {"observed": 3, "mean": 0.5, "quantile_95": 2}}
    rows = [row("a", -0.3, "strong_pillar"), row("b", 0.0, group="control")]
    context = " ".join(said(rows, luck=luck).context)
    assert "0 of 1 control row called" in context
    assert "3 rows would be called; luck alone brings 0.5 on average" in context


def test_the_next_step_depends_on_what_is_missing() -> None:
    assert "repeat the command" in said([row("a", 0.0)], complete=False).next_steps[0]
    found = [row("a", -0.3, "strong_pillar"), row("b", 0.0, evidence="equivalent")]
    assert said(found).next_steps == (
        "`knockout confirm runs/x` measures the findings again on fresh seeds",
    )
    (step,) = said([row("a", 0.0), row("b", 0.02)]).next_steps
    assert "2 of 2 rows undetermined" in step
    assert "margin of 0.09" in step


def test_a_run_without_rows_says_so() -> None:
    nothing = said([], complete=False, tokens_generated=0, tokens_naive=0)
    assert nothing.headline == "No verdict yet: no cell has finished."
    assert nothing.cost == "Nothing has been generated yet."
