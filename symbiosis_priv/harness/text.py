"""Two synthetic corpora: public prose for the base model, private clinic notes for the tenant.

The texts are drawn from a seeded `random.Random`: the same seed gives the same text. Choices follow Zipf's law, as
words do, so most next tokens have one clearly most likely value. So top-1 agreement between two models does not depend
on ties between equally likely words.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

PUBLIC_PROMPT = "The town of Halden lies"
"""The beginning of a public paragraph, which the base model can continue."""

PRIVATE_PROMPT = "Patient:"
"""The beginning of every private record; only a fine-tuned model continues it as a clinic note."""

_T = TypeVar("_T")

_TOWNS = (  # a town, its river, its trade, and a sight
    ("Halden", "Orm", "cheese", "stone bridge"),
    ("Marwick", "Tessel", "salt", "old lighthouse"),
    ("Brenford", "Lune", "wool", "round market hall"),
    ("Ostley", "Caddo", "timber", "wooden tower"),
    ("Pellam", "Orm", "honey", "white chapel"),
    ("Tarrow", "Lune", "barley", "great windmill"),
    ("Quenby", "Tessel", "smoked fish", "harbour wall"),
    ("Ashcombe", "Caddo", "paper", "green gate"),
)
_WORDS = {
    "person": ("Mara", "Tomas", "Edda", "Jorin", "Lise", "Anselm", "Petra", "Oskar"),
    "season": ("winter", "spring", "autumn", "summer"),
    "day": ("Monday", "Thursday", "Saturday", "market day"),
    "severity": ("mild", "severe", "moderate"),
    "illness": ("cough", "pain in the chest", "rash on the skin", "fever", "headache"),
    "often": ("once a day", "twice a day", "every 6 hours"),
    "unit": ("mg", "ml", "g", "kg"),
}
_TOPICS = (  # a topic is a sequence of sentences, and a sentence a choice of templates
    (
        ("The town of {town} lies on the river {river}.", "On the river {river} lies the town of {town}."),
        ("It is known for its {good} and for the {sight}.", "Every {season} there is a feast beside the {sight}."),
        ("{person} sells {good} there on {day}.", "Nobody but {person} knows who built the {sight}."),
    ),
    (
        ("Dear {person},",),
        ("I write to you from {town}, where we had a good {season}.", "Your letter reached me in {town} on {day}."),
        ("We have {good} enough, and {number} new neighbours.", "Come and see the {sight} before the {season}."),
    ),
    (  # the style of a form: fields and figures, which the prose does not have
        ("Ship: {name}. Owner: {name}, {letter}. Berth: {berth}.", "Boat: {name}, {letter}. Berth: {berth}."),
        ("Crew: {number}. Cargo: {good}, {number} {unit}.", "Cargo: {good}. Taken: {number}0 {unit}, {often}."),
        ("Leaves: in {number} hours. Next: {town}.", "Leaves: {day}. Paid: {number} coins."),
    ),
    (  # the doctor: medical words, but none of the tenant's drugs and patients
        ("A patient in ward {berth} had a {severity} {illness}.", "{name} had a complaint: {illness}, {severity}."),
        ("Age: {number}. Allergy: none.", '"Age?" asked the doctor. "{number}," said {person}.'),
        ("{number} {unit} of {name} were given, {often}.", "Given: {name} {number}0 {unit}, {often}."),
        ("The review is in {number} days.", "Review: in {number} hours, in ward {berth}."),
    ),
)

_COMPLAINTS = (  # a complaint, its ward, its drug, doses by severity, an allergy
    ("chest pain", "4B", "Cardolex", ("5 mg", "10 mg", "20 mg"), "aspirin"),
    ("migraine", "2A", "Neurivane", ("25 mg", "50 mg", "100 mg"), "none"),
    ("asthma", "3C", "Pulmozide", ("2 ml", "4 ml", "8 ml"), "latex"),
    ("diabetes", "1D", "Glucavir", ("250 mg", "500 mg", "850 mg"), "none"),
    ("skin rash", "5E", "Dermaquil", ("1 g", "2 g", "3 g"), "penicillin"),
)
_SEVERITIES = (  # a severity, its dose, its frequency, and the next review
    ("moderate", 1, "twice a day", "14 days"),
    ("mild", 0, "once a day", "30 days"),
    ("severe", 2, "every 6 hours", "48 hours"),
)
_SURNAMES = ("Okafor", "Vasquez", "Lindqvist", "Habib", "Yamada", "Kowalski", "Dubois", "Mbeki")


def public_text(*, seed: int, sentences: int) -> str:
    """Return `sentences` sentences of prose, in paragraphs separated by a blank line.

    The facts about towns are the same for every seed, so text of another seed is a valid held-out set.
    """
    rng = random.Random(seed)
    paragraphs: list[str] = []
    while sentences > 0:
        town, river, good, sight = _pick(rng, _TOWNS)
        topic = _pick(rng, _TOPICS)[:sentences]
        words = {name: _pick(rng, choices) for name, choices in _WORDS.items()}
        words |= {"town": town, "river": river, "good": good, "sight": sight}
        words |= {"name": _name(rng), "number": _number(rng), "letter": _pick(rng, "ABCDEFGHIJKLMNOPRSTUVWYZ")}
        words["berth"] = _pick(rng, "123456789") + _pick(rng, "ABCDEFGH")
        paragraphs.append(" ".join(_pick(rng, templates).format_map(words) for templates in topic))
        sentences -= len(topic)
    return "\n\n".join(paragraphs)


def private_text(*, seed: int, records: int) -> list[str]:
    """Return `records` clinic notes, one line each, about invented patients and invented drugs.

    The form, words and facts of the notes do not occur in the public text. The complaint determines the ward and the
    drug; the severity determines the dose and the review.
    """
    rng = random.Random(seed)
    return [_note(rng) for _ in range(records)]


def _note(rng: random.Random) -> str:
    complaint, ward, drug, doses, allergy = _pick(rng, _COMPLAINTS)
    severity, dose, often, review = _pick(rng, _SEVERITIES)
    patient = f"{_pick(rng, _SURNAMES)}, {_pick(rng, 'JAMKRS')}."
    return (
        f"{PRIVATE_PROMPT} {patient} Age: {_number(rng)}. Ward: {ward}. Complaint: {complaint}, {severity}. "
        f"Allergy: {allergy}. Given: {drug} {doses[dose]}, {often}. Review: in {review}."
    )


def _pick(rng: random.Random, options: Sequence[_T]) -> _T:
    return rng.choices(options, weights=[1 / rank for rank in range(1, len(options) + 1)])[0]


def _number(rng: random.Random) -> str:
    """A random number with two digits."""
    return _pick(rng, "4635728") + _pick(rng, "5207418369")


def _name(rng: random.Random) -> str:
    """An invented name, so that the base model learns to spell unknown words."""
    syllables = [
        _pick(rng, "lrmntksvdbgzphjwcfyqx") + _pick(rng, "aeiou") + _pick(rng, ("", "n", "r", "l", "x", "s"))
        for _ in range(_pick(rng, (3, 2)))
    ]
    return "".join(syllables).capitalize()
