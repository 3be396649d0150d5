"""The 25 instruction checks of IFEval (arXiv:2311.07911).

They follow the paper's published checkers (google-research/instruction_following_eval), with these
differences, which docs/rewards.md lists: sentences are split by rules instead of nltk's trained
punkt model, a keyword is a word and not a regular expression, language detection has a fixed seed,
and every check is linear in the length of the text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

_LANGUAGE_CHARACTERS = 100_000  # langdetect uses 10,000 of them, after removing addresses
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_CLOSING, _OPENING = "\"'”’»)]}*_`", "\"'“‘«([{*_`"
_NUMBER = re.compile(r"[-.,]?[0-9][0-9.,-]*")
ABBREVIATIONS = """
    mr mrs ms dr prof rev gen col maj lt sgt adm capt sen rep gov messrs st ave jr sr bros co corp inc ltd cie vs e.g
    i.e etc cf al approx ph.d m.d b.a m.a m.b.a u.s u.k u.n u.s.a u.s.s.r d.c n.y l.a a.m p.m a.d b.c jan feb aug sep
    sept oct nov dec tues wed fri ft yr mg
"""
_ABBREVIATIONS = frozenset(ABBREVIATIONS.split())
# One of these words, capitalized after an abbreviation or an ellipsis, begins a sentence: "at 5
# p.m. He left."
_STARTERS = re.compile(
    r"(?:the|he|she|it|they|we|i|this|these|there|in|if|when|while|since|so|but|however|although|though|thus|yet)\b",
    re.I,
)

# One of these words after a capital letter begins a sentence ("Plan B. Then we left."); another
# word is a surname ("J. Smith").
_COMMON_WORDS = """
    a about above after afterwards again all also always am an and another any anyone anything are as ask at be because
    become before both but by can cannot choose could did do does doesn't don't each either enjoy even every everyone
    everything few finally find first for from further get give go had has have he hence her here his how however if in
    indeed instead is isn't it its just keep lastly later let make many maybe meanwhile more moreover most much my
    never nevertheless next no nobody none nor not nothing now of often on once one only or other others otherwise our
    out over perhaps please put remember second see several she should similarly simply since so some somebody someone
    something sometimes soon still such take than that the their them then there therefore these they third this those
    though through thus to today together tomorrow try two under unless until up use very was wasn't we were what
    whatever when whenever where whether which while who whoever whom whose why with within without would yes yesterday
    yet you your i
"""
_COMMON = frozenset(_COMMON_WORDS.split())
_WORD = re.compile(r"[^\W\d_]+(?:['’]t)?")

# The part of nltk's word_tokenize that matters for words in capitals: it splits I'M, DON'T, NASA's
# and CANNOT.
_WORD_END = re.compile(r"[\s«“‘„»”’\"`\[\](){}<>;@#$%&?!*\u2012-\u2015]+|--+|\.\.+|[:,](?![0-9])")
_CLITIC = re.compile(
    r"(?=(?:'[sSmMdD]|'(?:ll|LL|re|RE|ve|VE)|n't|N'T)$)|(?<=^CAN)(?=NOT$)|(?<=^G[OI][NMT])(?=[NMT][AE]$)"
)


def count_words(text: str) -> int:
    """Count runs of letters, digits and underscores, as in the paper's code.

    >>> count_words("Well-known words, isn't it?")
    6
    """
    return len(re.findall(r"\w+", text))


def count_capital_words(text: str) -> int:
    """Count words in capitals. A hyphenated word counts as one, a contraction as two, as in nltk's
    tokenizer.

    >>> count_capital_words("NASA's WELL-KNOWN I'M not")
    4
    """
    words = (part for word in _WORD_END.split(text) for part in _CLITIC.split(word.rstrip(".")))
    return sum(word.isupper() for word in words)


def count_sentences(text: str) -> int:
    """Count sentences, split where a word ends in ``.``, ``?`` or ``!`` and another word follows.

    Closing quotes and brackets may follow the mark. A period does not end a sentence after a letter
    that may be an initial, after an abbreviation or an ellipsis (unless a word like "He" or "The"
    follows), or between a number and a lowercase letter.

    >>> count_sentences("Dr. J. Smith left at 5 p.m. He said: wait... what? (Really!) 1. Buy milk")
    5
    """
    words = text.split()
    return sum(_ends_sentence(word, following) for word, following in pairwise(words)) + bool(words)


def _ends_sentence(word: str, following: str) -> bool:
    word, next_word = word.rstrip(_CLOSING), following.lstrip(_OPENING)
    if not word.endswith("."):
        return word.endswith(("?", "!"))
    stem = word[:-1].lstrip(_OPENING).lower()
    if stem.endswith(".") or stem in _ABBREVIATIONS or stem.rpartition("-")[2] in _ABBREVIATIONS:
        return next_word[:1].isupper() and _STARTERS.match(next_word) is not None
    if _NUMBER.fullmatch(stem):
        return not next_word[:1].islower()
    if len(stem) == 1 and stem.isalpha() and following[:1].isalpha():
        return following[:1].isupper() and (word[-2].islower() or _is_common(next_word))
    return True


def _is_common(word: str) -> bool:
    match = _WORD.match(word)
    return match is not None and match[0].lower().replace("’", "'") in _COMMON


@functools.cache
def language_detector() -> Any:
    """Return a langdetect factory with seed 0, as in the paper's code. Threads would race for
    langdetect's own factory.
    """
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError as error:
        raise ImportError(
            "reward 'ifeval' needs the package langdetect, but it is missing: pip install "
            "'torchrl_grpo[rewards]'."
        ) from error
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


def is_language(text: str, language: str) -> bool:
    """Return whether a text is in a language (ISO 639-1); True if no language can be detected, as
    in the paper's code.

    >>> is_language("Today we visit the Louvre", "en"), is_language("123", "fr")
    (True, True)
    """
    from langdetect import LangDetectException

    detector = language_detector().create()
    try:
        detector.append(text[:_LANGUAGE_CHARACTERS])
        return bool(detector.detect() == language)
    except LangDetectException:
        return True


def _compare(count: int, relation: str, threshold: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(
            f"relation of an instruction must be 'less than' or 'at least', got {relation!r}."
        )
    return count < threshold if relation == "less than" else count >= threshold


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _has_no_word_of(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.I) for word in forbidden_words
    )


def _placeholders(text: str, num_placeholders: int) -> bool:
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(
        marker, re.escape(marker.lower())
    )
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*[^*]|-).*$", text, re.MULTILINE)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    single, double = re.findall(r"\*[^\n*]*\*", text), re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in single + double) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _parts(text: str, divider: str) -> list[str] | None:
    """Split at a divider, without an empty first or last part; None if a part between two dividers
    is empty.
    """
    parts = text.split(divider)
    inner = [part.strip() for i, part in enumerate(parts) if part.strip() or 0 < i < len(parts) - 1]
    return inner if all(inner) else None


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = _parts(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _two_responses(text: str) -> bool:
    parts = _parts(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if (
        count != num_paragraphs
        or not 1 <= nth_paragraph <= count
        or not paragraphs[nth_paragraph - 1].strip()
    ):
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def _json(text: str) -> bool:
    text = text.strip()
    for ticks in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(ticks)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end > start + 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# By the paper's instruction ids. The arguments after the text are those in the data set's column
# ``kwargs``.
CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_occurrences(word, text) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        _occurrences(keyword.strip(), text), relation, frequency
    ),
    "keywords:forbidden_words": _has_no_word_of,
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": is_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        count_words(text), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text: any(
        option in text for option in _CONSTRAINED
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: (
        _compare(count_capital_words(text), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda text: text.isupper() and is_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and is_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
