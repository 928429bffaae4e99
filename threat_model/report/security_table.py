"""The README's security table, made from the table of schemes that the attacks use."""

from threat_model.evidence.schemes import SCHEMES, AttackedScheme
from threat_model.evidence.views import Party

BEGIN, END = "<!-- security-table:begin -->", "<!-- security-table:end -->"

_PARTIES: tuple[tuple[Party, str], ...] = (
    ("executor", "executor"),
    ("helper", "helper"),
    ("executor+helper", "executor and helpers together"),
    ("network", "network, other tenants"),
)

NOT_HIDDEN: tuple[tuple[str, str], ...] = (
    ("The number of rows of a request: batch x tokens, prompt length, sequences in a batch", "shapes, executor"),
    ("Layer and direction: training can be distinguished from generation, and its steps counted", "shapes, executor"),
    ("When generation ends: the number of generated tokens", "shapes, executor"),
    (
        "Which experts rows go to, with `experts = 'counts'`: a decoded token's route tells the token",
        "tokens from routes",
    ),
    (
        "With `ring_bits = 24`: that some rows are sent again, because more than two outputs of each were extreme "
        "(10 rows of 10^6 in the training of a real model, none in its generation)",
        "shapes, executor",
    ),
    ("The same for an observer of the network, from frame sizes and times", "sizes, network"),
    ("That a provider is busy with others: it answers later (its health report counts nobody else's)", "timing"),
    ("The tenant's identity (its certificate), the base model and the providers", "by protocol: mutual TLS, Hello"),
    ("Every row, also in retrospect, if the executor and all helpers combine their logs (`pad`)", "collusion"),
    (
        "That a wrong answer was noticed: the session goes elsewhere or ends (a constant, it depends on no secret)",
        "active adversaries",
    ),
    ("What the tenant publishes: an adapter or a generated text carries what it was trained on", "out of scope"),
)
"""Pairs of (what is hidden, the attack that shows it)."""


def security_table() -> str:
    """Markdown with one row per scheme: what each party learns about rows, and under which assumption."""
    families: dict[str, AttackedScheme] = {}
    for scheme in SCHEMES:
        families.setdefault(scheme.family, scheme)
    lines = [
        "| masking | " + " | ".join(label for _, label in _PARTIES) + " | rests on | results |",
        "|" + "---|" * (len(_PARTIES) + 3),
    ]
    # the scheme that promises most is first
    for name, scheme in sorted(families.items(), key=lambda item: (-_reach(item[1]), item[0])):
        cells = [_cell(scheme, party) for party, _ in _PARTIES]
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {scheme.masking.assumption} | {_results(scheme)} |")
    lines += [
        "",
        "Row counts, stage and timing are visible under every scheme. `symbiosis-priv threat-model` attacks each cell "
        "and fails if one of them is wrong.",
    ]
    return "\n".join(lines)


def _reach(scheme: AttackedScheme) -> int:
    return len(scheme.hides_from)


def _cell(scheme: AttackedScheme, party: Party) -> str:
    if "helper" in party and not scheme.helpers:
        return "no helper"
    return "hidden" if party in scheme.hides_from else "**reads rows**"


def _results(scheme: AttackedScheme) -> str:
    return f"{scheme.masking.error or 'bit-exact'}, {'verified' if scheme.masking.verified else 'not verified'}"
