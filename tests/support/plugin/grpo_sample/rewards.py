"""A reward."""

DIGIT = "9"


def nines(response: str, digit: str = DIGIT) -> float:
    """Return 1 if a response contains the digit."""
    return float(digit in response)
