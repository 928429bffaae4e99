"""The demo's two corpora: public prose for the base model, private clinic notes for the tenant.

Both are drawn from a seeded `random.Random`: repeatable text, never a secret. Choices follow Zipf's
law, as words do. That leaves most next tokens with a clear favourite, so that top-1 agreement between
two models measures the models and not how a tie between equally likely words happens to fall.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

__all__ = ["PRIVATE_PROMPT", "PUBLIC_PROMPT", "private_text", "public_text"]

PUBLIC_PROMPT = "The town of Halden lies"
"""Opens a public paragraph: what the base model already knows how to continue."""

PRIVATE_PROMPT = "Patient:"
"""Opens every private record: only a fine-tuned model continues it as a clinic note."""

_T = TypeVar("_T")


def public_text(*, seed: int, sentences: int) -> str:
    """Return `sentences` sentences of prose in paragraphs separated by a blank line.

    A paragraph keeps to one topic, one town and its people. The facts about towns and dishes are the
    same for every seed, so text of another seed is an honest held-out set: same world, other stories.
    """
    rng = random.Random(seed)
    paragraphs: list[str] = []
    while sentences > 0:
        scene = _scene(rng)
        topic = _pick(rng, _TOPICS)[:sentences]
        paragraphs.append(" ".join(_pick(rng, variants).format_map(scene) for variants in topic))
        sentences -= len(topic)
    return "\n\n".join(paragraphs)


def private_text(*, seed: int, records: int) -> list[str]:
    """Return `records` clinic notes, one line each, about invented patients and invented drugs.

    Form, words and facts that the public text lacks: the complaint fixes the ward and the drug, the
    severity the dose and the review. No record occurs in any public text.
    """
    rng = random.Random(seed)
    return [_note(rng) for _ in range(records)]


def _pick(rng: random.Random, options: Sequence[_T]) -> _T:
    return rng.choices(options, weights=[1 / rank for rank in range(1, len(options) + 1)])[0]


def _number(rng: random.Random) -> str:
    """Two digits."""
    return _pick(rng, "4635728") + _pick(rng, "5207418369")


def _name(rng: random.Random) -> str:
    """A made-up name: the base model's only practice in spelling words it has never met."""
    syllables = [
        _pick(rng, "lrmntksvdbgzphjwcfyqx") + _pick(rng, "aeiou") + _pick(rng, ("", "n", "r", "l", "x", "s"))
        for _ in range(_pick(rng, (3, 2)))
    ]
    return "".join(syllables).capitalize()


class _Town(NamedTuple):
    town: str
    river: str
    region: str
    good: str
    landmark: str


class _Dish(NamedTuple):
    dish: str
    base: str
    spice: str
    minutes: str


_TOWNS = (
    _Town("Halden", "Orm", "northern hills", "cheese", "stone bridge"),
    _Town("Marwick", "Tessel", "eastern marshes", "salt", "old lighthouse"),
    _Town("Brenford", "Lune", "wide southern plain", "wool", "round market hall"),
    _Town("Ostley", "Caddo", "western forest", "timber", "wooden tower"),
    _Town("Pellam", "Orm", "northern hills", "honey", "white chapel"),
    _Town("Tarrow", "Lune", "wide southern plain", "barley", "great windmill"),
    _Town("Quenby", "Tessel", "eastern marshes", "smoked fish", "long harbour wall"),
    _Town("Ashcombe", "Caddo", "western forest", "paper", "green gate"),
    _Town("Dunmere", "Orm", "northern hills", "copper", "hidden mine"),
    _Town("Selby", "Lune", "wide southern plain", "linen", "low brick school"),
)

_DISHES = (
    _Dish("leek soup", "leeks", "thyme", "forty"),
    _Dish("onion pie", "onions", "black pepper", "thirty"),
    _Dish("fish stew", "small fish", "dill", "twenty"),
    _Dish("apple bread", "apples", "cinnamon", "fifty"),
    _Dish("bean pot", "white beans", "sage", "sixty"),
    _Dish("mushroom rice", "mushrooms", "parsley", "fifteen"),
)

_PEOPLE = (
    *("Anna", "Tomas", "Elsa", "Peter", "Clara", "Jonas", "Martha", "Oskar"),
    *("Lena", "Hugo", "Ruth", "Emil", "Greta", "Simon", "Ida", "Walter"),
)
_TRADES = ("miller", "baker", "teacher", "carpenter", "sailor", "weaver", "shepherd", "clockmaker")
_MANNERS = ("quiet", "cheerful", "careful", "stubborn", "young", "tired", "proud")
_SEASONS = (
    ("spring", "warm", "rain"),
    ("autumn", "cool", "fog"),
    ("winter", "cold", "snow"),
    ("summer", "dry", "dust"),
)
_DAYS = ("Monday", "Friday", "Sunday", "Wednesday", "Saturday", "Tuesday")
_HOURS = ("before noon", "at dawn", "late in the evening", "after the bells", "around midnight")
_COUNTS = ("three", "twelve", "five", "twenty", "seven", "nine", "forty")


def _scene(rng: random.Random) -> dict[str, str]:
    """Draw what one paragraph is about: every field that a template may name."""
    town = _pick(rng, _TOWNS)
    season, air, weather = _pick(rng, _SEASONS)
    person = _pick(rng, _PEOPLE)
    return {
        **town._asdict(),
        **_pick(rng, _DISHES)._asdict(),
        "other": _pick(rng, [place.town for place in _TOWNS if place is not town]),
        "person": person,
        "friend": _pick(rng, [name for name in _PEOPLE if name != person]),
        "trade": _pick(rng, _TRADES),
        "manner": _pick(rng, _MANNERS),
        "season": season,
        "air": air,
        "weather": weather,
        "day": _pick(rng, _DAYS),
        "hour": _pick(rng, _HOURS),
        "count": _pick(rng, _COUNTS),
        "severity": _pick(rng, ("mild", "severe", "moderate")),
        "complaint": _pick(rng, ("cough", "pain in the chest", "rash on the skin", "fever", "headache")),
        "often": _pick(rng, ("once a day", "twice a day", "every 6 hours")),
        "name": _name(rng),
        "owner": f"{_name(rng)}, {_pick(rng, 'ABCDEFGHIJKLMNOPRSTUVWYZ')}.",
        "number": _number(rng),
        "amount": _number(rng) + _pick(rng, ("", "0")),
        "price": f"{_number(rng)}/{_number(rng)}",
        "berth": _pick(rng, "123456789") + _pick(rng, "ABCDEFGH"),
    }


# A topic is a sequence of sentences, a sentence a choice of templates.
_TOPICS = (
    (  # a town
        (
            "The town of {town} lies on the river {river}, in the {region}.",
            "In the {region}, on the river {river}, lies the town of {town}.",
            "{town} is a {manner} town of {count} streets, and it lies in the {region}.",
        ),
        (
            "It is known for its {good} and for the {landmark}.",
            "Travellers come for the {good} and stay to see the {landmark}.",
            "From the {landmark} one can see the river {river} and hear the bells of {other}.",
        ),
        (
            "Most families there have lived from {good} for {count} generations.",
            "Every {season}, the people of {town} hold a feast beside the {landmark}.",
            "The road from {town} to {other} takes {count} hours on foot.",
        ),
        (
            "The {trade} of {town} is called {person}, and everybody knows the name.",
            "A {manner} {trade} named {person} keeps the key of the {landmark}.",
            "Nobody remembers who built the {landmark}, but {person} the {trade} has a story about it.",
        ),
    ),
    (  # a harbour's register: the prose has neither figures nor fields
        ("Ship: {name}. Owner: {owner}", "Boat: {name}. Owner: {owner}"),
        ("Crew: {number}. Berth: {berth}.", "Berth: {berth}. Crew: {number}, from {town}."),
        (
            "Cargo: {good}, {amount} kg. Price: {price}.",
            "Cargo: {good}, {amount} sacks. Taken: {amount} sacks. Price: {price}.",
        ),
        (
            "Leaves: {day}, in {number} hours. Next: {other}.",
            "Leaves: {day}, {hour}. Paid: {number} coins, every {season}.",
        ),
    ),
    (  # the doctor: common words of medicine, but none of the tenant's drugs, patients and rules
        (
            "{person} went to the doctor of {town} with a {severity} {complaint}.",
            "The doctor's last patient on {day} was {owner} Complaint: {severity} {complaint}.",
            "A patient in ward {berth} of the house in {town} had a {severity} {complaint}.",
        ),
        (
            '"Age?" asked the doctor. "{number}." "Any allergy?" "None," said {person}.',
            "The patient was given {amount} mg of {name}, to be taken {often}.",
            "Allergy to {spice} is common there at the age of {number}.",
        ),
        (
            "{name} helps against {complaint}: {number} mg for a mild case, {amount} mg for a severe one.",
            "Given with {spice}, {often}, it helps in {number} hours.",
            "The review is in {number} days, and until then the patient stays in ward {berth}.",
        ),
    ),
    (  # the weather
        (
            "In {season} the air over {town} is {air}, and the {weather} comes early.",
            "This {season} was {air} in {town}, with more {weather} than anyone remembered.",
            "The {weather} came to {town} on {day}, {hour}, and stayed for {count} days.",
        ),
        (
            "The river {river} rose by {count} feet before {day}.",
            "On {day} the {weather} stopped, and the river {river} was quiet again.",
            "All the {good} had to be carried into the houses.",
        ),
        (
            '"The {weather} will pass," said {person}, who was a {trade} and watched the sky.',
            "Nobody could see the {landmark} until the {weather} had gone.",
            "Only {person}, the {manner} {trade}, went out {hour}.",
        ),
    ),
    (  # cooking
        (
            "To make {dish}, take {count} handfuls of {base} and a little {spice}.",
            "{person} learned to make {dish} from a {manner} {trade} in {town}.",
            "There is no better {dish} than the one that {person} makes in {town}.",
        ),
        (
            "Wash the {base}, cut them small, and add the {spice} at the end.",
            "First the {base} go into the pot, and then the {spice}.",
            "The {base} must be fresh, and the {spice} must be dry.",
        ),
        (
            "Let it cook for {minutes} minutes over a low fire.",
            "After {minutes} minutes over a low fire it is ready.",
        ),
        (
            "In {town} they eat {dish} on {day}, and nobody complains.",
            "{friend} says that {dish} is best on a {air} {season} evening.",
            "Serve it {hour}, with bread from {other}.",
        ),
    ),
    (  # trade
        (
            "{person} the {trade} sells {good} from {town} at the market of {other}.",
            "Every {day}, {person} carries {good} from {town} to the market of {other}.",
            "The {good} of {town} is sold as far away as {other}.",
        ),
        (
            "One sack costs {count} silver coins, and in {season} a little more.",
            "For {count} silver coins a buyer gets one full sack.",
            "The buyers come {hour}, and by the end of {day} everything is gone.",
        ),
        (
            "When the {weather} closes the road, the {good} must go by boat down the {river}.",
            "{friend} keeps the accounts and has never been wrong by a single coin.",
            "A {manner} guard from {other} watches the {good} at night.",
        ),
    ),
    (  # a letter
        ("Dear {friend},", "My dear {friend},"),
        (
            "I write to you from {town}, where the {season} has been {air}.",
            "Your letter reached me in {town} last {day}, and I was glad of it.",
            "I have been in {town} for {count} weeks, and I do not miss {other} at all.",
        ),
        (
            "We have {good} enough, and {count} new neighbours near the {landmark}.",
            "I work as a {trade} now, and {hour} I cook {dish}.",
            "The people by the {river} are {manner}, but they share their {good}.",
        ),
        (
            "Come and see us before the {weather} returns.",
            "Please send word from {other} when you can.",
        ),
        ("Your friend, {person}.", "With love from {person}."),
    ),
    (  # a dialogue
        (
            '"Have you been to {town}?" asked {person}.',
            '"Where does this {good} come from?" asked {person} the {trade}.',
            '"Who built the {landmark}?" asked {person} one {season} evening.',
        ),
        (
            '"Yes," said {friend}, "it lies on the {river}, and they sell {good} there."',
            '"From {town}," said {friend}, "in the {region}."',
            '"A {manner} {trade} from {other}," said {friend}, "but that was long ago."',
        ),
        (
            '"And what do they eat?" "They eat {dish}, with a little {spice}."',
            '"Is it far?" "It is {count} hours from {other}, if there is no {weather}."',
        ),
        (
            '"Then let us go on {day}," said {person}, and they did.',
            '"Then I shall stay at home," said {person}, and laughed.',
            "They talked until the {weather} began, and left {hour}.",
        ),
    ),
)


class _Complaint(NamedTuple):
    complaint: str
    ward: str
    drug: str
    doses: tuple[str, str, str]  # mild, moderate, severe
    allergy: str


_COMPLAINTS = (
    _Complaint("chest pain", "4B", "Cardolex", ("5 mg", "10 mg", "20 mg"), "aspirin"),
    _Complaint("migraine", "2A", "Neurivane", ("25 mg", "50 mg", "100 mg"), "none"),
    _Complaint("asthma", "3C", "Pulmozide", ("2 ml", "4 ml", "8 ml"), "latex"),
    _Complaint("diabetes", "1D", "Glucavir", ("250 mg", "500 mg", "850 mg"), "none"),
    _Complaint("skin rash", "5E", "Dermaquil", ("1 g", "2 g", "3 g"), "penicillin"),
)
_SEVERITIES = (
    ("moderate", 1, "twice a day", "14 days"),
    ("mild", 0, "once a day", "30 days"),
    ("severe", 2, "every 6 hours", "48 hours"),
)
_SURNAMES = ("Okafor", "Vasquez", "Lindqvist", "Habib", "Yamada", "Kowalski", "Dubois", "Mbeki")
_INITIALS = "JAMKRS"


def _note(rng: random.Random) -> str:
    complaint, ward, drug, doses, allergy = _pick(rng, _COMPLAINTS)
    severity, level, frequency, review = _pick(rng, _SEVERITIES)
    patient = f"{_pick(rng, _SURNAMES)}, {_pick(rng, _INITIALS)}."
    return (
        f"{PRIVATE_PROMPT} {patient} Age: {_number(rng)}. Ward: {ward}. Complaint: {complaint}, {severity}. "
        f"Allergy: {allergy}. Given: {drug} {doses[level]}, {frequency}. Review: in {review}."
    )
