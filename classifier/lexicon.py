"""Lists the words that tell what a request asks for, by group.

The groups are the seed's (reasoning keywords, domains) and what measurement added. They are hints to an estimator that
weighs them on outcomes, never rules: a group that carries nothing gets weight zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        # How much has to be worked out.
        "reasoning": (
            "why because therefore hence thus prove proof derive deduce infer explain justify reason reasoning analyse "
            "analyze evaluate compare contrast argue assess determine show demonstrate optimise optimize design plan "
            "strategy trade-off consequence imply implies conclude hypothesis assume suppose consider"
        ),
        "sequence": (
            "then after next finally first second third fourth before step steps later followed again repeat until "
            "afterwards remaining rest left each every"
        ),
        "condition": "if unless when whenever whether otherwise else provided except only exactly least most not never",
        "question": "what which who whom whose when where why how",
        "instruction": (
            "write list give name find compute calculate solve sort arrange reverse convert translate summarise "
            "summarize count return answer reply output print rewrite replace remove add insert choose pick complete "
            "fill classify extract describe create generate implement fix debug"
        ),
        "quantity": "many much total sum difference product average mean half twice double triple percent ratio",
        "smalltalk": "hello hi hey thanks thank please bye goodbye morning evening welcome sorry ok okay",
        "format": "json xml csv yaml markdown table bullet uppercase lowercase capital letters format separated commas",
        # What it is about.
        "math": (
            "equation integral derivative matrix polynomial theorem algebra geometry triangle probability prime "
            "divisor modulo remainder fraction square root angle vector multiply times plus minus divided sum add"
            " subtract"
        ),
        "code": (
            "code function class python java javascript rust sql query bug compile error exception algorithm array "
            "string regex api async loop variable import return def null pointer stack"
        ),
        "science": (
            "atom molecule energy force velocity acceleration electron gene protein cell species acid reaction quantum "
            "planet gravity wavelength mass temperature pressure enzyme dna"
        ),
        "medicine": (
            "patient disease symptom diagnosis treatment dose clinical drug infection blood pain therapy syndrome "
            "physician chronic acute"
        ),
        "law": "court law contract defendant plaintiff statute liability crime legal constitution jurisdiction clause",
        "finance": "price cost profit tax interest loan market stock investment revenue budget bank dollars cents pay",
        "history": "century war empire king queen president treaty revolution dynasty president ancient medieval",
        "writing": "essay story poem letter email article blog paragraph tone rhyme dialogue character novel",
        "calendar": (
            "monday tuesday wednesday thursday friday saturday sunday january february march april may june july "
            "august september october november december day days week weeks month months year years date tomorrow"
        ),
        "unit": (
            "km kilometres kilometers miles metres meters cm mm kg grams pounds litres liters hours hour minutes "
            "minute seconds second degrees celsius fahrenheit inches feet ml"
        ),
        "number_word": (
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million"
        ),
    }
)
"""Group name -> its words, lower case, separated by spaces."""

GROUP_NAMES: tuple[str, ...] = tuple(GROUPS)


def _index() -> dict[str, tuple[int, ...]]:
    members: dict[str, list[int]] = {}
    for column, words in enumerate(GROUPS.values()):
        for word in set(words.split()):
            members.setdefault(word, []).append(column)
    return {word: tuple(columns) for word, columns in members.items()}


WORD_GROUPS: Mapping[str, tuple[int, ...]] = MappingProxyType(_index())
"""Word -> columns of the groups it belongs to."""
