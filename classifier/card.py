"""Writes a router's card: what it was fitted on and how well it does, beside the plain alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from classifier.artifact import RouterArtifact

_CHOOSERS = (
    ("router", "this router"),
    ("length", "prompt length alone"),
    ("fixed_mix", "best fixed mix, no router"),
    ("oracle", "oracle"),
)


def render_card(artifact: RouterArtifact) -> str:
    """Return the card's text; every number comes from the artifact's own metadata."""
    about = artifact.metadata
    parts = [f"# Router {artifact.version}", _training(about)]
    if metrics := about.get("metrics"):
        parts += [_tier_table(metrics), _ladder_table(metrics), _pair_line(metrics)]
    if novelty := about.get("novelty", {}).get("foreign"):
        parts.append(_novelty(novelty))
    if decision := about.get("decision"):
        parts.append(_decision(decision))
    if confidence := about.get("confidence", {}).get("tiers"):
        parts.append(_confidence(confidence))
    if note := about.get("note"):
        parts.append(str(note))
    return "\n\n".join(parts) + "\n"


def _training(about: Mapping[str, Any]) -> str:
    training, embedding = about["training"], about["embedding"]
    lines = [
        f"- Fitted on {training['num_rows']} prompts ({training['num_groups']} groups): {training['window']}.",
        f"- Labels: {training['label_source']}. Seed {training['seed']}.",
        f"- Features: {len(about['features'])} read off the request, hashed word and character n-grams, embedding: "
        f"{embedding['source']}{' ' + embedding['model'] if embedding['model'] else ''}.",
        f"- Estimators: logistic regression and a forest shared by all tiers, mixed {1 - about['forest_weight']:.2f} : "
        f"{about['forest_weight']:.2f} in log-odds; calibration {', '.join(sorted(set(about['calibration'])))}.",
        "- All figures below are from rows the estimators and their calibration had not seen.",
    ]
    return "\n".join(lines)


def _tier_table(metrics: Mapping[str, Any]) -> str:
    rows = [
        "| tier | right | AUC | by length | log-loss | base rate | ECE | as good as top | AUC | ECE |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in metrics["tiers"]:
        right, good = each["right"], each.get("as_good", {})
        rows.append(
            f"| {each['tier']} | {_percent(each['share_right'])} | {_number(right['auc'])} | "
            f"{_number(each['right_by_length']['auc'])} | {_number(right['log_loss'])} | "
            f"{_number(each['right_by_base_rate']['log_loss'])} | {_number(right['ece'])} | "
            f"{_percent(each.get('share_as_good'))} | {_number(good.get('auc'))} | {_number(good.get('ece'))} |"
        )
    return "\n".join(rows)


def _ladder_table(metrics: Mapping[str, Any]) -> str:
    ladder = metrics["ladder"]
    shares = list(ladder["router"])
    rows = [
        "Cost as a share of the top tier's, at which a share of its quality is held:",
        "",
        "| chosen by | " + " | ".join(shares) + " |",
        "|---" * (len(shares) + 1) + "|",
    ]
    for name, label in _CHOOSERS:
        cells = [_percent(ladder[name][share]) for share in shares]
        if name == "router":
            intervals = [ladder["router_interval"][share] for share in shares]
            cells = [
                f"{c} [{_percent(i['low'])}, {_percent(i['high'])}]" for c, i in zip(cells, intervals, strict=True)
            ]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _pair_line(metrics: Mapping[str, Any]) -> str:
    pair = metrics["pair"]
    apgr = pair["router"]["apgr"]
    return (
        f"Lowest against top tier: APGR {_number(apgr['value'])} [{_number(apgr['low'])}, {_number(apgr['high'])}] "
        f"(random 0.500, longest first {_number(pair['length']['apgr']['value'])}, length fitted "
        f"{_number(pair['length_fitted']['apgr']['value'])}, oracle {_number(pair['oracle']['apgr']['value'])})."
    )


def _novelty(foreign: Mapping[str, Any]) -> str:
    rows = [
        "Share of prompts that read as foreign (sent to the highest permitted tier):",
        "",
        "| prompts | n | above bound |",
        "|---|---|---|",
    ]
    rows += [f"| {name} | {each['n']} | {_percent(each['share'])} |" for name, each in foreign.items()]
    return "\n".join(rows)


def _decision(decision: Mapping[str, Any]) -> str:
    rows = [
        f"Derived for policies, to be held with {decision['confidence']:.0%} confidence, "
        f"{decision['exploration_share']:.0%} exploration included (USD a request, quality against the top tier's):",
        "",
        "| floor | thresholds | cost | quality | quality value | cost | quality |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in decision["floors"]:
        by_floor, by_value = (entry["expected"].get(mode, {}) for mode in ("floor", "benefit"))
        levels = ", ".join(f"{tier}: {level:.3f}" for tier, level in entry.get("thresholds", {}).items()) or "not held"
        rows.append(
            f"| {entry['floor']:g} | {levels} | {_dollars(by_floor.get('cost_usd'))} | "
            f"{_percent(by_floor.get('quality_vs_top'))} | {entry.get('quality_value_usd', 'not held')} | "
            f"{_dollars(by_value.get('cost_usd'))} | {_percent(by_value.get('quality_vs_top'))} |"
        )
    return "\n".join(rows)


def _confidence(tiers: Mapping[str, Any]) -> str:
    rows = [
        "How well each tier's own log-probabilities tell its right answers from its wrong ones, on answers left out:",
        "",
        "| tier | answers | AUC | Brier |",
        "|---|---|---|---|",
    ]
    rows += [
        f"| {tier} | {each['num_rows']} | {_number(each['auc'])} | {_number(each['brier'])} |"
        for tier, each in tiers.items()
    ]
    return "\n".join(rows)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _dollars(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"
