"""Make two sets of questions from public-domain text and common facts only: ``python -m demo.questions``.

- demo/questions/endings.jsonl: sentences of *Opticks* without their last words; the answers are the true ending and
  three endings of other sentences.
- demo/questions/facts.jsonl: capitals, symbols of chemical elements and sums.
- demo/questions/examples.jsonl: more such facts, as examples before a question.

Every question has four answers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEXT = HERE.parents[1] / "eval" / "spec" / "opticks.txt"
N_ENDINGS, N_SUMS, N_EXAMPLES = 240, 90, 4
LENGTHS = range(14, 31)
"""Words of a sentence that becomes a question."""
LAST = 5
"""Number of words that are missing at its end."""
CAPITALS = """
Afghanistan Kabul, Albania Tirana, Algeria Algiers, Angola Luanda, Argentina Buenos Aires, Armenia Yerevan,
Australia Canberra, Austria Vienna, Azerbaijan Baku, Bangladesh Dhaka, Belarus Minsk, Belgium Brussels,
Botswana Gaborone, Brazil Brasilia, Bulgaria Sofia, Cambodia Phnom Penh, Canada Ottawa, Chad N'Djamena,
China Beijing, Colombia Bogota, Croatia Zagreb, Cuba Havana, Cyprus Nicosia, Denmark Copenhagen, Ecuador Quito,
Egypt Cairo, Estonia Tallinn, Ethiopia Addis Ababa, Finland Helsinki, France Paris, Georgia Tbilisi, Germany Berlin,
Ghana Accra, Greece Athens, Guatemala Guatemala City, Haiti Port-au-Prince, Hungary Budapest, Iceland Reykjavik,
India New Delhi, Iran Tehran, Iraq Baghdad, Ireland Dublin, Italy Rome, Jamaica Kingston, Japan Tokyo, Jordan Amman,
Kenya Nairobi, Latvia Riga, Lebanon Beirut, Libya Tripoli, Lithuania Vilnius, Luxembourg Luxembourg City,
Madagascar Antananarivo, Mali Bamako, Malta Valletta, Mexico Mexico City, Mongolia Ulaanbaatar, Morocco Rabat,
Mozambique Maputo, Namibia Windhoek, Nepal Kathmandu, Nicaragua Managua, Niger Niamey, Nigeria Abuja, Norway Oslo,
Oman Muscat, Pakistan Islamabad, Paraguay Asuncion, Peru Lima, Philippines Manila, Poland Warsaw, Portugal Lisbon,
Qatar Doha, Romania Bucharest, Russia Moscow, Rwanda Kigali, Senegal Dakar, Serbia Belgrade, Slovakia Bratislava,
Slovenia Ljubljana, Somalia Mogadishu, Spain Madrid, Sudan Khartoum, Sweden Stockholm, Syria Damascus,
Thailand Bangkok, Tunisia Tunis, Turkey Ankara, Uganda Kampala, Ukraine Kyiv, Uruguay Montevideo, Venezuela Caracas,
Vietnam Hanoi, Yemen Sana'a, Zambia Lusaka, Zimbabwe Harare
"""
ELEMENTS = """
hydrogen H, helium He, lithium Li, beryllium Be, boron B, carbon C, nitrogen N, oxygen O, fluorine F, neon Ne,
sodium Na, magnesium Mg, aluminium Al, silicon Si, phosphorus P, sulfur S, chlorine Cl, argon Ar, potassium K,
calcium Ca, titanium Ti, chromium Cr, manganese Mn, iron Fe, cobalt Co, nickel Ni, copper Cu, zinc Zn, arsenic As,
selenium Se, bromine Br, krypton Kr, silver Ag, cadmium Cd, tin Sn, antimony Sb, iodine I, xenon Xe, caesium Cs,
barium Ba, tungsten W, platinum Pt, gold Au, mercury Hg, lead Pb, bismuth Bi, radon Rn, radium Ra, uranium U
"""


def pairs_of(table: str) -> list[tuple[str, str]]:
    """(first word, the rest) of every entry of a table."""
    return [(name, rest) for name, _, rest in (each.strip().partition(" ") for each in table.split(","))]


def question(text: str, right: str, wrong: Sequence[str], draw: random.Random) -> dict[str, Any]:
    """A question with its answers in a random order; ``answer`` is the number of the right one."""
    choices = [right, *wrong]
    draw.shuffle(choices)
    return {"question": text, "choices": choices, "answer": choices.index(right)}


def first_word(text: str) -> str:
    """Return the first word, in lower case."""
    return text.split()[0].lower()


def endings() -> list[dict[str, Any]]:
    """Sentences of the text without their last words; no two answers of a question begin alike."""
    draw = random.Random(0)
    plain = re.sub(r"[_\s]+", " ", TEXT.read_text(encoding="utf-8"))
    sentences = re.findall(r"(?<=[.;?] )[A-Z][A-Za-z,' -]+\.(?= [A-Z])", plain)
    known = list(dict.fromkeys(each.removesuffix(".") for each in sentences if len(each.split()) in LENGTHS))
    parts = [(" ".join(words[:-LAST]), " ".join(words[-LAST:])) for words in (each.split() for each in known)]
    found = []
    for beginning, end in draw.sample(parts, N_ENDINGS):
        others = {first_word(other): other for _, other in parts if first_word(other) != first_word(end)}
        found.append(question(beginning, end, draw.sample(sorted(others.values()), 3), draw))
    return found


def facts() -> list[dict[str, Any]]:
    """Capitals, symbols and sums, in a random order."""
    draw = random.Random(1)
    found = []
    for table, asked in ((CAPITALS, "What is the capital of {}?"), (ELEMENTS, "What is the chemical symbol of {}?")):
        pairs = pairs_of(table)
        for name, right in pairs:
            wrong = draw.sample([other for _, other in pairs if other != right], 3)
            found.append(question(asked.format(name), right, wrong, draw))
    for a, b in draw.sample([(a, b) for a in range(2, 30) for b in range(2, 30)], N_SUMS):
        near = [number for number in range(a + b - 9, a + b + 10) if number not in (a + b, 0) and number > 0]
        found.append(question(f"What is {a} plus {b}?", str(a + b), [str(x) for x in draw.sample(near, 3)], draw))
    draw.shuffle(found)
    return found


def write(rows: Iterable[dict[str, Any]], name: str) -> None:
    """Write rows as JSON lines into a file next to this one."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (HERE / name).write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Write all three files."""
    write(endings(), "endings.jsonl")
    known = facts()
    write(known[:-N_EXAMPLES], "facts.jsonl")
    write(known[-N_EXAMPLES:], "examples.jsonl")


if __name__ == "__main__":
    main()
