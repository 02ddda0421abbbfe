"""The closed list of metric names, and the figures of a pair or a contestant under these names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetspec.artifact import PairArtifact

# The closed list of metric names, the same for every pair, so that the UI's compare view lines runs up.
# The part before the first "/" is the section of the chart view; units are in the names.
METRICS = {
    "vocab/target_rows": "rows of the target's output, padding included",
    "vocab/target_text_tokens": "target ids that spell bytes",
    "vocab/drafter_rows": "rows of the drafter's output, padding included",
    "vocab/drafter_text_tokens": "drafter ids that spell bytes",
    "map/intersection_count": "distinct target text tokens with a drafter token of the same bytes",
    "map/target_frac": "share of the target's distinct text tokens in the intersection",
    "map/drafter_frac": "share of the drafter's text tokens in the intersection",
    "map/duplicates_count": "drafter tokens that share their target token with another one",
    "map/controls_mapped_count": "control tokens mapped by role",
    "map/first_frac": "share of the drafter's text tokens whose bytes begin with a target token",
    "corpus/target_covered_frac": "share of a running text's target tokens in the intersection",
    "corpus/drafter_covered_frac": "share of a running text's drafter tokens in the intersection",
    "affinity/nnz_count": "entries of the kernel built last",
    "affinity/reached_targets_count": "target tokens some row of it reaches",
    "affinity/rows_seen_frac": "share of the drafter's text tokens the text showed",
    "affinity/image_mass_frac": "share of the text's drafter tokens whose first target token is meant",
    "affinity/uncertain_mass_frac": "share of the text's drafter tokens whose row leaves it open (K < 0.95)",
    "affinity/text_tokens": "target tokens of the text it was counted on",
    "affinity/tokens_per_second": "target tokens counted per second",
    "affinity/theta_weight": "θ, weight of the cold mean law, as shipped",
    "affinity/lambda_weight": "λ, weight of the kernel, as shipped",
    "affinity/fit_seconds": "time of building and fitting",
    "corpus/calibration_tokens": "target tokens the models were run on",
    "corpus/target_mass_in_intersection_frac": "mean p(I) on the calibration text, the ceiling of TLI",
    "accept/held_out_rate": "mean Σ min(p, π) on held-out contexts of the kernel built last, weights as shipped",
    "accept/held_out_tli_rate": "the same of TLI",
    "accept/held_out_gain": "their difference with the fitted weights",
    "accept/held_out_gain_low": "lower end of its 95 % interval over texts",
    "accept/held_out_gain_high": "upper end",
    "prune/rows_count": "rows kept of the drafter's LM head",
    "prune/rows_frac": "share of them",
    "prune/head_bytes": "bytes of the kept rows",
    "prune/target_mass_frac": "mean p(I ∩ H) on held-out contexts; a curve over the rows kept (step = rows)",
    "prune/tli_rate": "held-out acceptance of TLI; a curve over the rows kept",
    "prune/rdk_rate": "held-out acceptance of the best kernel; a curve over the rows kept",
    "prune/step_seconds": "of a drafter forward; a curve over the rows kept",
    "prune/step_frac": "of a drafter forward, against the whole head",
    "prune/predicted_speedup_ratio": "over plain decoding at the best draft length; a curve over the rows kept",
    "affinity/stops_decided_frac": "share of the text's bytes after a whole token the stop table is sure of (0.9)",
    "affinity/stops_text_tokens": "target tokens of the text it was counted on",
    "predict/tokens_per_target_pass": "expected; a curve over the draft length (step = length)",
    "predict/speedup_ratio": "expected over plain decoding; a curve over the draft length",
    "predict/best_speedup_ratio": "at the best draft length",
    "predict/best_draft_length": "0: plain decoding is faster",
    "predict/drafter_cost_ratio": "c, a drafter forward in target forwards",
    "predict/drafter_forwards_per_candidate": "f",
    "accept/direct_rate": "mean Σ min(p, π) of the first candidate, from the laws (greedy: share of equal argmax)",
    "accept/measured_rate": "accepted share of the judged candidates while generating",
    "accept/tokens_per_target_pass": "committed tokens per pass of the target",
    "speed/tokens_per_second": "median over prompts",
    "speed/ratio_to_plain": "median over prompts of tokens/s against plain decoding",
    "accept/drafter_forwards_per_candidate": "drafter forwards spent on each candidate",
    "speed/align_frac": "share of the time spent between the two tokenizers",
    "speed/efficiency_frac": "share of the time spent inside the two models",
    "cost/build_seconds": "time of the build, tokenizer loading excluded",
    "cost/calibration_seconds": "time of running the models over the calibration text",
    "cost/calibration_memory_bytes": "peak resident memory on top of the loaded models",
    "cost/artifact_bytes": "size of the pair artifact",
}
_AFFINITY_METRICS = {
    "affinity/nnz_count": "nnz",
    "affinity/reached_targets_count": "reached_targets",
    "affinity/rows_seen_frac": "rows_seen_fraction",
    "affinity/image_mass_frac": "image_mass",
    "affinity/uncertain_mass_frac": "uncertain_mass",
    "affinity/text_tokens": "target_tokens",
    "affinity/tokens_per_second": "tokens_per_second",
    "affinity/theta_weight": "theta",
    "affinity/lambda_weight": "lam",
    "affinity/fit_seconds": "seconds",
    "accept/held_out_rate": "held_out_rate",
    "accept/held_out_tli_rate": "held_out_tli_rate",
    "accept/held_out_gain": "gain",
    "accept/held_out_gain_low": "gain_low",
    "accept/held_out_gain_high": "gain_high",
}
_CALIBRATION_METRICS = {
    "corpus/calibration_tokens": "target_tokens",
    "corpus/target_mass_in_intersection_frac": "target_mass_in_intersection",
    "cost/calibration_seconds": "seconds",
    "cost/calibration_memory_bytes": "extra_memory_bytes",
}
_PRUNE_METRICS = {
    "prune/rows_count": "size",
    "prune/rows_frac": "share",
    "prune/head_bytes": "head_bytes",
    "prune/target_mass_frac": "target_mass",
    "prune/tli_rate": "tli",
    "prune/rdk_rate": "rdk_rate",
    "prune/step_seconds": "step_seconds",
    "prune/step_frac": "step_fraction",
    "prune/predicted_speedup_ratio": "speedup",
}
_STOPS_METRICS = {"affinity/stops_decided_frac": "decided", "affinity/stops_text_tokens": "target_tokens"}
BENCH_METRICS = {
    "accept/direct_rate": "acceptance_direct",
    "accept/measured_rate": "acceptance_measured",
    "accept/tokens_per_target_pass": "tokens_per_target_pass",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/ratio_to_plain": "ratio_to_plain",
    "accept/drafter_forwards_per_candidate": "drafter_forwards_per_candidate",
    "speed/align_frac": "align_share",
    "speed/efficiency_frac": "efficiency",
}


def pair_metrics(pair: PairArtifact) -> dict[str, float]:
    """The metrics of a pair under their public names; what was not measured is left out."""
    values: dict[str, Any] = {
        "vocab/target_rows": pair.target.rows,
        "vocab/target_text_tokens": pair.target.text_tokens,
        "vocab/drafter_rows": pair.drafter.rows,
        "vocab/drafter_text_tokens": pair.drafter.text_tokens,
    }
    figures = pair.figures
    if "map" in figures:
        values |= {
            "map/intersection_count": figures["map"]["intersection_count"],
            "map/target_frac": figures["map"]["target_fraction"],
            "map/drafter_frac": figures["map"]["drafter_fraction"],
            "map/duplicates_count": figures["map"]["duplicates"],
            "map/controls_mapped_count": figures["map"]["controls_mapped"],
            "map/first_frac": figures["map"]["first_fraction"],
        }
    if figures.get("corpus", {}).get("bytes"):
        values |= {
            "corpus/target_covered_frac": figures["corpus"]["target_covered"],
            "corpus/drafter_covered_frac": figures["corpus"]["drafter_covered"],
        }
    affinity = figures.get("affinity", {})
    last = pair.provenance.get("build-affinity", {}).get("prior")
    values |= renamed(_AFFINITY_METRICS, affinity.get(last) or next(iter(affinity.values()), {}))
    values |= renamed(_CALIBRATION_METRICS, figures.get("calibration", {}))
    values |= renamed(_PRUNE_METRICS, figures.get("prune", {}))
    values |= renamed(_STOPS_METRICS, figures.get("stops", {}))
    if "seconds" in figures:
        values["cost/build_seconds"] = figures["seconds"]
    return {name: float(value) for name, value in values.items()}


def renamed(names: Mapping[str, str], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures under their metric names; what is not there, or not a number, is left out."""
    return {name: figures[key] for name, key in names.items() if figures.get(key) is not None}
