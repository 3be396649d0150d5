"""The reward ``ifeval``: each of the 25 checks, strict and loose, prompt level and instruction level."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("langdetect")

from tests.support.published import published
from torchrl_grpo.integrations.graders.ifeval import METRICS, follows, ifeval, loose_variants
from torchrl_grpo.integrations.graders.ifeval_checks import (
    CHECKS,
    count_capital_words,
    count_sentences,
    count_words,
)

REAL_DATA = published("ifeval") / "input_data.jsonl"
FRENCH = "Le chat est sur la table et il regarde les oiseaux dans le jardin."
ENGLISH = "the cat sits on the table and it looks at the birds in the garden"

# Instruction, arguments, texts that follow it, texts that don't.
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["cat", "C++"]},
     ["The cat writes C++.", "CAT c++", "concatenated c++11"], ["The cat.", "C++", "The cat writes CCC."]),
    ("keywords:frequency", {"keyword": "good ", "frequency": 2, "relation": "at least"},
     ["good Good", "goodness, good", "GOOD good good"], ["good", "bad", "go od good"]),
    ("keywords:frequency", {"keyword": "a.c", "frequency": 1, "relation": "less than"},
     ["abc", "none", "a c"], ["a.c", "A.C", "xa.cx"]),
    ("keywords:forbidden_words", {"forbidden_words": ["milk", "C#"]},
     ["milky way", "buttermilk", "C is older"], ["Milk.", "some milk here", "I like C#."]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
     ["eee", "Eve here", "three eyes"], ["ee", "", "abc"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
     ["#", "none", "# one"], ["##", "# #", "#a #b #c"]),
    ("language:response_language", {"language": "fr"},
     [FRENCH, "Bonjour, je suis très content de vous voir aujourd'hui.", "12345"],
     [ENGLISH, "El perro corre por la calle mientras llueve.", "Heute gehen wir gemeinsam in den Garten."]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     ["One. Two. Three.", "A cat! A dog? A cow", "It rains... The end. So. Good"],
     ["One. Two.", "Dr. J. Smith left at 5 p.m. today.", "3.5 or 4.5 or e.g. 5.5"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     ["One sentence.", "no end", "Mr. and Mrs. Smith vs. Dr. Doe."], ["Yes. No.", "Why? Because.", "Stop! Go."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["one\n***\ntwo", "***\none\n***\ntwo\n***", "one***two"], ["one", "one\n***\n***\ntwo", "a\n***\nb\n***\nc"]),
    ("length_constraints:number_words", {"num_words": 4, "relation": "at least"},
     ["a b c d", "it's well-known", "1 2 3 4 5"], ["a b c", "", "one-two three"]),
    ("length_constraints:number_words", {"num_words": 4, "relation": "less than"},
     ["a b c", "one", "-- -- -- --"], ["a b c d", "it's well-known", "a,b,c,d"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Dear"},
     ["Hi.\n\nDear all", "Hi.\n\n\"Dear\" you", "Hi.\n\nDEAR, me"],
     ["Dear all", "Hi.\n\nMy dear", "Hi.\n\nDear all\n\nBye"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[a] [b]", "Dear [name],\nyour [item]", "[[a] [b]"], ["[a]", "[a\n] [b]", "]a[ ]b["]),
    ("detectable_content:number_placeholders", {"num_placeholders": 0}, ["none", "[a]", "x"], []),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Bye\nP.S. hi", "bye p. s. hi", "P.S."], ["Bye", "PS hi", "P.P.S hi"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["P.P.S hi", "bye p. p. s hi", "P.P.S. x"], ["P.S. hi", "PPS", "P.P. T"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n* b", "- a\n  * b", "intro\n\n\n* a\n-b\n***\nend"], ["* a", "* a\n* b\n* c", "** a\n** b"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "  My answer is no.\n", "So: My answer is maybe. Bye"],
     ["my answer is yes.", "My answer is yes", "Yes."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and *b*", "**a** and *b*", "**bold** alone, counted by both rules: **two**"],
     ["*a*", "* * and *b*", "*a\n* b"]),
    ("detectable_format:multiple_sections", {"section_spliter": " SECTION ", "num_sections": 2},
     ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2", "SECTION 1 SECTION 2 SECTION 3"],
     ["SECTION 1", "Section 1 Section 2", "SECTION A SECTION B"]),
    ("detectable_format:json_format", {},
     ['{"a": 1}', "```json\n[1, 2]\n```", " ```\n\"x\"\n``` "], ["{a: 1}", "Here: {}", "[" * 200_000 + "]" * 200_000]),
    ("detectable_format:title", {},
     ["<<Poem of joy>>", "x <<a>> y", "<<<b>>>"], ["<< >>", "<<a\nb>>", "<a> >>"]),
    ("combination:two_responses", {},
     ["one\n******\ntwo", "******one******two******", "a ****** A"],
     ["one", "same******same", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem. "},
     ["Write a poem.\nRoses", "  write a poem. ok", "Write a poem."],
     ["Roses", "Sure. Write a poem.", "Write the poem."]),
    ("startend:end_checker", {"end_phrase": "Any questions? "},
     ["Bye. Any questions?", 'x "any questions?"', "ANY QUESTIONS?\n"],
     ["Any questions? Yes.", "Any question?", "questions?"]),
    ("startend:quotation", {}, ['"a"', ' "two\nlines" ', '""'], ["a", '"', '"a']),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "at least"},
     ["ONE TWO THREE", "NASA's WELL-KNOWN I", "I'M (OK)"], ["ONE two", "One Two Three", "1 2 3"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"},
     ["none", "ONE", "WELL-KNOWN"], ["ONE TWO", "DON'T", "CANNOT"]),
    ("change_case:english_capital", {},
     ["THIS IS WRITTEN IN ENGLISH", ENGLISH.upper(), "TODAY WE VISIT A MUSEUM"], [ENGLISH, "This Is", "123"]),
    ("change_case:english_lowercase", {},
     [ENGLISH, "today we visit the museum with our friends", ENGLISH + "\n1. and then"],
     [ENGLISH.upper(), "The end of this story", FRENCH.lower()]),
    ("punctuation:no_comma", {}, ["no comma", "a; b", "."], ["a, b", ",", "1,000"]),
]  # fmt: skip


def test_each_of_the_papers_25_checks_has_three_cases_of_both_kinds() -> None:
    assert len(CHECKS) == 25
    for name in CHECKS:
        good = [text for case in CASES if case[0] == name for text in case[2]]
        bad = [text for case in CASES if case[0] == name for text in case[3]]
        assert len(good) >= 3 and len(bad) >= 3, name


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES]
)
def test_a_check_tells_texts_that_follow_from_those_that_do_not(
    name: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not CHECKS[name](text, **arguments)] == []
    assert [text for text in bad if CHECKS[name](text, **arguments)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no end", 1),
        ("One. Two! Three? Four", 4),
        ("What?! Yes!!! No", 3),
        ("Dr. J. Smith met Mrs. Doe vs. Inc. and so on, etc. and more", 1),
        ("We left at 5 p.m. He stayed.", 2),
        ("at 5 p.m. sharp", 1),
        ("wait... what", 1),
        ("wait... The end", 2),
        ('He said "Hi." Then he left.', 2),
        ("(Really!) **Bold.** Next", 3),
        ("1. Buy milk.\n2. Buy eggs.", 4),
        ("It costs 5. dollars", 1),
        ("3.5 is a number. So is 4", 2),
        ("one.two.three", 1),
        ("She got an A. 25 others did too.", 2),
        ("The first word ends in o. Let's go on.", 2),
        ("The first word ends in *o*. Let's go on.", 2),
        ("Plan B. Then go home.", 2),
        ("Take vitamin C. Don't take vitamin D. It's late.", 3),
        ("J. R. R. Tolkien met Samuel L. Jackson and Harry S. Truman.", 1),
        ("see item a. and item b. below", 1),
    ],
)
def test_sentences_are_counted_by_the_stated_rules(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_words_are_runs_of_word_characters() -> None:
    assert count_words("it's well-known, isn't it? été_2") == 8
    assert count_capital_words("U.S. NASA's lab: I'M 3D CO-OP, a I") == 7


def test_loose_variants_drop_first_and_last_line_and_asterisks() -> None:
    assert loose_variants("Sure:\n*a*\nBye") == [
        "Sure:\n*a*\nBye", "*a*\nBye", "Sure:\n*a*", "*a*", "Sure:\na\nBye", "a\nBye", "Sure:\na", "a"
    ]  # fmt: skip


def test_loose_follows_where_strict_does_not() -> None:
    names, arguments = ["startend:quotation", "punctuation:no_comma"], [{}, {}]
    response = 'Sure, here:\n"no comma"\nBye'
    assert follows(response, names, arguments) == [False, False]
    assert follows(response, names, arguments, loose=True) == [True, True]
    assert follows('**"x"**', names, arguments, loose=True) == [True, True]


def test_the_four_accuracies_are_those_of_the_paper() -> None:
    names, arguments = (
        ["startend:quotation", "punctuation:no_comma", "detectable_format:title"],
        [{}, {}, {}],
    )
    response = 'Sure:\n"no comma"'
    assert ifeval(response, names, arguments) == {
        "prompt_strict": 0.0,
        "instruction_strict": pytest.approx(1 / 3),
        "prompt_loose": 0.0,
        "instruction_loose": pytest.approx(2 / 3),
    }
    for metric in METRICS:
        assert (
            ifeval(response, names, arguments, metric=metric)
            == ifeval(response, names, arguments)[metric]
        )  # type: ignore[index]


@pytest.mark.parametrize(
    "response", ["", " \n\t ", "x" * 1_000_001], ids=["empty", "blank", "too-long"]
)
def test_an_empty_or_overlong_response_follows_nothing(response: str) -> None:
    assert ifeval(response, ["punctuation:no_comma"], [{}]) == dict.fromkeys(METRICS, 0.0)


def test_arguments_that_are_none_do_not_count_and_zero_does() -> None:
    arguments = {"num_bullets": 0, "relation": None, "keywords": None}
    assert follows("no bullets", ["detectable_format:number_bullet_lists"], [arguments]) == [True]
    assert follows("* one", ["detectable_format:number_bullet_lists"], [arguments]) == [False]


def test_the_language_verdict_does_not_change_from_call_to_call() -> None:
    check = CHECKS["language:response_language"]
    assert (
        len({(check("good day chat", "en"), check("good day chat", "fr")) for _ in range(20)}) == 1
    )


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["keywords:nothing"], [{}], r"must name IFEval's instructions, got 'keywords:nothing'"),
        (["punctuation:no_comma"], [], r"one entry for each of its 1 instructions, but it has 0"),
        (
            ["startend:end_checker"],
            [{}],
            r"startend:end_checker must be \['end_phrase'\], got \[\]",
        ),
        (["punctuation:no_comma"], [{"x": 1}], r"punctuation:no_comma must be \[\], got \['x'\]"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "at most"}],
            r"relation of an instruction must be 'less than' or 'at least', got 'at most'",
        ),
    ],
)
def test_columns_that_are_not_ifevals_are_an_error(
    names: list[str], arguments: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ifeval("a response", names, arguments)


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"metric of the reward ifeval .*'strict'"):
        ifeval("x", ["punctuation:no_comma"], [{}], metric="strict")


def test_without_langdetect_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl_grpo.integrations.graders.ifeval_checks import language_detector

    language_detector.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect.detector_factory", None)
    with pytest.raises(ImportError, match=r"langdetect, .*: pip install 'torchrl_grpo\[rewards\]'"):
        ifeval("x", ["language:response_language"], [{"language": "en"}])
    language_detector.cache_clear()


def test_the_letter_o_ends_a_sentence_in_the_loose_reading() -> None:
    names = ["length_constraints:number_sentences", "detectable_format:number_highlighted_sections"]
    arguments = [{"num_sentences": 3, "relation": "at least"}, {"num_highlights": 1}]
    response = "Every word here ends in *o*. Let's begin with hello. Now you."
    assert ifeval(response, names, arguments, metric="prompt_loose") == 1.0


@pytest.mark.skipif(not REAL_DATA.is_file(), reason="IFEval's file is not on this machine")
def test_every_real_prompt_can_be_scored() -> None:
    rows = [json.loads(line) for line in REAL_DATA.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 541
    assert {name for row in rows for name in row["instruction_id_list"]} == set(CHECKS)
    for row in rows:
        parts = ifeval("A short answer.", row["instruction_id_list"], row["kwargs"])
        assert isinstance(parts, dict) and parts["prompt_strict"] <= parts["prompt_loose"]
