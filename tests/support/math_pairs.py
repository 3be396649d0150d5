"""Responses, reference answers and verdicts of the reward ``math``. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_grpo.integrations.graders.math import math
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Split, Task

# Response, reference, verdict.
PAIRS = [
    (r"\boxed{72}", "72", True),
    (r"\boxed{72.0}", "72", True),
    (r"\boxed{73}", "72", False),
    (r"\boxed{-72}", "72", False),
    (r"\boxed{\frac{3}{4}}", "0.75", True),
    (r"\boxed{0.75}", r"\frac{3}{4}", True),
    (r"\boxed{3/4}", r"\frac{3}{4}", True),
    (r"\boxed{\dfrac{6}{8}}", r"\frac{3}{4}", True),
    (r"\boxed{\frac{4}{3}}", r"\frac{3}{4}", False),
    (r"\boxed{1{,}234}", "1234", True),
    (r"\boxed{1,234,567}", "1234567", True),
    (r"\boxed{50\%}", r"50\%", True),
    (r"\boxed{50\%}", "51", False),
    (r"\boxed{\$12.50}", "12.5", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{12\text{ cm}}", "12", True),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True),
    (r"\boxed{\sqrt{6}}", r"2\sqrt{2}", False),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", True),
    (r"\boxed{\pi}", r"\pi", True),
    (r"\boxed{2\pi}", r"\pi", False),
    (r"\boxed{\frac{\pi}{2}}", r"0.5\pi", True),
    (r"\boxed{2^{10}}", "1024", True),
    (r"\boxed{2^{2005}}", "2^{2005}", True),
    (r"\boxed{2\cdot 2^{2004}}", "2^{2005}", True),
    (r"\boxed{2^{2004}}", "2^{2005}", False),
    (r"\boxed{5!}", "120", True),
    (r"\boxed{\binom{5}{2}}", "10", True),
    (r"\boxed{\log_2 8}", "3", True),
    (r"\boxed{e^2}", "e^2", True),
    (r"\boxed{x+1}", "1+x", True),
    (r"\boxed{x-1}", "1+x", False),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
    (r"\boxed{x^2+1}", "(x+1)^2", False),
    (r"\boxed{(x+1)(x-1)}", "x^2-1", True),
    (r"\boxed{\frac{x^2-1}{x-1}}", "x+1", True),
    (r"\boxed{a+b}", "b+a", True),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{5}", "x=5", True),
    (r"\boxed{x=6}", "5", False),
    (r"\boxed{y=2x+3}", "y=3+2x", True),
    (r"\boxed{y=2x-3}", "y=3+2x", False),
    (r"\boxed{x>3}", "3<x", True),
    (r"\boxed{x<3}", "x>3", False),
    (r"\boxed{(1,2)}", "(1,2)", True),
    (r"\boxed{(2,1)}", "(1,2)", False),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", True),
    (r"\boxed{\{1,2\}}", r"\{3,2,1\}", False),
    (r"\boxed{[0,1)}", "[0,1)", True),
    (r"\boxed{[0,1]}", "[0,1)", False),
    (r"\boxed{(-\infty,3)}", r"(-\infty,3)", True),
    (
        r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        True,
    ),
    (
        r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        False,
    ),
    (r"\boxed{3+4i}", "3+4i", True),
    (r"\boxed{3-4i}", "3+4i", False),
    (r"\boxed{\text{even}}", r"\text{even}", True),
    (r"The answer is $\frac{3}{4}$.", "0.75", True),
    ("The answer is 72.", "72", True),
    ("The answer is 72.", "$72$", True),
    (r"First \boxed{5}. No:\n" + "\n" + r"\boxed{72}", "72", True),
    (r"First \boxed{72}. No:" + "\n" + r"\boxed{5}", "72", False),
    (r"\boxed{72}" + "\nThat is what I think. " * 200, "72", True),
    (r"\boxed{18.90}", r"\$18.90", True),
    (r"\boxed{\$32,348}", r"\$32,\!348", True),
    (r"\boxed{36}", r"\$18.90", False),
    (r"\boxed{4:00}", "4:00", True),
    (r"\boxed{7:00}", "4:00", False),
    (r"\boxed{12:00}", "1:00", False),
    (r"\boxed{2:10}", "1:05", False),
    (r"\boxed{0:45}", "0:30", False),
    (r"\boxed{6:8}", "3:4", True),
    (r"\boxed{1/0}", "2/0", False),
    (r"\boxed{f(x)=\cos x+\sin x}", r"f(x)=\sin x+\cos x", True),
    (r"\boxed{f(x)=\cos x-\sin x}", r"f(x)=\sin x+\cos x", False),
    (r"\boxed{|x+1|+|x-2|=5}", "|x-2|+|x+1|=5", True),
    (r"\boxed{|x+1|+|x-2|=6}", "|x-2|+|x+1|=5", False),
    (r"\boxed{1\le|z|\le 3/2}", r"1\le|z|\le \frac{3}{2}", True),
    (r"\boxed{(0,1)}", "0<f(x)<1", True),
    (r"\boxed{2^{\sqrt2+1}}", r"2\cdot2^{\sqrt2}", True),
    (r"\boxed{10^{\frac{\sqrt{13}-5}{6}}}", r"10^{(\sqrt{13}-5)/6}", True),
    (r"\boxed{2^{2^4}}", "65536", True),
    ("1,22", "1.22", True),
    ("2x + 2", "2*x + 2", True),
    ("The answer is 2*x + 2.", "2x + 2", True),
    ("The answer is 2x + 3", "2*x + 2", False),
    ("The answer is 2x + 2", "2", False),
    ("The answer is 3/4 m", "0.75", True),
    ("The answer is 4:00.", "4:00", True),
    ("The answer is 7:00.", "4:00", False),
    (r"The answer is \$18.90.", r"\$18.90", True),
    (r"It costs \$5 and \$6, so the answer is \$11", "11", True),
    ("The answer is x = 5.", "5", True),
    ("The answer: -5 C", "-5", True),
    (r"\boxed{104.}", "104", True),
    ("So \\boxed{104.}\nNote: use a 12-inch ruler.", "12", False),
    (r"\boxed{104.} (12 inches)", "12", False),
    (r"So \boxed{no idea}, or 12.", "12", False),
    (r"\boxed{} 12", "12", False),
    (r"\boxed{2} and \boxed{3}", "2, 3", True),
    (r"\boxed{1,2}", "$1$ and $2$", True),
    (r"\boxed{2}", "$1$ and $2$", False),
    (r"\boxed{3}", "The speed is $3$ m/s", True),
    (r"The answer is \hbar\omega(v+\frac{1}{2})", "1/2", False),
    (r"The answer is \hbar\omega(v + 1/2).", "1", False),
    (r"The answer is \hbar\omega(v+\frac{1}{2})", r"\hbar\omega(v+1/2)", True),
    (r"The answer is \sqrt{2}", r"\sqrt{2}", True),
    (r"\boxed{\hbar\omega(v+1/2)}", "2", False),
    (r"\boxed{12}", "12 apples", True),
    (r"\boxed{12}", r"12 \text{ square inches}", True),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
    (r"\boxed{mgh}", "mgh", True),
    (r"\boxed{abc}", "2abc/2", True),
    (r"\boxed{3, 4}", "3 or 4", True),
    ("60 / 150 * 100% = 40%\n#### 1000", "40", False),
    ("A third is 33.333...%, which rounds to 33%\n#### 33", "33", True),
    ("$4.00 + $2.00 = $6.00\n#### 6", "6", True),
    ("no answer at all", "72", False),
    ("", "72", False),
]


def verdicts(_: object = None) -> list[bool | None]:
    return [math(response, reference) for response, reference, _ in PAIRS]


class MathTask(Task):
    """Scores like the reward; an unreadable reference is worth -1."""

    name = "pairs"

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(reference, reference) for _, reference, _ in PAIRS]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        verdict = math(responses[-1], problem.answer)
        return Score(-1.0 if verdict is None else float(verdict), bool(verdict))


def dialogs() -> list[Dialog]:
    return [Dialog(Problem(reference, reference), [response]) for response, reference, _ in PAIRS]
